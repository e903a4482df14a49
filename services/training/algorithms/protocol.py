"""What an algorithm is to the trainer: rewards become advantages, log-probabilities become a loss.

An algorithm is built as `cls(recipe.training)`, has no state that a checkpoint would need, and is found
through the algorithms table of `shared.registry` or as the user's own `package.module:Class`.

Shapes: B trajectories of a micro-batch, T padded tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from services.training.algorithms.advantages import GroupAdvantages
from services.training.algorithms.losses import PolicyLoss
from shared.recipe import Training


class Algorithm(Protocol):
    """Called by `services.training.trainer.Trainer` only."""

    def __init__(self, training: Training) -> None: ...

    def advantages(self, rewards_by_group: Mapping[str, Mapping[str, float | None]]) -> GroupAdvantages:
        """One advantage per trajectory; group id → trajectory id → reward, None where there is none."""

    def loss(
        self,
        logprobs_BT: Tensor,
        *,
        entropy_BT: Tensor,
        behaviour_logprobs_BT: Tensor,
        advantages_B: Tensor,
        mask_BT: Tensor,
        weights_BT: Tensor,
    ) -> PolicyLoss:
        """This micro-batch's share of the global loss.

        `weights_BT` holds each token's share of the whole batch (`losses.token_weights`), so that shares of
        micro-batches add up to the loss of the batch however it was split.
        """
