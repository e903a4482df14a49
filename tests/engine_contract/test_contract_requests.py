"""Requests: what is sampled, under which distribution, and how it ends."""

from __future__ import annotations

import pytest
from contract import (
    GREEDY,
    LONG,
    VOCAB,
    WINDOW,
    Versioned,
    assert_agrees,
    build,
    expected_logprobs,
    prompt_of,
)

from shared.errors import Conflict, Invalid
from shared.events import FinishReason, Sampling

SAMPLINGS = (
    GREEDY,
    Sampling(temperature=1.0, max_tokens=9),
    Sampling(temperature=0.5, max_tokens=12),
    Sampling(temperature=1.3, top_p=0.8, max_tokens=7),
    Sampling(temperature=0.8, top_k=5, max_tokens=8),
    Sampling(temperature=0.9, top_k=20, top_p=0.9, max_tokens=10),
)


def test_each_logprob_is_that_of_the_distribution_drawn_from(driven: Versioned) -> None:
    model = build(1)
    asked = {}
    # Prompts of all lengths, also beyond what one prefill step takes.
    for i, length in enumerate((1, 70, 3, 31, 32, 33, 2, 100, 64, 65, 5, 129)):
        asked[f"mixed-{i}"] = (prompt_of(i, length), SAMPLINGS[i % len(SAMPLINGS)])
    for name, (prompt, sampling) in asked.items():
        driven.ask(name, prompt, sampling)
    results = driven.results(*asked)
    for name, (prompt, sampling) in asked.items():
        result = results[name]
        assert len(result.token_ids) == sampling.max_tokens
        assert result.finish_reason is FinishReason.LENGTH
        assert result.versions == [(driven.version, sampling.max_tokens)]
        assert_agrees(model, prompt, result, sampling)


def test_draws_follow_the_distribution(driven: Versioned) -> None:
    """First tokens of 300 draws against their probabilities, by Pearson's test at about 1 in 10,000."""
    model, prompt = build(1), prompt_of(900, 12)
    sampling = Sampling(temperature=1.0, max_tokens=1)
    names = [f"draw-{i}" for i in range(300)]
    for name in names:
        driven.ask(name, prompt, sampling)
    results = driven.results(*names)
    counts = [0] * VOCAB
    for result in results.values():
        counts[result.token_ids[0]] += 1
    wanted = (expected_logprobs(model, prompt, [0], sampling)[0].exp() * len(names)).tolist()
    common = [i for i in range(VOCAB) if wanted[i] >= 5]
    rest = len(names) - sum(counts[i] for i in common), len(names) - sum(wanted[i] for i in common)
    pairs = [(counts[i], wanted[i]) for i in common] + ([rest] if rest[1] >= 1 else [])
    statistic = sum((seen - due) ** 2 / due for seen, due in pairs)
    degrees = len(pairs) - 1
    assert statistic < degrees + 4.5 * (2 * degrees) ** 0.5 + 8


def test_a_stop_token_ends_the_turn_and_is_kept(driven: Versioned) -> None:
    prompt = prompt_of(2, 9)
    free = driven.one("free", prompt, LONG)
    stop = free.token_ids[3]
    result = driven.one("stopped", prompt, LONG.model_copy(update={"stop_token_ids": (stop,)}))
    assert result.finish_reason is FinishReason.STOP
    assert result.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_the_context_window_clips_and_is_told(driven: Versioned) -> None:
    sampling = Sampling(max_tokens=20)
    driven.ask("turn", prompt_of(0, 90), sampling, window=100)
    driven.ask("model", prompt_of(1, WINDOW - 10), sampling, window=10 * WINDOW)
    results = driven.results("turn", "model")
    for result in results.values():
        assert (len(result.token_ids), result.finish_reason) == (10, FinishReason.CONTEXT)
    with pytest.raises(Invalid, match=r"90 tokens.*window 90"):
        driven.ask("full", prompt_of(0, 90), window=90)


@pytest.mark.parametrize("length", [WINDOW, WINDOW + 1, 10 * WINDOW])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(length: int, driven: Versioned) -> None:
    with pytest.raises(Invalid, match=rf"{length} tokens.*window {WINDOW}"):
        driven.ask("large", prompt_of(0, length), window=20 * WINDOW)
    assert driven.one("after", prompt_of(1, 5)).error is None


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1]])
def test_a_prompt_that_cannot_be_sampled_is_refused(prompt: list[int], driven: Versioned) -> None:
    with pytest.raises(Invalid):
        driven.ask("bad", prompt)
    assert driven.one("after", prompt_of(1, 5)).error is None


def test_an_abort_frees_its_own_request_and_no_newer_one(driven: Versioned) -> None:
    long = Sampling(max_tokens=100)
    for name in ("x", "y"):
        driven.ask(name, prompt_of(8, 20), long)
    driven.until(lambda _: bool(driven.engine.peek("x", 0)[0]))
    with pytest.raises(Conflict):
        driven.ask("x", prompt_of(8, 20))
    assert driven.engine.abort("x")
    assert not driven.engine.abort("x")
    driven.ask("x", prompt_of(9, 20))
    results = driven.results("x")
    assert "y" not in results
    assert_agrees(build(1), prompt_of(9, 20), results["x"], GREEDY)
    assert driven.engine.abort("y")
    driven.until(lambda _: driven.engine.running == 0 and driven.engine.waiting == 0)
    driven.until(lambda _: driven.engine.kv_usage == 0.0)


def test_tokens_can_be_read_while_they_are_sampled(driven: Versioned) -> None:
    driven.ask("x", prompt_of(10, 20), Sampling(max_tokens=60))
    seen: list[int] = []
    logprobs: list[float] = []

    def look(_: object) -> bool:
        new = driven.engine.peek("x", len(seen))
        seen.extend(new[0])
        logprobs.extend(new[1])
        return len(seen) >= 8

    driven.until(look)
    result = driven.results("x")["x"]
    assert result.token_ids[: len(seen)] == seen
    assert result.logprobs[: len(seen)] == logprobs
    assert driven.engine.peek("x", 0) == ([], [])


def test_the_next_turn_reuses_the_kv_of_the_one_before(driven: Versioned) -> None:
    model, history = build(1), prompt_of(11, 70)
    first = driven.one("s/0", history, session="s")
    assert first.cached_tokens == 0
    history = history + first.token_ids + prompt_of(12, 10)
    second = driven.one("s/1", history, session="s")
    # Whole blocks of what went through the model before.
    assert 64 <= second.cached_tokens < 76
    assert_agrees(model, history, second, GREEDY)


def test_timings_cover_the_life_of_a_request(driven: Versioned) -> None:
    result = driven.one("timed", prompt_of(13, 30), LONG)
    assert result.queued_s >= 0
    assert result.prefill_s > 0
    assert result.decode_s > 0
