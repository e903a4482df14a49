"""New weights while requests are in flight: nothing old survives, nothing broken gets in."""

from __future__ import annotations

import dataclasses
import math
import struct

import pytest
from contract import GREEDY, Versioned, assert_agrees, build, prompt_of, raw_weights

from shared.errors import WeightsInvalid
from shared.events import Sampling
from shared.weights import RawTensor

TENSOR = "model.layers.1.mlp.up_proj.weight"


def test_no_kv_of_old_weights_survives_a_load(driven: Versioned) -> None:
    prompt = prompt_of(3, 80)
    for seed in (1, 2):
        version = driven.take(seed)
        result = driven.one(f"at-{version}", prompt, session="s")
        assert (result.cached_tokens, result.versions) == (0, [(version, 6)])
        assert_agrees(build(seed), prompt, result, GREEDY)


def test_requests_in_flight_go_on_under_the_new_weights(driven: Versioned) -> None:
    models = {driven.version: build(1), driven.version + 1: build(2)}
    sampling = Sampling(temperature=0.0, max_tokens=60)
    prompts = {f"flying-{i}": prompt_of(20 + i, 10 + 20 * i) for i in range(4)}
    for name, prompt in prompts.items():
        driven.ask(name, prompt, sampling)
    driven.until(lambda _: all(len(driven.engine.peek(name, 0)[0]) > 3 for name in prompts))
    driven.take(2)
    results = driven.results(*prompts)
    for name, prompt in prompts.items():
        result = results[name]
        assert len(result.token_ids) == 60
        assert [version for version, _ in result.versions] == sorted(models)
        at = 0
        for version, count in result.versions:
            # All before is computed again: as if by a fresh engine that was given the same tokens.
            assert_agrees(models[version], prompt, result, sampling, slice(at, at + count))
            at += count
        assert at == 60


def test_going_back_to_earlier_weights_is_bit_identical(driven: Versioned) -> None:
    seen = []
    for seed in (1, 2, 1):
        driven.take(seed)
        result = driven.one("again", prompt_of(5, 33), Sampling(temperature=0.0, max_tokens=9), session="s")
        seen.append((result.token_ids, result.logprobs))
    assert seen[0] == seen[2] != seen[1]


def _damaged(kind: str) -> dict[str, RawTensor]:
    weights = raw_weights(build(2))
    good = weights[TENSOR]
    if kind == "missing":
        return {name: tensor for name, tensor in weights.items() if name != TENSOR}
    if kind == "unknown":
        return weights | {"model.extra": good}
    changed = {
        "shape": dataclasses.replace(good, shape=good.shape[::-1]),
        "dtype": dataclasses.replace(good, dtype="I32"),
        "short": dataclasses.replace(good, data=bytes(good.data)[:-4]),
        "nan": dataclasses.replace(good, data=bytes(good.data)[:-4] + struct.pack("f", math.nan)),
    }
    return weights | {TENSOR: changed[kind]}


@pytest.mark.parametrize("kind", ["missing", "unknown", "shape", "dtype", "short", "nan"])
def test_a_failed_load_leaves_the_old_version_live_and_labelled(kind: str, driven: Versioned) -> None:
    prompt = prompt_of(6, 40)
    driven.ask("flying", prompt, Sampling(temperature=0.0, max_tokens=60))
    driven.until(lambda _: bool(driven.engine.peek("flying", 0)[0]))
    with pytest.raises(WeightsInvalid):
        driven.load(_damaged(kind), driven.version + 1)
    assert driven.engine.version == driven.version
    result = driven.results("flying")["flying"]
    assert result.versions == [(driven.version, 60)]
    assert_agrees(build(1), prompt, result, Sampling(temperature=0.0))
