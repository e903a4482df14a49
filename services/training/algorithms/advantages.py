"""Advantages relative to the group that shares a prompt. Called by the algorithms.

Everything is keyed by group id and trajectory id: the order in which trajectories arrive, uneven groups
and missing members change nothing for the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shared.errors import Internal
from shared.events import TrajectoryScored

EPSILON = 1e-6
"""Added to a group's standard deviation."""


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of one batch."""

    by_trajectory: dict[str, float]
    """Trajectory id → advantage; trajectories without a reward are absent."""
    zero_variance: frozenset[str]
    """Groups of two or more whose rewards are all equal: every advantage is exactly 0.0."""
    singletons: frozenset[str]
    """Groups with one rewarded member: nothing to compare with, its advantage is 0.0."""


def rewards_by_group(samples: Iterable[TrajectoryScored]) -> dict[str, dict[str, float | None]]:
    """Group id → trajectory id → reward. A trajectory seen twice counts once.

    Raises Internal where two copies of one trajectory carry different rewards.
    """
    groups: dict[str, dict[str, float | None]] = {}
    for sample in samples:
        trajectory = sample.trajectory
        group = groups.setdefault(trajectory.group_id, {})
        known = group.setdefault(trajectory.trajectory_id, sample.reward)
        if known != sample.reward:
            raise Internal(f"{trajectory.trajectory_id} has two rewards: {known} and {sample.reward}")
    return groups


def group_advantages(
    rewards: Mapping[str, Mapping[str, float | None]], *, normalize_std: bool = True, epsilon: float = EPSILON
) -> GroupAdvantages:
    """`(R − mean) / (std + ε)` within each group, population std (GRPO, arXiv 2402.03300), or
    `R − mean` without `normalize_std` (Dr.GRPO, arXiv 2503.20783).

    Missing rewards are outside the statistics and get no advantage. Rewards must be finite.
    """
    by_trajectory: dict[str, float] = {}
    zero_variance: set[str] = set()
    singletons: set[str] = set()
    for group_id, members in rewards.items():
        known = {name: reward for name, reward in members.items() if reward is not None}
        if len(known) == 1:
            singletons.add(group_id)
        elif known and len(set(known.values())) == 1:
            zero_variance.add(group_id)
        if len(set(known.values())) <= 1:
            # Not left to arithmetic: the mean of equal floats may differ from them by rounding.
            by_trajectory |= dict.fromkeys(known, 0.0)
            continue
        mean = math.fsum(known.values()) / len(known)
        deviations = {name: reward - mean for name, reward in known.items()}
        scale = 1.0
        if normalize_std:
            variance = math.fsum(d * d for d in deviations.values()) / len(known)
            scale = 1.0 / (math.sqrt(variance) + epsilon)
        by_trajectory |= {name: deviation * scale for name, deviation in deviations.items()}
    return GroupAdvantages(by_trajectory, frozenset(zero_variance), frozenset(singletons))
