"""The torch engine against the model's own full forward pass, and its promises about requests."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from engine_models import (
    CONFIGS,
    GREEDY,
    SMALL,
    VOCAB,
    ask,
    assert_agrees,
    build,
    drain,
    engine_for,
    prompt_of,
    raw_weights,
)
from transformers import (
    BloomConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
)

from services.generation.engines.torch_engine import TorchEngine
from services.generation.protocol import EngineRequest, EngineResult, load_weights
from shared.errors import Conflict, Internal, Invalid
from shared.events import FinishReason, Sampling
from shared.settings import GenerationSettings


@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_continuous_batching_equals_a_full_forward_pass(name: str, tmp_path: Path) -> None:
    model = build(name)
    engine = engine_for(tmp_path, model, name=name, prefill_tokens=48, max_batch=6)
    asked: dict[str, tuple[list[int], Sampling]] = {}
    results: dict[str, EngineResult] = {}
    for i, length in enumerate((1, 70, 3, 16, 17, 33, 2, 100, 15, 48)):
        sampling = Sampling(temperature=(0.0, 1.0, 0.7)[i % 3], max_tokens=3 + 5 * (i % 4))
        asked[str(i)] = (prompt_of(i, length), sampling)
        ask(engine, str(i), *asked[str(i)])
        results |= {result.request_id: result for result in engine.step()}
    results |= drain(engine)
    assert results.keys() == asked.keys()
    for key, (prompt, sampling) in asked.items():
        assert len(results[key].token_ids) == sampling.max_tokens
        assert_agrees(model, prompt, results[key], sampling)


def test_turns_of_a_session_reuse_their_kv_and_stay_exact(tmp_path: Path) -> None:
    model = build()
    engine = engine_for(tmp_path, model)
    history = {i: prompt_of(i, 5 + 7 * i) for i in range(6)}
    for turn in range(4):
        for i, tokens in history.items():
            ask(engine, f"{i}/{turn}", tokens, session=str(i))
        for key, result in drain(engine).items():
            i = int(key.partition("/")[0])
            assert_agrees(model, history[i], result, GREEDY)
            # All that went through the model before: everything but the last sampled token.
            assert result.cached_tokens == (len(history[i]) - 4 if turn else 0)
            history[i] = history[i] + result.token_ids + prompt_of(100 * turn + i, 3)


def test_a_changed_history_reuses_only_the_common_prefix(tmp_path: Path) -> None:
    model = build()
    engine = engine_for(tmp_path, model)
    prompt = prompt_of(0, 40)
    ask(engine, "a", prompt, session="s")
    drain(engine)
    changed = [*prompt[:21], (prompt[21] + 1) % VOCAB, *prompt[22:]]
    for name, tokens, cached in (("b", changed, 21), ("c", changed, 39), ("d", changed[:10], 9)):
        ask(engine, name, tokens, session="s")
        result = drain(engine)[name]
        assert result.cached_tokens == cached
        assert_agrees(model, tokens, result, GREEDY)


def test_a_forgotten_session_holds_nothing(tmp_path: Path) -> None:
    engine = engine_for(tmp_path)
    ask(engine, "a", prompt_of(0, 40), session="s")
    drain(engine)
    engine.forget("s")
    ask(engine, "b", prompt_of(0, 40), session="s")
    engine.step()
    engine.forget("s")
    assert drain(engine)["b"].cached_tokens == 0
    assert engine._pool.free == engine._pool.capacity


def test_draws_depend_on_seed_and_request_alone(tmp_path: Path) -> None:
    sampling = Sampling(temperature=1.0, max_tokens=12)
    alone = engine_for(tmp_path, build())
    ask(alone, "x", prompt_of(1, 20), sampling)
    expected = drain(alone)["x"]
    crowded = engine_for(tmp_path, build(), prefill_tokens=16)
    for i in range(9):
        ask(crowded, f"other{i}", prompt_of(50 + i, 3 + 9 * i), sampling)
    crowded.step()
    ask(crowded, "x", prompt_of(1, 20), sampling)
    result = drain(crowded)["x"]
    assert result.token_ids == expected.token_ids
    assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_an_abort_frees_its_own_request_and_no_newer_one(tmp_path: Path) -> None:
    model = build()
    engine = engine_for(tmp_path, model, max_batch=1)
    prompt = prompt_of(8, 40)
    for name in ("x", "y"):
        ask(engine, name, prompt, Sampling(max_tokens=50))
    engine.step()
    with pytest.raises(Conflict):
        ask(engine, "x", prompt)
    assert engine.abort("x")
    assert engine.abort("y")
    assert not engine.abort("x")
    assert not engine.has_work
    assert engine.kv_usage == 0.0
    ask(engine, "x", prompt)
    assert_agrees(model, prompt, drain(engine)["x"], GREEDY)
    assert not engine.abort("x")


@pytest.mark.parametrize("sessions", ["own", "shared"])
def test_everything_completes_when_the_cache_holds_only_a_few(sessions: str, tmp_path: Path) -> None:
    model = build()
    engine = engine_for(tmp_path, model, cache_tokens=256, prefill_tokens=64)
    sampling = Sampling(temperature=0.0, max_tokens=17)
    prompts = {str(i): prompt_of(i, 30 + 15 * i) for i in range(6)}
    for turn in range(2):
        for name, prompt in prompts.items():
            ask(engine, name, prompt, sampling, session=name if sessions == "own" else "s")
        most = 0.0
        results: dict[str, EngineResult] = {}
        while engine.has_work:
            results |= {result.request_id: result for result in engine.step()}
            most = max(most, engine.kv_usage)
        assert 0.5 < most <= 1.0, turn
        for name, prompt in prompts.items():
            assert_agrees(model, prompt, results[name], sampling)
    assert engine.kv_usage == 0.0
    assert engine._pool.free + engine._pool.cached == engine._pool.capacity


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_events_keeps_results_exact_and_blocks_accounted(seed: int, tmp_path: Path) -> None:
    models = {version: build(seed=version) for version in (1, 2)}
    engine = engine_for(tmp_path, models[1], cache_tokens=256, prefill_tokens=32, max_batch=5)
    rng = random.Random(seed)
    history: dict[str, list[int]] = {}
    live: dict[str, EngineRequest] = {}
    for event in range(80):
        session = str(rng.randrange(7))
        match rng.choice(["ask", "ask", "step", "step", "step", "abort", "load", "forget"]):
            case "ask":
                past = history.get(session, [])[: rng.randrange(90)]
                prompt = past + prompt_of(event, rng.randint(1, 30))
                sampling = Sampling(temperature=0.0, max_tokens=rng.randint(1, 12))
                live[str(event)] = ask(engine, str(event), prompt, sampling, session=session)
            case "abort" if live:
                name = rng.choice(list(live))
                assert engine.abort(name)
                del live[name]
            case "load":
                version = rng.choice((1, 2))
                load_weights(engine, raw_weights(models[version]), version=version)
            case "forget":
                engine.forget(session)
            case _:
                for result in engine.step():
                    request = live.pop(result.request_id)
                    history[request.session] = request.prompt_ids + result.token_ids
                    if len(result.versions) == 1:
                        model = models[result.versions[0][0]]
                        assert_agrees(model, request.prompt_ids, result, request.sampling)
        pool = engine._pool
        held = [block for sequence in engine._live.values() for block in sequence.blocks]
        assert pool.free + pool.cached + len(held) == pool.capacity
        assert len(set(held)) == len(held)
    assert drain(engine).keys() == live.keys()


def test_a_request_larger_than_the_cache_is_refused(tmp_path: Path) -> None:
    LlamaConfig(**SMALL | {"max_position_embeddings": 1000}).save_pretrained(tmp_path)
    engine = TorchEngine.create(tmp_path, settings=GenerationSettings(cache_tokens=256), seed=0)
    with pytest.raises(Invalid, match=r"reach 300 tokens.*CACHE_TOKENS holds 256"):
        ask(engine, "a", prompt_of(0, 100), Sampling(max_tokens=200))
    assert not engine.has_work


def test_a_long_prompt_does_not_hold_up_the_others(tmp_path: Path) -> None:
    engine = engine_for(tmp_path, prefill_tokens=16)
    ask(engine, "short", prompt_of(0, 4), Sampling(max_tokens=6))
    engine.step()
    ask(engine, "long", prompt_of(1, 150), Sampling(max_tokens=1))
    finished = [[result.request_id for result in engine.step()] for _ in range(10)]
    assert finished[4] == ["short"]
    assert finished[9] == ["long"]


def test_no_step_moves_or_grows_what_holds_the_kv(tmp_path: Path) -> None:
    engine = engine_for(tmp_path, cache_tokens=4096)
    ask(engine, "first", prompt_of(0, 4), Sampling(max_tokens=1))
    drain(engine)

    def places() -> list[tuple[int, int]]:
        return [(pool.data_ptr(), pool.numel()) for pair in engine._store.layers.values() for pool in pair]

    before = places()
    assert len(before) == 4
    for i in range(6):
        ask(engine, f"r{i}", prompt_of(i, 10 + 20 * i), Sampling(max_tokens=40))
    drain(engine)
    assert places() == before


def test_the_context_window_clips_and_is_told(tmp_path: Path) -> None:
    engine = engine_for(tmp_path)
    prompt = prompt_of(0, 90)
    engine.add(EngineRequest("a", "a", prompt, Sampling(max_tokens=20), 100))
    engine.add(EngineRequest("b", "b", prompt_of(1, 150), Sampling(max_tokens=20), 1000))
    results = drain(engine)
    assert (len(results["a"].token_ids), results["a"].finish_reason) == (10, FinishReason.CONTEXT)
    assert (len(results["b"].token_ids), results["b"].finish_reason) == (10, FinishReason.CONTEXT)
    with pytest.raises(Invalid, match=r"90 tokens.*window 90"):
        engine.add(EngineRequest("c", "c", prompt, Sampling(), 90))


def test_a_stop_token_ends_the_turn_and_is_kept(tmp_path: Path) -> None:
    engine = engine_for(tmp_path, build())
    ask(engine, "a", prompt_of(2, 9), Sampling(temperature=0.0, max_tokens=10))
    free = drain(engine)["a"]
    stop = free.token_ids[3]
    ask(engine, "b", prompt_of(2, 9), Sampling(temperature=0.0, max_tokens=10, stop_token_ids=(stop,)))
    result = drain(engine)["b"]
    assert free.finish_reason is FinishReason.LENGTH
    assert result.finish_reason is FinishReason.STOP
    assert result.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1], [3] * 160])
def test_a_prompt_that_cannot_be_sampled_is_refused(prompt: list[int], tmp_path: Path) -> None:
    engine = engine_for(tmp_path)
    with pytest.raises(Invalid):
        ask(engine, "a", prompt)
    assert not engine.has_work


@torch.no_grad()
def test_logits_that_are_not_finite_fail_their_request_alone(tmp_path: Path) -> None:
    engine = engine_for(tmp_path, build("llama_untied"), name="llama_untied", cache_tokens=256)
    dict(engine._model.named_parameters())["model.embed_tokens.weight"][7] = math.nan
    good, bad = [t % 7 for t in prompt_of(9, 39)], [*prompt_of(9, 12), 7, 4, 4, 4]
    for name, prompt in (("bad", bad), ("good", good)):
        ask(engine, name, prompt, Sampling(temperature=0.0, max_tokens=1))
    results = drain(engine)
    assert isinstance(results["bad"].error, Internal)
    assert results["bad"].token_ids == []
    assert results["good"].error is None
    for i in range(5):  # these take over the block that held NaN
        ask(engine, f"later{i}", good, Sampling(temperature=0.0, max_tokens=1))
    for result in drain(engine).values():
        assert result.token_ids == results["good"].token_ids


def test_timings_cover_the_life_of_a_request(tmp_path: Path) -> None:
    engine = engine_for(tmp_path, max_batch=1)
    for name in ("a", "b"):
        ask(engine, name, prompt_of(0, 8))
    results = drain(engine)
    assert results["b"].queued_s >= results["a"].prefill_s + results["a"].decode_s > 0
    assert min(results["b"].prefill_s, results["b"].decode_s) > 0


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SMALL, sliding_window=16),
        BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.25),
    ],
    ids=["sliding_window", "alibi"],
)
def test_a_model_whose_attention_is_not_computed_here_is_refused(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(Invalid):
        TorchEngine.create(tmp_path, settings=GenerationSettings(), seed=0)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="no causal language model"):
        TorchEngine.create(tmp_path, settings=GenerationSettings(), seed=0)
