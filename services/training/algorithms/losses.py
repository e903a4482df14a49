"""Policy losses over token log-probabilities. Called by the algorithms and by the trainer.

Masked positions may hold anything (NaN, ±inf, padding): they are replaced before any arithmetic, because
0 × NaN is NaN, in the loss and in its gradient alike. Positions that count are never repaired: what is
not finite there is counted in `Diagnostics.nonfinite`, and the trainer refuses the step.

Shapes: B trajectories of a micro-batch, T padded tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp(20) ≈ 5e8 still fits every float format and squares without overflow in float32."""

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]


@dataclass(frozen=True)
class Diagnostics:
    """Sums over the tokens that count, as scalar tensors, so that micro-batches add up."""

    tokens: Tensor
    ratio: Tensor
    """Σ u, u = π_θ/μ."""
    ratio_squared: Tensor
    kl: Tensor
    """Σ u − 1 − log u."""
    entropy: Tensor
    positive: Tensor
    """Tokens with A > 0."""
    negative: Tensor
    clipped_positive: Tensor
    """Tokens with A > 0 above the clip."""
    clipped_negative: Tensor
    """Tokens with A < 0 below the clip."""
    nonfinite: Tensor
    """Tokens whose log-probability, now or at sampling, is not finite."""
    ratio_max: Tensor
    """Largest u: a maximum, not a sum."""

    def __add__(self, other: Diagnostics) -> Diagnostics:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Diagnostics(**{**sums, "ratio_max": torch.maximum(self.ratio_max, other.ratio_max)})


@dataclass(frozen=True)
class PolicyLoss:
    """One micro-batch's share."""

    loss: Tensor
    """Scalar, with gradient."""
    diagnostics: Diagnostics


def token_weights(
    mask_BT: Tensor, *, aggregation: Aggregation, tokens: int, sequences: int, max_length: int
) -> Tensor:
    """Each token's weight in the loss of the whole batch, shape (B, T), 0 where masked.

    `tokens` and `sequences` are totals of the *whole* batch (fully masked sequences do not count);
    `max_length` is the constant of Dr.GRPO. token_mean: 1/tokens (DAPO, arXiv 2503.14476); sequence_mean:
    1/(sequences · T_i) (GRPO); sequence_sum: 1/(sequences · max_length) (Dr.GRPO, arXiv 2503.20783).
    """
    mask = mask_BT.to(torch.float32)
    if aggregation == "token_mean":
        return mask / max(tokens, 1)
    if aggregation == "sequence_mean":
        return mask / (mask.sum(dim=1, keepdim=True).clamp(min=1.0) * max(sequences, 1))
    return mask / (max(sequences, 1) * max_length)


def clipped_policy_loss(
    logprobs_BT: Tensor,
    *,
    entropy_BT: Tensor,
    behaviour_logprobs_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    weights_BT: Tensor,
    clip_low: float,
    clip_high: float,
    entropy_coef: float = 0.0,
) -> PolicyLoss:
    """Σ w·[−min(u A, clip(u, 1−clip_low, 1+clip_high) A) − entropy_coef·H], u = π_θ/μ.

    PPO's clip with asymmetric bounds (DAPO clip-higher, arXiv 2503.14476) and the ratio taken against the
    policy that really sampled the token, so off-policy data needs no further importance weight. Log ratios
    are clamped to ±20. `mask_BT` is boolean; gradients flow to `logprobs_BT` and `entropy_BT`.
    """
    zero = torch.zeros((), dtype=logprobs_BT.dtype, device=logprobs_BT.device)
    log_ratio_BT = torch.where(mask_BT, logprobs_BT, zero) - torch.where(mask_BT, behaviour_logprobs_BT, zero)
    log_ratio_BT = log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_BT = log_ratio_BT.exp()
    advantages_B1 = advantages_B[:, None]
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_BT = -torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
    entropy_BT = torch.where(mask_BT, entropy_BT, zero)
    if entropy_coef:
        loss_BT = loss_BT - entropy_coef * entropy_BT
    loss = torch.where(mask_BT, loss_BT * weights_BT, zero).sum()
    with torch.no_grad():
        finite_BT = torch.isfinite(logprobs_BT) & torch.isfinite(behaviour_logprobs_BT)
        positive_BT, negative_BT = mask_BT & (advantages_B1 > 0), mask_BT & (advantages_B1 < 0)
        counted_BT = torch.where(mask_BT, ratio_BT, zero)
        diagnostics = Diagnostics(
            tokens=mask_BT.sum(),
            ratio=counted_BT.sum(),
            ratio_squared=counted_BT.square().sum(dtype=torch.float64),
            # expm1 keeps the digits of ratios near 1, where exp(x) − 1 loses them all.
            kl=torch.where(mask_BT, torch.expm1(log_ratio_BT) - log_ratio_BT, zero).sum(),
            entropy=entropy_BT.sum(),
            positive=positive_BT.sum(),
            negative=negative_BT.sum(),
            clipped_positive=(positive_BT & (ratio_BT > 1.0 + clip_high)).sum(),
            clipped_negative=(negative_BT & (ratio_BT < 1.0 - clip_low)).sum(),
            nonfinite=(mask_BT & ~finite_BT).sum(),
            ratio_max=counted_BT.max(),
        )
    return PolicyLoss(loss=loss, diagnostics=diagnostics)
