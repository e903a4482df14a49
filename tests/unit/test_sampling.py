"""The batched sampler: what is drawn, and the log-probability that is reported for it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from services.generation.engines.sampling import draw
from shared.events import Sampling


def _draws(logits: list[float], sampling: Sampling, *, count: int = 4000) -> dict[int, float]:
    """Token → reported log-probability, over an even grid of uniforms."""
    rows = torch.tensor(logits).expand(count, -1)
    uniforms = [(i + 0.5) / count for i in range(count)]
    drawn = draw(rows, [sampling] * count, uniforms=uniforms)
    return dict(zip(drawn.token_ids, drawn.logprobs, strict=True))


def test_logprob_is_of_the_distribution_after_temperature() -> None:
    drawn = draw(torch.tensor([[2.0, 0.0]]), [Sampling(temperature=0.5)], uniforms=[0.1])
    assert drawn.token_ids == [0]
    assert drawn.logprobs[0] == pytest.approx(-0.018150, abs=1e-6)


def test_greedy_takes_the_peak_and_reports_it_at_temperature_one() -> None:
    drawn = draw(torch.tensor([[2.0, 0.0]]), [Sampling(temperature=0.0, top_k=1)], uniforms=[0.999])
    assert drawn.token_ids == [0]
    assert drawn.logprobs[0] == pytest.approx(-0.126928, abs=1e-6)


def test_frequencies_equal_reported_probabilities() -> None:
    logits, count = torch.tensor([0.3, -1.0, 2.0, 0.0]), 8000
    rows = logits.expand(count, -1)
    drawn = draw(rows, [Sampling()] * count, uniforms=[(i + 0.5) / count for i in range(count)])
    for token, logprob in set(zip(drawn.token_ids, drawn.logprobs, strict=True)):
        assert drawn.token_ids.count(token) / count == pytest.approx(math.exp(logprob), abs=2 / count)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(top_k=2), {0: 0.6, 1: 0.4}),
        (Sampling(top_p=0.5), {0: 0.6, 1: 0.4}),
        (Sampling(top_p=0.47), {0: 1.0}),
        (Sampling(top_k=3, top_p=0.9), {0: 0.48 / 0.96, 1: 0.32 / 0.96, 2: 0.16 / 0.96}),
        (Sampling(top_k=2, top_p=0.6), {0: 1.0}),
        (Sampling(top_k=1), {0: 1.0}),
        (Sampling(top_k=99), {0: 0.48, 1: 0.32, 2: 0.16, 3: 0.04}),
        (Sampling(top_p=1e-9), {0: 1.0}),
    ],
)
def test_truncation_keeps_the_right_tokens_and_renormalises(
    sampling: Sampling, expected: dict[int, float]
) -> None:
    drawn = _draws([math.log(p) for p in (0.48, 0.32, 0.16, 0.04)], sampling)
    assert {token: math.exp(logprob) for token, logprob in drawn.items()} == pytest.approx(expected, abs=1e-5)


def test_ties_at_the_edge_of_top_k_keep_exactly_k() -> None:
    assert len(_draws([1.0, 1.0, 1.0, 1.0], Sampling(top_k=2))) == 2


def test_rows_do_not_depend_on_their_neighbours() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 3
    sampling = [
        Sampling(),
        Sampling(temperature=0.0),
        Sampling(temperature=0.7, top_p=0.8),
        Sampling(top_k=5),
        Sampling(temperature=2.0),
        Sampling(temperature=0.3, top_k=3, top_p=0.9),
    ]
    uniforms = [0.13, 0.5, 0.77, 0.9, 0.999, 0.41]
    together = draw(logits, sampling, uniforms=uniforms)
    for i in range(6):
        alone = draw(logits[i : i + 1], sampling[i : i + 1], uniforms=uniforms[i : i + 1])
        assert alone.token_ids == together.token_ids[i : i + 1]
        assert alone.logprobs == pytest.approx(together.logprobs[i : i + 1], abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.0), Sampling(temperature=0.5, top_k=2, top_p=0.9)]
)
def test_a_row_that_is_not_finite_is_told_and_spares_the_others(bad: float, sampling: Sampling) -> None:
    good = [0.0, 1.0, 2.0]
    drawn = draw(torch.tensor([good, [0.0, bad, 1.0], good]), [sampling] * 3, uniforms=[0.2] * 3)
    alone = draw(torch.tensor([good]), [sampling], uniforms=[0.2])
    assert drawn.finite == [True, False, True]
    assert drawn.token_ids[0] == drawn.token_ids[2] == alone.token_ids[0]
    assert all(0 <= token < 3 for token in drawn.token_ids)


def test_minus_infinity_excludes_a_token() -> None:
    assert set(_draws([-math.inf, 0.0, -math.inf, 0.0], Sampling())) == {1, 3}


@budget(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=12),
    temperature=st.floats(0, 10),
    top_k=st.integers(0, 14),
    top_p=st.floats(0, 1, exclude_min=True),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_every_draw_is_possible_and_finite(
    logits: list[float], temperature: float, top_k: int, top_p: float, uniform: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    drawn = draw(torch.tensor([logits]), [sampling], uniforms=[uniform])
    assert drawn.finite == [True]
    assert 0 <= drawn.token_ids[0] < len(logits)
    assert drawn.logprobs[0] <= 0.0
