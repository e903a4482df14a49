"""`reward`: scores. A pure function of a trajectory, from `trajectories` to `samples`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI

from services.reward.scoring import Scoring
from shared import metrics, service
from shared.bus import Delivery
from shared.events import TrajectoryCompleted
from shared.service import Context
from shared.settings import Settings
from shared.topics import SAMPLES, TRAJECTORIES

_MAX_UNACKED = 2048
_FINISH_S = 2.0
"""For gradings in hand when the process stops."""


def create_app(settings: Settings) -> FastAPI:
    """The reward service as an app."""
    return service.build("reward", settings, lifespan=_lifespan)


@asynccontextmanager
async def _lifespan(context: Context) -> AsyncIterator[Stage]:
    scoring = Scoring(context.settings.reward)
    stage = Stage(context, scoring)
    context.status = lambda: {
        "scoring": len(stage.running),
        "scored": stage.scored,
        "unscored": stage.unscored,
    }
    context.bus.subscribe(
        [TRAJECTORIES], group="reward", handler=stage.handle, max_unacked=_MAX_UNACKED, relaxed=True
    )
    yield stage
    await stage.stop()
    scoring.close()


class Stage:
    """Feeds trajectories to the scorers and publishes what they say."""

    def __init__(self, context: Context, scoring: Scoring) -> None:
        self._context = context
        self._scoring = scoring
        self._stopping = False
        self.running: set[asyncio.Task[None]] = set()
        self.scored = 0
        self.unscored = 0

    def handle(self, deliveries: Sequence[Delivery]) -> None:
        """A batch from `trajectories`. Acknowledged when the score is in the broker."""
        if self._stopping:
            return
        for delivery in deliveries:
            task = asyncio.create_task(self._score(delivery))
            self.running.add(task)
            task.add_done_callback(self.running.discard)

    async def _score(self, delivery: Delivery) -> None:
        trajectory = delivery.event
        assert isinstance(trajectory, TrajectoryCompleted)
        try:
            scored = await self._scoring.score(trajectory)
        except Exception as error:
            delivery.fail(error)
            return
        outcome = "scored" if scored.reward is not None else scored.reason
        self.scored += scored.reward is not None
        self.unscored += scored.reward is None
        metrics.SCORES.labels(trajectory.task, outcome).inc()
        metrics.SCORE_SECONDS.observe(scored.score_s)
        if scored.reward is None and outcome not in ("aborted", "environment_failed"):
            self._context.count(f"reward_{outcome}")
        self._context.bus.publish(
            SAMPLES,
            scored,
            key=trajectory.group_id,
            run_id=trajectory.run_id,
            purpose=trajectory.purpose,
            traceparent=delivery.traceparent,
            on_delivered=delivery.ack,
        )

    async def stop(self) -> None:
        """Finish what is in hand; the rest was not acknowledged, another member scores it."""
        self._stopping = True
        if self.running:
            await asyncio.wait(self.running, timeout=_FINISH_S)
        for task in list(self.running):
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
