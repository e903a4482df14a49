"""Turns a completed trajectory into a scored one. The whole of the reward service but its transport.

Called by the service's loop for each trajectory, and by serverless functions. A reward is a finite
number within its scorer's bounds; everything else is no reward at all, with a reason, never 0.0.
"""

from __future__ import annotations

import time

import structlog

from services.reward.isolation import Children
from services.reward.loading import ISOLATED, Scorers
from services.reward.verdict import Verdict, judge, refuse
from shared.events import TrajectoryCompleted, TrajectoryScored, TrajectoryStatus
from shared.settings import RewardSettings

log = structlog.get_logger()


class Scoring:
    """Holds what scoring may reuse: configured scorers and child processes. Close it."""

    def __init__(self, settings: RewardSettings) -> None:
        self._scorers = Scorers(in_child=False)
        self._children = Children(settings)
        self._warned: set[tuple[str, str | None]] = set()
        """A broken scorer fails for every trajectory; the log tells it once, the metrics count it."""

    async def score(self, trajectory: TrajectoryCompleted) -> TrajectoryScored:
        """The trajectory with its reward, or without one and with the reason. Raises nothing of a
        scorer's doing."""
        started = time.perf_counter()
        verdict = await self._verdict(trajectory)
        if verdict.detail and (trajectory.reward.scorer, verdict.reason) not in self._warned:
            self._warned.add((trajectory.reward.scorer, verdict.reason))
            log.warning(
                "scoring.no_reward",
                trajectory_id=trajectory.trajectory_id,
                scorer=trajectory.reward.scorer,
                reason=verdict.reason,
                detail=verdict.detail,
            )
        return TrajectoryScored(
            trajectory=trajectory,
            reward=verdict.reward,
            reason=verdict.reason or "",
            components=verdict.components,
            scored_at=time.time(),
            score_s=time.perf_counter() - started,
        )

    def close(self) -> None:
        """End every child process; gradings in progress end as `scorer_failed`."""
        self._children.close()

    async def _verdict(self, trajectory: TrajectoryCompleted) -> Verdict:
        if trajectory.status is TrajectoryStatus.FAILED:
            return refuse("environment_failed")
        if trajectory.status is TrajectoryStatus.ABORTED:
            return refuse("aborted")
        found = self._scorers.get(trajectory.reward)
        if isinstance(found, Verdict):
            return found
        if found == ISOLATED:
            return await self._children.grade(trajectory)
        return judge(found, trajectory)
