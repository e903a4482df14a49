"""GRPO (arXiv 2402.03300) with DAPO's clip-higher, and Dr.GRPO by two recipe keys. See `protocol.py`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from services.training.algorithms.advantages import GroupAdvantages, group_advantages
from services.training.algorithms.losses import PolicyLoss, clipped_policy_loss
from shared.recipe import Training


class Grpo:
    """Group-relative advantages and the clipped loss against the behaviour policy. No critic, no KL term."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def advantages(self, rewards_by_group: Mapping[str, Mapping[str, float | None]]) -> GroupAdvantages:
        """See `advantages.group_advantages`."""
        return group_advantages(rewards_by_group, normalize_std=self._training.normalize_std)

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
        """See `losses.clipped_policy_loss`."""
        return clipped_policy_loss(
            logprobs_BT,
            entropy_BT=entropy_BT,
            behaviour_logprobs_BT=behaviour_logprobs_BT,
            advantages_B=advantages_B,
            mask_BT=mask_BT,
            weights_BT=weights_BT,
            clip_low=self._training.clip_low,
            clip_high=self._training.clip_high,
            entropy_coef=self._training.entropy_coef,
        )
