"""The engine without a model keeps the protocol."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.generation.engines.instant import InstantEngine
from services.generation.protocol import Engine, EngineRequest, load_weights
from shared.errors import Conflict, Invalid
from shared.events import FinishReason, Sampling
from shared.settings import GenerationSettings


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    (tmp_path / "config.json").write_text('{"vocab_size": 50, "max_position_embeddings": 100}')
    return InstantEngine.create(tmp_path, settings=GenerationSettings(max_batch=2), seed=0)


def _request(name: str, prompt: int = 3, **sampling: object) -> EngineRequest:
    return EngineRequest(name, name, [1] * prompt, Sampling.model_validate(sampling), 100)


def test_every_request_is_answered_by_the_next_step(engine: Engine) -> None:
    load_weights(engine, {}, version=7)
    engine.add(_request("a", max_tokens=20))
    (result,) = engine.step()
    assert (result.request_id, len(result.token_ids), len(result.logprobs)) == ("a", 20, 20)
    assert result.logprobs[1] == pytest.approx(-0.2469134)
    assert result.versions == [(7, 20)]
    assert result.finish_reason is FinishReason.LENGTH
    assert not engine.has_work


def test_a_step_answers_at_most_a_batch_and_none_is_left_behind(engine: Engine) -> None:
    for name in "abc":
        engine.add(_request(name))
    assert engine.waiting == 3
    assert [r.request_id for r in engine.step()] == ["a", "b"]
    assert [r.request_id for r in engine.step()] == ["c"]


def test_context_window_and_stop_tokens_end_a_turn(engine: Engine) -> None:
    engine.add(_request("full", prompt=90, max_tokens=20))
    engine.add(_request("stop", max_tokens=20, stop_token_ids=[4]))
    full, stop = engine.step()
    assert (len(full.token_ids), full.finish_reason) == (10, FinishReason.CONTEXT)
    assert (stop.token_ids, stop.finish_reason) == ([1, 2, 3, 4], FinishReason.STOP)


def test_token_ids_stay_inside_the_vocabulary(engine: Engine) -> None:
    engine.add(_request("a", prompt=1, max_tokens=99))
    (result,) = engine.step()
    assert max(result.token_ids) < 50


def test_bad_requests_are_refused(engine: Engine) -> None:
    for prompt in ([], [50], [-1], [1] * 100):
        with pytest.raises(Invalid):
            engine.add(EngineRequest("x", "x", prompt, Sampling(), 100))
    engine.add(_request("a"))
    with pytest.raises(Conflict):
        engine.add(_request("a"))
    assert engine.waiting == 1


def test_an_aborted_request_gets_no_result(engine: Engine) -> None:
    engine.add(_request("a"))
    assert engine.abort("a")
    assert not engine.abort("a")
    assert engine.step() == []


def test_a_folder_without_configuration_accepts_anything_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    engine = InstantEngine.create(tmp_path, settings=GenerationSettings(), seed=0)
    engine.add(_request("a", max_tokens=5))
    assert len(engine.step()) == 1
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(Invalid, match=r"config\.json"):
        InstantEngine.create(tmp_path, settings=GenerationSettings(), seed=0)


def test_it_needs_no_torch() -> None:
    code = "import sys, services.generation.engines.instant; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
