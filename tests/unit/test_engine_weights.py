"""New weights between two steps: nothing old survives, nothing broken gets in."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from engine_models import (
    GREEDY,
    ask,
    assert_agrees,
    build,
    drain,
    engine_for,
    prompt_of,
    raw_weights,
)

from services.generation.protocol import load_weights
from shared.errors import WeightsInvalid
from shared.events import Sampling
from shared.weights import RawTensor


def test_no_kv_of_old_weights_survives_a_load(tmp_path: Path) -> None:
    old, new = build(seed=1), build(seed=2)
    engine = engine_for(tmp_path, old)
    prompt = prompt_of(3, 50)
    ask(engine, "v1", prompt, session="s")
    drain(engine)
    load_weights(engine, raw_weights(new), version=2)
    ask(engine, "v2", prompt, session="s")
    result = drain(engine)["v2"]
    fresh = engine_for(tmp_path, new)
    ask(fresh, "v2", prompt, session="s")
    expected = drain(fresh)["v2"]
    assert (result.cached_tokens, result.versions) == (0, [(2, 6)])
    assert (result.token_ids, result.logprobs) == (expected.token_ids, expected.logprobs)


@torch.no_grad()
def test_live_requests_go_on_under_new_weights_with_versions_per_token(tmp_path: Path) -> None:
    old, new = build(seed=1), build(seed=2)
    engine = engine_for(tmp_path, old)
    prompt = prompt_of(4, 30)
    ask(engine, "warm", prompt, session="s")
    drain(engine)
    ask(engine, "a", prompt, Sampling(temperature=0.0, max_tokens=10), session="s")
    for _ in range(4):
        engine.step()
    load_weights(engine, raw_weights(new), version=5)
    result = drain(engine)["a"]
    assert result.versions == [(1, 4), (5, 6)]
    assert result.cached_tokens == 0
    tokens = torch.tensor([prompt + result.token_ids])
    for model, part in ((old, slice(0, 4)), (new, slice(4, 10))):
        logprobs = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)[part]
        assert logprobs.argmax(-1).tolist() == result.token_ids[part]
        assert result.logprobs[part] == pytest.approx(logprobs.amax(-1).tolist(), abs=1e-5)


def test_going_back_to_earlier_weights_is_bit_identical(tmp_path: Path) -> None:
    first, second = raw_weights(build(seed=1)), raw_weights(build(seed=2))
    engine = engine_for(tmp_path)
    seen = []
    for version, weights in enumerate((first, second, first), start=1):
        load_weights(engine, weights, version=version)
        ask(engine, "x", prompt_of(5, 33), Sampling(max_tokens=9), session="s")
        result = drain(engine)["x"]
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
            "lm_head.weight": dataclasses.replace(weights["lm_head.weight"], data=_filled(weights, 0.5))
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


def _filled(weights: dict[str, RawTensor], value: float) -> bytes:
    return torch.full(weights["lm_head.weight"].shape, value).numpy().tobytes()


@pytest.mark.parametrize("kind", ["missing", "unknown", "untied", "shape", "dtype", "short", "nan"])
def test_a_failed_load_leaves_the_old_version_live_and_labelled(kind: str, tmp_path: Path) -> None:
    old = build(seed=1)
    engine = engine_for(tmp_path, old)
    with pytest.raises(WeightsInvalid):
        load_weights(engine, _damage(raw_weights(build(seed=2)), kind), version=2)
    assert engine.version == 1
    prompt = prompt_of(6, 20)
    ask(engine, "a", prompt)
    result = drain(engine)["a"]
    assert result.versions == [(1, 6)]
    assert_agrees(old, prompt, result, GREEDY)


def test_one_name_of_tied_tensors_is_enough(tmp_path: Path) -> None:
    model = build()
    weights = raw_weights(model)
    del weights["lm_head.weight"]
    engine = engine_for(tmp_path)
    load_weights(engine, weights, version=3)
    prompt = prompt_of(7, 12)
    ask(engine, "a", prompt)
    assert_agrees(model, prompt, drain(engine)["a"], GREEDY)
