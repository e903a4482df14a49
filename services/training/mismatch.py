"""The alarm for a sampler that is not the policy being trained. Called by the step loop after each step.

A batch sampled wholly by the version that is trained must have a ratio of one: whatever else shows is a fault
of sampler or trainer (another temperature or template, weights that did not arrive), not off-policyness.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.training.trainer import StepStats
from shared.events import TrajectoryScored


def mismatch(
    stats: StepStats, members: Iterable[TrajectoryScored], *, version: int, limit: float
) -> str | None:
    """What is wrong, in a sentence; None where nothing is, or where the batch is off-policy anyway."""
    if stats.mismatch_kl <= limit:
        return None
    for scored in members:
        trajectory = scored.trajectory
        if any(v != version for v, on in zip(trajectory.versions, trajectory.mask, strict=True) if on):
            return None
    return (
        f"sampler and trainer disagree at equal weights (version {version}): "
        f"KL {stats.mismatch_kl:.4g} nats per token, limit {limit:g}"
    )
