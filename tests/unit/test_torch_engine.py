"""The torch engine against the model's own full forward pass, and its promises about requests and weights."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from services.generation.engines.torch_engine import TorchEngine
from services.generation.protocol import Engine, EngineRequest, EngineResult
from shared.errors import Conflict, Internal, Invalid, WeightsInvalid
from shared.events import FinishReason, Sampling
from shared.settings import GenerationSettings
from shared.weights import RawTensor

torch.set_num_threads(1)
VOCAB = 60
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.25,
}
GREEDY = Sampling(temperature=0.0, max_tokens=6)
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SMALL, tie_word_embeddings=True),
    "llama_untied": LlamaConfig(**_SMALL, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**_SMALL),
    "qwen3": Qwen3Config(**_SMALL, head_dim=8),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=160, initializer_range=0.25
    ),
}


def _model(name: str = "llama", seed: int = 1) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        CONFIGS[name], attn_implementation="eager"
    )
    model.train(False)
    return model


def _raw(model: PreTrainedModel) -> dict[str, RawTensor]:
    return {
        name: RawTensor(dtype="F32", shape=tuple(t.shape), data=t.detach().numpy().tobytes())
        for name, t in model.state_dict().items()
    }


def _engine(
    folder: Path, model: PreTrainedModel | None = None, *, name: str = "llama", **settings: int
) -> TorchEngine:
    CONFIGS[name].save_pretrained(folder)
    engine = TorchEngine.create(folder, settings=GenerationSettings.model_validate(settings), seed=0)
    if model is not None:
        engine.load(_raw(model), version=1)
    return engine


def _drain(engine: Engine) -> dict[str, EngineResult]:
    results: dict[str, EngineResult] = {}
    for _ in range(2000):
        if not engine.has_work:
            return results
        results |= {result.request_id: result for result in engine.step()}
    raise AssertionError("the engine does not finish")


def _prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def _ask(
    engine: TorchEngine,
    name: str,
    prompt: list[int],
    sampling: Sampling = GREEDY,
    *,
    session: str | None = None,
) -> EngineRequest:
    request = EngineRequest(name, session or name, prompt, sampling, 1000)
    engine.add(request)
    return request


@torch.no_grad()
def _agrees(model: PreTrainedModel, prompt: list[int], result: EngineResult, sampling: Sampling) -> None:
    """Every reported log-probability, and every greedy choice, is what one full forward pass gives."""
    assert result.error is None
    tokens = prompt + result.token_ids
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
    if sampling.temperature == 0:
        assert logits.argmax(-1).tolist() == result.token_ids
    wanted = logprobs[range(len(result.token_ids)), result.token_ids].tolist()
    assert result.logprobs == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_continuous_batching_equals_a_full_forward_pass(name: str, tmp_path: Path) -> None:
    model = _model(name)
    engine = _engine(tmp_path, model, name=name, prefill_tokens=48, max_batch=6)
    asked: dict[str, tuple[list[int], Sampling]] = {}
    results: dict[str, EngineResult] = {}
    for i, length in enumerate((1, 70, 3, 16, 17, 33, 2, 100, 15, 48)):
        sampling = Sampling(temperature=(0.0, 1.0, 0.7)[i % 3], max_tokens=3 + 5 * (i % 4))
        asked[str(i)] = (_prompt(i, length), sampling)
        _ask(engine, str(i), *asked[str(i)])
        results |= {result.request_id: result for result in engine.step()}
    results |= _drain(engine)
    assert results.keys() == asked.keys()
    for key, (prompt, sampling) in asked.items():
        assert len(results[key].token_ids) == sampling.max_tokens
        _agrees(model, prompt, results[key], sampling)


def test_turns_of_a_session_reuse_their_kv_and_stay_exact(tmp_path: Path) -> None:
    model = _model()
    engine = _engine(tmp_path, model)
    history = {i: _prompt(i, 5 + 7 * i) for i in range(6)}
    for turn in range(4):
        for i, tokens in history.items():
            _ask(engine, f"{i}/{turn}", tokens, session=str(i))
        for key, result in _drain(engine).items():
            i = int(key.partition("/")[0])
            _agrees(model, history[i], result, GREEDY)
            # All that went through the model before: everything but the last sampled token.
            assert result.cached_tokens == (len(history[i]) - 4 if turn else 0)
            history[i] = history[i] + result.token_ids + _prompt(100 * turn + i, 3)


def test_a_changed_history_reuses_only_the_common_prefix(tmp_path: Path) -> None:
    model = _model()
    engine = _engine(tmp_path, model)
    prompt = _prompt(0, 40)
    _ask(engine, "a", prompt, session="s")
    _drain(engine)
    changed = [*prompt[:21], (prompt[21] + 1) % VOCAB, *prompt[22:]]
    for name, tokens, cached in (("b", changed, 21), ("c", changed, 39), ("d", changed[:10], 9)):
        _ask(engine, name, tokens, session="s")
        result = _drain(engine)[name]
        assert result.cached_tokens == cached
        _agrees(model, tokens, result, GREEDY)


def test_a_forgotten_session_holds_nothing(tmp_path: Path) -> None:
    engine = _engine(tmp_path)
    _ask(engine, "a", _prompt(0, 40), session="s")
    _drain(engine)
    engine.forget("s")
    _ask(engine, "b", _prompt(0, 40), session="s")
    engine.step()
    engine.forget("s")
    assert _drain(engine)["b"].cached_tokens == 0
    assert engine._pool.free == engine._pool.capacity


def test_draws_depend_on_seed_and_request_alone(tmp_path: Path) -> None:
    sampling = Sampling(temperature=1.0, max_tokens=12)
    alone = _engine(tmp_path, _model())
    _ask(alone, "x", _prompt(1, 20), sampling)
    expected = _drain(alone)["x"]
    crowded = _engine(tmp_path, _model(), prefill_tokens=16)
    for i in range(9):
        _ask(crowded, f"other{i}", _prompt(50 + i, 3 + 9 * i), sampling)
    crowded.step()
    _ask(crowded, "x", _prompt(1, 20), sampling)
    result = _drain(crowded)["x"]
    assert result.token_ids == expected.token_ids
    assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_no_kv_of_old_weights_survives_a_load(tmp_path: Path) -> None:
    old, new = _model(seed=1), _model(seed=2)
    engine = _engine(tmp_path, old)
    prompt = _prompt(3, 50)
    _ask(engine, "v1", prompt, session="s")
    _drain(engine)
    engine.load(_raw(new), version=2)
    _ask(engine, "v2", prompt, session="s")
    result = _drain(engine)["v2"]
    fresh = _engine(tmp_path, new)
    _ask(fresh, "v2", prompt, session="s")
    expected = _drain(fresh)["v2"]
    assert (result.cached_tokens, result.versions) == (0, [(2, 6)])
    assert (result.token_ids, result.logprobs) == (expected.token_ids, expected.logprobs)


@torch.no_grad()
def test_live_requests_go_on_under_new_weights_with_versions_per_token(tmp_path: Path) -> None:
    old, new = _model(seed=1), _model(seed=2)
    engine = _engine(tmp_path, old)
    prompt = _prompt(4, 30)
    _ask(engine, "warm", prompt, session="s")
    _drain(engine)
    _ask(engine, "a", prompt, Sampling(temperature=0.0, max_tokens=10), session="s")
    for _ in range(4):
        engine.step()
    engine.load(_raw(new), version=5)
    result = _drain(engine)["a"]
    assert result.versions == [(1, 4), (5, 6)]
    assert result.cached_tokens == 0
    tokens = torch.tensor([prompt + result.token_ids])
    for model, part in ((old, slice(0, 4)), (new, slice(4, 10))):
        logprobs = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)[part]
        assert logprobs.argmax(-1).tolist() == result.token_ids[part]
        assert result.logprobs[part] == pytest.approx(logprobs.amax(-1).tolist(), abs=1e-5)


def test_going_back_to_earlier_weights_is_bit_identical(tmp_path: Path) -> None:
    first, second = _raw(_model(seed=1)), _raw(_model(seed=2))
    engine = _engine(tmp_path)
    seen = []
    for version, weights in enumerate((first, second, first), start=1):
        engine.load(weights, version=version)
        _ask(engine, "x", _prompt(5, 33), Sampling(max_tokens=9), session="s")
        result = _drain(engine)["x"]
        seen.append((result.token_ids, result.logprobs))
    assert seen[0] == seen[2] != seen[1]


def _damage(weights: dict[str, RawTensor], kind: str) -> dict[str, RawTensor]:
    name = "model.layers.1.mlp.up_proj.weight"
    good = weights[name]
    if kind == "missing":
        return {key: tensor for key, tensor in weights.items() if key != name}
    if kind == "unknown":
        return weights | {"model.extra": good}
    if kind == "untied":
        return weights | {
            "lm_head.weight": dataclasses.replace(weights["lm_head.weight"], data=_nan(weights, 0.5))
        }
    changed = {
        "shape": dataclasses.replace(good, shape=good.shape[::-1]),
        "dtype": dataclasses.replace(good, dtype="BF16"),
        "short": dataclasses.replace(good, data=bytes(good.data)[:-4]),
        "nan": dataclasses.replace(
            good, data=bytes(good.data)[:-4] + torch.tensor(math.nan).numpy().tobytes()
        ),
    }
    return weights | {name: changed[kind]}


def _nan(weights: dict[str, RawTensor], value: float) -> bytes:
    return torch.full(weights["lm_head.weight"].shape, value).numpy().tobytes()


@pytest.mark.parametrize("kind", ["missing", "unknown", "untied", "shape", "dtype", "short", "nan"])
def test_a_failed_load_leaves_the_old_version_live_and_labelled(kind: str, tmp_path: Path) -> None:
    old = _model(seed=1)
    engine = _engine(tmp_path, old)
    with pytest.raises(WeightsInvalid):
        engine.load(_damage(_raw(_model(seed=2)), kind), version=2)
    assert engine.version == 1
    prompt = _prompt(6, 20)
    _ask(engine, "a", prompt)
    result = _drain(engine)["a"]
    assert result.versions == [(1, 6)]
    _agrees(old, prompt, result, GREEDY)


def test_one_name_of_tied_tensors_is_enough(tmp_path: Path) -> None:
    model = _model()
    weights = _raw(model)
    del weights["lm_head.weight"]
    engine = _engine(tmp_path)
    engine.load(weights, version=3)
    prompt = _prompt(7, 12)
    _ask(engine, "a", prompt)
    _agrees(model, prompt, _drain(engine)["a"], GREEDY)


def test_an_abort_frees_its_own_request_and_no_newer_one(tmp_path: Path) -> None:
    model = _model()
    engine = _engine(tmp_path, model, max_batch=1)
    prompt = _prompt(8, 40)
    for name in ("x", "y"):
        _ask(engine, name, prompt, Sampling(max_tokens=50))
    engine.step()
    with pytest.raises(Conflict):
        _ask(engine, "x", prompt)
    assert engine.abort("x")
    assert engine.abort("y")
    assert not engine.abort("x")
    assert not engine.has_work
    assert engine.kv_usage == 0.0
    _ask(engine, "x", prompt)
    _agrees(model, prompt, _drain(engine)["x"], GREEDY)
    assert not engine.abort("x")


@pytest.mark.parametrize("sessions", ["own", "shared"])
def test_everything_completes_when_the_cache_holds_only_a_few(sessions: str, tmp_path: Path) -> None:
    model = _model()
    engine = _engine(tmp_path, model, cache_tokens=256, prefill_tokens=64)
    sampling = Sampling(temperature=0.0, max_tokens=17)
    prompts = {str(i): _prompt(i, 30 + 15 * i) for i in range(6)}
    for turn in range(2):
        for name, prompt in prompts.items():
            _ask(engine, name, prompt, sampling, session=name if sessions == "own" else "s")
        most = 0.0
        results: dict[str, EngineResult] = {}
        while engine.has_work:
            results |= {result.request_id: result for result in engine.step()}
            most = max(most, engine.kv_usage)
        assert 0.5 < most <= 1.0, turn
        for name, prompt in prompts.items():
            _agrees(model, prompt, results[name], sampling)
    assert engine.kv_usage == 0.0
    assert engine._pool.free + engine._pool.cached == engine._pool.capacity


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_events_keeps_results_exact_and_blocks_accounted(seed: int, tmp_path: Path) -> None:
    models = {version: _model(seed=version) for version in (1, 2)}
    engine = _engine(tmp_path, models[1], cache_tokens=256, prefill_tokens=32, max_batch=5)
    rng = random.Random(seed)
    history: dict[str, list[int]] = {}
    live: dict[str, EngineRequest] = {}
    for event in range(80):
        session = str(rng.randrange(7))
        match rng.choice(["ask", "ask", "step", "step", "step", "abort", "load", "forget"]):
            case "ask":
                past = history.get(session, [])[: rng.randrange(90)]
                prompt = past + _prompt(event, rng.randint(1, 30))
                sampling = Sampling(temperature=0.0, max_tokens=rng.randint(1, 12))
                live[str(event)] = _ask(engine, str(event), prompt, sampling, session=session)
            case "abort" if live:
                name = rng.choice(list(live))
                assert engine.abort(name)
                del live[name]
            case "load":
                version = rng.choice((1, 2))
                engine.load(_raw(models[version]), version=version)
            case "forget":
                engine.forget(session)
            case _:
                for result in engine.step():
                    request = live.pop(result.request_id)
                    history[request.session] = request.prompt_ids + result.token_ids
                    if len(result.versions) == 1:
                        model = models[result.versions[0][0]]
                        _agrees(model, request.prompt_ids, result, request.sampling)
        pool = engine._pool
        held = [block for sequence in engine._live.values() for block in sequence.blocks]
        assert pool.free + pool.cached + len(held) == pool.capacity
        assert len(set(held)) == len(held)
    assert _drain(engine).keys() == live.keys()


def test_a_request_larger_than_the_cache_is_refused(tmp_path: Path) -> None:
    LlamaConfig(**_SMALL | {"max_position_embeddings": 1000}).save_pretrained(tmp_path)
    engine = TorchEngine.create(tmp_path, settings=GenerationSettings(cache_tokens=256), seed=0)
    with pytest.raises(Invalid, match=r"reach 300 tokens.*CACHE_TOKENS holds 256"):
        _ask(engine, "a", _prompt(0, 100), Sampling(max_tokens=200))
    assert not engine.has_work


def test_a_long_prompt_does_not_hold_up_the_others(tmp_path: Path) -> None:
    engine = _engine(tmp_path, prefill_tokens=16)
    _ask(engine, "short", _prompt(0, 4), Sampling(max_tokens=6))
    engine.step()
    _ask(engine, "long", _prompt(1, 150), Sampling(max_tokens=1))
    finished = [[result.request_id for result in engine.step()] for _ in range(10)]
    assert finished[4] == ["short"]
    assert finished[9] == ["long"]


def test_the_context_window_clips_and_is_told(tmp_path: Path) -> None:
    engine = _engine(tmp_path)
    prompt = _prompt(0, 90)
    engine.add(EngineRequest("a", "a", prompt, Sampling(max_tokens=20), 100))
    engine.add(EngineRequest("b", "b", _prompt(1, 150), Sampling(max_tokens=20), 1000))
    results = _drain(engine)
    assert (len(results["a"].token_ids), results["a"].finish_reason) == (10, FinishReason.CONTEXT)
    assert (len(results["b"].token_ids), results["b"].finish_reason) == (10, FinishReason.CONTEXT)
    with pytest.raises(Invalid, match=r"90 tokens.*window 90"):
        engine.add(EngineRequest("c", "c", prompt, Sampling(), 90))


def test_a_stop_token_ends_the_turn_and_is_kept(tmp_path: Path) -> None:
    engine = _engine(tmp_path, _model())
    _ask(engine, "a", _prompt(2, 9), Sampling(temperature=0.0, max_tokens=10))
    free = _drain(engine)["a"]
    stop = free.token_ids[3]
    _ask(engine, "b", _prompt(2, 9), Sampling(temperature=0.0, max_tokens=10, stop_token_ids=(stop,)))
    result = _drain(engine)["b"]
    assert free.finish_reason is FinishReason.LENGTH
    assert result.finish_reason is FinishReason.STOP
    assert result.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1], [3] * 160])
def test_a_prompt_that_cannot_be_sampled_is_refused(prompt: list[int], tmp_path: Path) -> None:
    engine = _engine(tmp_path)
    with pytest.raises(Invalid):
        _ask(engine, "a", prompt)
    assert not engine.has_work


@torch.no_grad()
def test_logits_that_are_not_finite_fail_their_request_alone(tmp_path: Path) -> None:
    engine = _engine(tmp_path, _model("llama_untied"), name="llama_untied", cache_tokens=256)
    dict(engine._model.named_parameters())["model.embed_tokens.weight"][7] = math.nan
    good, bad = [t % 7 for t in _prompt(9, 39)], [*_prompt(9, 12), 7, 4, 4, 4]
    for name, prompt in (("bad", bad), ("good", good)):
        _ask(engine, name, prompt, Sampling(temperature=0.0, max_tokens=1))
    results = _drain(engine)
    assert isinstance(results["bad"].error, Internal)
    assert results["bad"].token_ids == []
    assert results["good"].error is None
    for i in range(5):  # these take over the block that held NaN
        _ask(engine, f"later{i}", good, Sampling(temperature=0.0, max_tokens=1))
    for result in _drain(engine).values():
        assert result.token_ids == results["good"].token_ids


def test_timings_cover_the_life_of_a_request(tmp_path: Path) -> None:
    engine = _engine(tmp_path, max_batch=1)
    for name in ("a", "b"):
        _ask(engine, name, _prompt(0, 8))
    results = _drain(engine)
    assert results["b"].queued_s >= results["a"].prefill_s + results["a"].decode_s > 0
    assert min(results["b"].prefill_s, results["b"].decode_s) > 0


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**_SMALL, sliding_window=16),
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
