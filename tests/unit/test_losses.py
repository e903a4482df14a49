"""The clipped policy loss: masking, aggregation over the global batch, diagnostics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from services.training.algorithms.losses import Aggregation, PolicyLoss, clipped_policy_loss, token_weights

NAN, INF = math.nan, math.inf


def policy_loss(
    logprobs: list[list[float]],
    *,
    behaviour: list[list[float]],
    advantages: list[float],
    mask: list[list[int]],
    aggregation: Aggregation = "token_mean",
    entropy_coef: float = 0.0,
    entropy: float = 0.0,
) -> tuple[PolicyLoss, Tensor]:
    """The loss of one whole batch and its gradient with respect to the log-probabilities."""
    logprobs_BT = torch.tensor(logprobs, requires_grad=True)
    mask_BT = torch.tensor(mask, dtype=torch.bool)
    result = clipped_policy_loss(
        logprobs_BT,
        entropy_BT=torch.full_like(logprobs_BT, entropy),
        behaviour_logprobs_BT=torch.tensor(behaviour),
        advantages_B=torch.tensor(advantages),
        mask_BT=mask_BT,
        weights_BT=token_weights(
            mask_BT,
            aggregation=aggregation,
            tokens=int(mask_BT.sum()),
            sequences=int(mask_BT.any(1).sum()),
            max_length=10,
        ),
        clip_low=0.2,
        clip_high=0.28,
        entropy_coef=entropy_coef,
    )
    result.loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs_BT.grad is not None
    return result, logprobs_BT.grad


@pytest.mark.parametrize("poison", [NAN, INF, -INF, -1e10, 200.0, -200.0])
@pytest.mark.parametrize("where", ["behaviour", "logprobs"])
def test_masked_poison_changes_neither_loss_nor_gradient_nor_metrics(poison: float, where: str) -> None:
    arrays = {"behaviour": [[0.0, 0.0]], "logprobs": [[0.0, 0.0]]}
    _, clean = policy_loss(arrays["logprobs"], behaviour=arrays["behaviour"], advantages=[1.0], mask=[[1, 0]])
    arrays[where] = [[0.0, poison]]
    result, grad = policy_loss(
        arrays["logprobs"], behaviour=arrays["behaviour"], advantages=[1.0], mask=[[1, 0]]
    )
    assert result.loss.item() == -1.0
    assert result.diagnostics.kl.item() == 0.0
    assert result.diagnostics.nonfinite.item() == 0
    assert result.diagnostics.ratio_max.item() == 1.0
    assert torch.equal(grad, clean)
    assert grad[0, 1].item() == 0.0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_unmasked_nonfinite_is_counted_and_never_repaired(bad: float) -> None:
    result, _ = policy_loss([[0.0, 0.0]], behaviour=[[0.0, bad]], advantages=[1.0], mask=[[1, 1]])
    assert result.diagnostics.nonfinite.item() == 1


def test_unmasked_nan_reaches_the_loss() -> None:
    result, _ = policy_loss([[0.0, NAN]], behaviour=[[0.0, 0.0]], advantages=[1.0], mask=[[1, 1]])
    assert math.isnan(result.loss.item())


def test_unmasked_gap_beyond_the_limit_stays_finite() -> None:
    result, grad = policy_loss([[0.0, 0.0]], behaviour=[[-200.0, 0.0]], advantages=[-1.0], mask=[[1, 1]])
    assert math.isfinite(result.loss.item())
    assert torch.isfinite(grad).all()
    assert result.diagnostics.ratio_max.item() == pytest.approx(math.exp(20), rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "flows"),
    [
        (1.5, 1.0, -1.28, False),
        (1.25, 1.0, -1.25, True),
        (0.5, 1.0, -0.5, True),
        (0.5, -1.0, 0.8, False),
        (0.9, -1.0, 0.9, True),
        (1.5, -1.0, 1.5, True),
    ],
)
def test_clip_is_asymmetric_and_one_sided(
    ratio: float, advantage: float, expected: float, flows: bool
) -> None:
    result, grad = policy_loss([[math.log(ratio)]], behaviour=[[0.0]], advantages=[advantage], mask=[[1]])
    assert result.loss.item() == pytest.approx(expected, abs=1e-6)
    assert (grad[0, 0].item() != 0.0) is flows


def test_clip_fractions_are_counted_by_sign_of_advantage() -> None:
    row = [math.log(u) for u in (1.5, 1.0, 0.5)]
    result, _ = policy_loss([row, row], behaviour=[[0.0] * 3] * 2, advantages=[1.0, -1.0], mask=[[1] * 3] * 2)
    d = result.diagnostics
    assert (d.positive.item(), d.clipped_positive.item()) == (3, 1)
    assert (d.negative.item(), d.clipped_negative.item()) == (3, 1)
    assert d.kl.item() == pytest.approx(2 * sum(u - 1 - math.log(u) for u in (1.5, 1.0, 0.5)), rel=1e-5)
    assert d.ratio.item() == pytest.approx(6.0)
    assert d.ratio_squared.item() == pytest.approx(2 * (1.5**2 + 1 + 0.5**2))


def test_entropy_bonus_lowers_the_loss_by_its_mean() -> None:
    plain, _ = policy_loss([[0.0, 0.0]], behaviour=[[0.0, 0.0]], advantages=[1.0], mask=[[1, 1]])
    bonus, _ = policy_loss(
        [[0.0, 0.0]], behaviour=[[0.0, 0.0]], advantages=[1.0], mask=[[1, 1]], entropy_coef=0.1, entropy=2.0
    )
    assert plain.loss.item() - bonus.loss.item() == pytest.approx(0.2)


def test_token_mean_does_not_depend_on_the_split() -> None:
    # One trained token of loss 4, and three of loss 0.
    mask_BT = torch.tensor([[0, 1, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)
    weights = [
        token_weights(rows, aggregation="token_mean", tokens=4, sequences=2, max_length=10)
        for rows in (mask_BT[:1], mask_BT[1:])
    ]
    assert (4.0 * weights[0]).sum() + (0.0 * weights[1]).sum() == 1.0


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_mean", 13 / 4), ("sequence_mean", (10 + 1) / 2), ("sequence_sum", (10 + 3) / (2 * 10))],
)
def test_aggregations_weigh_tokens_as_their_papers_do(aggregation: Aggregation, expected: float) -> None:
    # A fully masked third sequence is in no denominator.
    mask_BT = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)
    losses_BT = torch.tensor([[10.0, 99.0, 99.0], [1.0, 1.0, 1.0], [99.0] * 3])
    weights_BT = token_weights(mask_BT, aggregation=aggregation, tokens=4, sequences=2, max_length=10)
    assert (losses_BT * weights_BT).sum().item() == pytest.approx(expected, rel=1e-6)


def test_masked_truncated_tokens_leave_the_denominator() -> None:
    mask_BT = torch.ones(6, 5, dtype=torch.bool)
    mask_BT[5] = False
    weights_BT = token_weights(mask_BT, aggregation="token_mean", tokens=25, sequences=5, max_length=10)
    assert weights_BT.sum().item() == pytest.approx(1.0)
