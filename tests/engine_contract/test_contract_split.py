"""Prefill by one engine, decode by another: the same tokens, without computing the prompt again."""

from __future__ import annotations

import pytest
from contract import LONG, Pair, assert_agrees, build, prompt_of

from services.generation.protocol import EngineResult
from shared.events import FinishReason, Prefilled, Sampling


def _prefilled(pair: Pair, first: EngineResult) -> Prefilled:
    assert first.kv_transfer_params is not None
    return Prefilled(
        worker_id="p",
        device_class="compute",
        token_ids=first.token_ids,
        logprobs=first.logprobs,
        versions=first.versions,
        version=pair.prefill.engine.version,
        kv_transfer_params=first.kv_transfer_params,
    )


@pytest.mark.parametrize("length", [20, 33, 65, 100, 129])
def test_a_split_turn_computes_no_prompt_token_twice(length: int, pair: Pair) -> None:
    name, prompt = f"split-{length}", prompt_of(300 + length, length)
    first = pair.prefill.one(name, prompt, LONG, prefill_only=True)
    assert first.finish_reason is None
    assert len(first.token_ids) == 1
    result = pair.decode.one(name, prompt, LONG, prefilled=_prefilled(pair, first))
    assert result.recomputed == ""
    # Of the prompt one token may be computed again, for its logits.
    assert length - 1 <= result.cached_tokens <= length
    assert result.transferred_tokens == result.cached_tokens
    assert result.token_ids[0] == first.token_ids[0]
    assert len(result.token_ids) == LONG.max_tokens
    assert_agrees(build(1), prompt, result, LONG)


def test_many_split_turns_at_once(pair: Pair) -> None:
    prompts = {f"many-{i}": prompt_of(400 + i, 10 + 9 * i) for i in range(8)}
    for name, prompt in prompts.items():
        pair.prefill.ask(name, prompt, LONG, prefill_only=True)
    firsts = pair.prefill.results(*prompts)
    for name, prompt in prompts.items():
        pair.decode.ask(name, prompt, LONG, prefilled=_prefilled(pair, firsts[name]))
    results = pair.decode.results(*prompts)
    for name, prompt in prompts.items():
        assert results[name].recomputed == ""
        assert_agrees(build(1), prompt, results[name], LONG)


def test_a_turn_that_ends_with_its_first_token_is_not_handed_over(pair: Pair) -> None:
    prompt = prompt_of(500, 40)
    only = pair.prefill.one("only", prompt, Sampling(temperature=0.0, max_tokens=1), prefill_only=True)
    assert (only.finish_reason, only.kv_transfer_params) == (FinishReason.LENGTH, None)
    stop = Sampling(temperature=0.0, max_tokens=9, stop_token_ids=(only.token_ids[0],))
    stopped = pair.prefill.one("stopped", prompt, stop, prefill_only=True)
    assert (stopped.finish_reason, stopped.kv_transfer_params) == (FinishReason.STOP, None)


def test_kv_of_another_version_is_computed_again(pair: Pair) -> None:
    prompt = prompt_of(501, 50)
    first = pair.prefill.one("older", prompt, LONG, prefill_only=True)
    pair.decode.take(2)
    result = pair.decode.one("older", prompt, LONG, prefilled=_prefilled(pair, first))
    assert (result.recomputed, result.cached_tokens) == ("version", 0)
    sampled_here = slice(0 if result.versions[0][0] == pair.decode.version else 1, None)
    assert_agrees(build(2), prompt, result, LONG, sampled_here)


def test_both_ends_agree_after_new_weights(pair: Pair) -> None:
    pair.take(2)
    prompt = prompt_of(502, 70)
    first = pair.prefill.one("newer", prompt, LONG, prefill_only=True)
    result = pair.decode.one("newer", prompt, LONG, prefilled=_prefilled(pair, first))
    assert result.recomputed == ""
    assert_agrees(build(2), prompt, result, LONG)


def test_an_aborted_prefill_leaves_nothing_pinned(pair: Pair) -> None:
    for i in range(20):
        pair.prefill.one(f"left-{i}", prompt_of(600 + i, 60), LONG, prefill_only=True)
        pair.prefill.engine.abort(f"left-{i}")
    assert pair.prefill.engine.kv_leases == 0
    pair.prefill.until(lambda _: pair.prefill.engine.kv_usage == 0.0)


def test_kv_that_was_freed_is_computed_again(pair: Pair) -> None:
    prompt = prompt_of(503, 70)
    first = pair.prefill.one("freed", prompt, LONG, prefill_only=True)
    pair.prefill.engine.abort("freed")
    pair.prefill.until(lambda _: pair.prefill.engine.kv_usage == 0.0)
    # Others now use its memory.
    for i in range(8):
        pair.prefill.one(f"others-{i}", prompt_of(700 + i, 70))
    result = pair.decode.one("freed", prompt, LONG, prefilled=_prefilled(pair, first))
    assert result.recomputed in ("gone", "late")
    assert_agrees(build(1), prompt, result, LONG)


def test_kv_that_nobody_fetches_is_freed_in_time_and_does_not_hold_up_new_weights(pair: Pair) -> None:
    for i in range(5):
        pair.prefill.one(f"nobody-{i}", prompt_of(800 + i, 60), LONG, prefill_only=True)
    assert pair.prefill.engine.kv_leases == 5
    pair.prefill.take(2)
    pair.prefill.until(lambda _: not pair.prefill.engine.kv_leases and pair.prefill.engine.kv_usage == 0.0)


def test_new_weights_while_kv_is_on_its_way(pair: Pair) -> None:
    prompts = {f"way-{i}": prompt_of(900 + i, 60) for i in range(6)}
    firsts = {name: pair.prefill.one(name, p, LONG, prefill_only=True) for name, p in prompts.items()}
    for name, prompt in prompts.items():
        pair.decode.ask(name, prompt, LONG, prefilled=_prefilled(pair, firsts[name]))
    pair.decode.take(2)
    results = pair.decode.results(*prompts)
    for name, prompt in prompts.items():
        drawn = results[name].versions
        old = sum(count for version, count in drawn if version != pair.decode.version)
        assert_agrees(build(2), prompt, results[name], LONG, slice(old, None))
