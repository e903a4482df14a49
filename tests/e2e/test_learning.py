"""One command trains a model: it learns, and leaves everything a user was promised."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.training import checkpoint
from shared.archive import TrajectoryArchive
from shared.events import CONTEXT_VERSION
from tests.e2e.stack import ROOT, leftovers, rollart_run


@pytest.mark.timeout(400)
def test_one_command_trains_a_model_that_learns(tmp_path: Path) -> None:
    with rollart_run(ROOT / "recipes" / "smoke.toml", tmp_path) as job:
        summary = job.finish(timeout_s=300)
        folder = job.run_folder
    assert folder is not None
    assert leftovers(tmp_path) == []

    for name, task in summary.tasks.items():
        assert task.reward_before is not None
        assert task.reward_after is not None
        assert task.reward_after - task.reward_before >= 0.2, f"{name} did not learn: {task}"
    assert summary.state == "finished"
    assert summary.groups.in_flight == 0
    assert summary.lag.max <= 1
    assert summary.versions == summary.steps

    model = AutoModelForCausalLM.from_pretrained(folder / "export")
    tokenizer = AutoTokenizer.from_pretrained(folder / "export")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert model.generate(**ids, max_new_tokens=4, do_sample=False).shape[1] > ids["input_ids"].shape[1]

    report = (folder / "report.html").read_text()
    assert "<svg" in report
    assert "http://" not in report.replace("http://www.w3.org", "")
    assert list((folder / "tensorboard").iterdir())
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    assert checkpoint.load(newest).ledger["version"] == summary.versions

    trained = [s.trajectory for s in TrajectoryArchive(folder / "trajectories").iterate()
               if s.trajectory.purpose == "train"]  # fmt: skip
    assert sum(sum(t.mask) for t in trained) == summary.tokens.sampled
    for trajectory in trained[:200]:
        for mask, version, logprob in zip(
            trajectory.mask, trajectory.versions, trajectory.logprobs, strict=True
        ):
            assert (version == CONTEXT_VERSION) == (mask == 0)
            assert logprob <= 0.0
            assert mask == 0 or version >= trajectory.start_version
