"""`environment`: plays episodes. Every rollout request ends in exactly one terminal trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI

from services.environment.episode import EpisodePlayer
from services.environment.policies import Policies
from services.environment.threads import DaemonPool
from services.environment.turns import TurnClient
from shared import metrics, service
from shared.bus import Delivery
from shared.events import RolloutRequested, TrajectoryStatus
from shared.service import Context
from shared.settings import Settings
from shared.topics import ROLLOUTS, TRAJECTORIES


def create_app(settings: Settings) -> FastAPI:
    """The environment service as an app."""
    return service.build("environment", settings, lifespan=_lifespan)


@asynccontextmanager
async def _lifespan(context: Context) -> AsyncIterator[Stage]:
    settings = context.settings.environment
    turns = TurnClient(
        context.bus, context.state, asker=context.settings.process_id, try_deadline_s=settings.try_deadline_s
    )
    await turns.start(context.supervisor)
    policies = Policies(context.state, context.store)
    context.supervisor.start("follow policies", policies.follow)
    player = EpisodePlayer(turns, policies, DaemonPool(settings.threads), settings)
    stage = Stage(context, player)
    context.supervisor.start("watch aborts", stage.watch_aborts)
    context.status = lambda: {
        "episodes": len(stage.running),
        "turn_retries": turns.retries,
        "late_replies": turns.late_replies,
        "reply_partition": turns.partition,
    }
    context.bus.subscribe(
        [ROLLOUTS], group="environment", handler=stage.handle, max_unacked=settings.concurrency
    )
    yield stage
    await stage.stop()
    await turns.stop()


class Stage:
    """Turns rollout requests into running episodes and their ends into trajectories."""

    def __init__(self, context: Context, player: EpisodePlayer) -> None:
        self._context = context
        self._player = player
        self.running: dict[asyncio.Task[None], RolloutRequested] = {}

    def handle(self, deliveries: Sequence[Delivery]) -> None:
        """A batch from `rollouts`. Acknowledged when the trajectory is in the broker."""
        for delivery in deliveries:
            rollout = delivery.event
            assert isinstance(rollout, RolloutRequested)
            task = asyncio.create_task(self._play(delivery, rollout))
            self.running[task] = rollout
            task.add_done_callback(lambda done: self.running.pop(done, None))
        metrics.EPISODES_RUNNING.set(len(self.running))

    async def _play(self, delivery: Delivery, rollout: RolloutRequested) -> None:
        try:
            completed = await self._player.play(rollout, traceparent=delivery.traceparent)
            if completed.status is TrajectoryStatus.FAILED:
                self._context.count(f"episode_{completed.reason}")
            self._context.bus.publish(
                TRAJECTORIES,
                completed,
                key=completed.group_id,
                run_id=completed.run_id,
                purpose=completed.purpose,
                traceparent=delivery.traceparent,
                on_delivered=delivery.ack,
            )
        except Exception as error:
            delivery.fail(error)

    async def watch_aborts(self) -> None:
        """Loop. Consumes aborts of runs; ends their episodes; woken by the hint `aborts` or every second."""
        while True:
            runs = {rollout.run_id for rollout in self.running.values()}
            self._player.aborted = await self._context.state.aborted(sorted(runs))
            for task, rollout in list(self.running.items()):
                if rollout.run_id in self._player.aborted:
                    task.cancel()
            await self._context.state.wait_hint("aborts")

    async def stop(self) -> None:
        """Drop what is in hand: it was not acknowledged, another member plays it."""
        tasks = list(self.running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
