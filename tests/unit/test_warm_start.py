"""Warm-start rows are what a rollout would have stored, and imitation lowers the loss on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from services.training.model import build_tiny, train_tokenizer
from services.training.warm_start import Row, make_rows, run
from shared.events import Message, TrajectoryCompleted, TrajectoryStatus
from shared.recipe import TinyModel, WarmStart
from shared.tokens import ChatTokenizer

torch.set_num_threads(1)
TEXTS = ["left ice, right hole", "left", "left goal, right edge", "right", "done"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train_tokenizer(TEXTS * 20, vocab_size=350, folder=tmp_path)
    return tmp_path


@pytest.fixture
def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.from_folder(folder)


def transcript(texts: list[str]) -> TrajectoryCompleted:
    messages = [Message(role="assistant" if i % 2 else "user", content=text) for i, text in enumerate(texts)]
    return TrajectoryCompleted(
        run_id="r",
        trajectory_id="r/0.0#0",
        group_id="r/0",
        member=0,
        attempt=0,
        task="walk",
        purpose="warm_start",
        split="train",
        seed=0,
        status=TrajectoryStatus.FINISHED,
        messages=messages,
        started_at=0.0,
        completed_at=1.0,
    )


def tiny(folder: Path, *, seed: int = 0) -> PreTrainedModel:
    shape = TinyModel.model_validate({"hidden_size": 32, "layers": 1})
    return build_tiny(shape, tokenizer_folder=folder, context_window=64, seed=seed)


def weights(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def settings(**values: object) -> WarmStart:
    return WarmStart.model_validate({"steps": 30, "batch_size": 4, "learning_rate": 1e-2, **values})


def test_a_row_holds_the_ids_of_a_rollout_and_marks_its_actions(tokenizer: ChatTokenizer) -> None:
    (row,) = make_rows([transcript(TEXTS)], tokenizer, context_window=64)
    expected: list[int] = []
    mask: list[int] = []
    for part, sampled in (
        (tokenizer.opening_ids(TEXTS[0]), 0),
        (tokenizer.answer_ids(TEXTS[1]), 1),
        (tokenizer.turn_ids(TEXTS[2], ended=True), 0),
        (tokenizer.answer_ids(TEXTS[3]), 1),
    ):
        expected += part
        mask += [sampled] * len(part)
    assert (row.token_ids, row.mask) == (expected, mask)


def test_a_long_row_ends_with_the_last_answer_that_fits(tokenizer: ChatTokenizer) -> None:
    (whole,) = make_rows([transcript(TEXTS)], tokenizer, context_window=64)
    (cut,) = make_rows([transcript(TEXTS)], tokenizer, context_window=len(whole.token_ids) - 1)
    assert len(cut.token_ids) < len(whole.token_ids)
    assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids
    assert cut.mask[-1] == 1


def test_transcripts_without_an_answer_give_no_row(tokenizer: ChatTokenizer) -> None:
    assert make_rows([transcript([]), transcript(["only seen"])], tokenizer, context_window=64) == []
    assert make_rows([transcript(TEXTS)], tokenizer, context_window=4) == []


@pytest.mark.parametrize("loss_on", ["all", "actions"])
def test_imitation_lowers_the_loss(folder: Path, tokenizer: ChatTokenizer, loss_on: str) -> None:
    rows = make_rows([transcript(TEXTS)] * 6, tokenizer, context_window=64)
    losses = [p.loss for p in run(tiny(folder), rows, settings=settings(loss_on=loss_on), seed=0)]
    assert len(losses) == 30
    assert losses[-1] < 0.2 * losses[0]


def test_only_what_the_settings_name_is_in_the_loss(folder: Path, tokenizer: ChatTokenizer) -> None:
    (row,) = make_rows([transcript(TEXTS)], tokenizer, context_window=64)
    one = settings(steps=1, batch_size=1)
    (everything,) = run(tiny(folder), [row], settings=one, seed=0)
    (actions,) = run(tiny(folder), [row], settings=one.model_copy(update={"loss_on": "actions"}), seed=0)
    assert everything.tokens == len(row.token_ids) - 1
    assert actions.tokens == sum(row.mask)
    model = tiny(folder)
    ids = torch.tensor([row.token_ids])
    logprobs = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
    picked = -logprobs.gather(1, ids[0, 1:, None])[:, 0].detach()
    assert everything.loss == pytest.approx(float(picked.mean()), rel=1e-4)
    assert actions.loss == pytest.approx(float(picked[torch.tensor(row.mask[1:]).bool()].mean()), rel=1e-4)


def test_padding_and_micro_batches_change_nothing(
    folder: Path, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = transcript(TEXTS[:2]), transcript(TEXTS)
    rows = make_rows([short, long, short, long], tokenizer, context_window=64)
    together, apart = tiny(folder), tiny(folder)
    first = list(run(together, rows, settings=settings(steps=3), seed=0))
    monkeypatch.setattr("services.training.warm_start.MICRO_BATCH_TOKENS", {"cpu": 1})
    second = list(run(apart, rows, settings=settings(steps=3), seed=0))
    assert [p.loss for p in first] == pytest.approx([p.loss for p in second], rel=1e-4)
    torch.testing.assert_close(weights(together), weights(apart), rtol=1e-3, atol=1e-4)


def test_a_padding_id_inside_a_row_is_a_token_like_any_other(folder: Path) -> None:
    (progress,) = run(
        tiny(folder), [Row([5, 0, 0, 6], [0, 1, 1, 1])], settings=settings(steps=1, batch_size=1), seed=0
    )
    assert progress.tokens == 3


def test_the_seed_decides_the_result(folder: Path, tokenizer: ChatTokenizer) -> None:
    rows = make_rows([transcript(TEXTS[: 2 + 2 * (i % 2)]) for i in range(9)], tokenizer, context_window=64)

    def trained(seed: int) -> torch.Tensor:
        model = tiny(folder)
        list(run(model, rows, settings=settings(steps=5), seed=seed))
        return weights(model)

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))


def test_without_rows_or_steps_the_model_stays_as_it_is(folder: Path, tokenizer: ChatTokenizer) -> None:
    rows = make_rows([transcript(TEXTS)], tokenizer, context_window=64)
    model = tiny(folder)
    before = weights(model)
    assert list(run(model, [], settings=settings(), seed=0)) == []
    assert list(run(model, rows, settings=settings(steps=0), seed=0)) == []
    assert torch.equal(weights(model), before)
