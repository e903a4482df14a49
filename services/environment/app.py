"""`environment`: plays episodes. Every rollout request ends in exactly one terminal trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI

from services.environment.episode import EpisodePlayer
from services.environment.threads import DaemonPool
from shared import metrics, service
from shared.bus import Delivery
from shared.events import RolloutRequested, TrajectoryStatus
from shared.policies import Policies
from shared.service import Context
from shared.settings import Settings
from shared.topics import ROLLOUTS, TRAJECTORIES
from shared.turns import TurnClient

_CLOSE_S = 2.0
"""For environments that are being closed when the process stops."""
_DRAIN_S = 0.5
"""For episodes in hand when a partition moves; most would need longer, and polling waits for it."""


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
    pool = DaemonPool(settings.threads)
    player = EpisodePlayer(turns, policies, pool, settings)
    stage = Stage(context, player)
    context.supervisor.start("watch aborts", stage.watch_aborts)
    context.status = lambda: {
        "episodes": len(stage.running),
        "threads_abandoned": pool.abandoned,
        "turn_retries": turns.retries,
        "late_replies": turns.late_replies,
        "reply_partition": turns.partition,
    }
    context.bus.subscribe(
        [ROLLOUTS],
        group="environment",
        handler=stage.handle,
        max_unacked=settings.concurrency,
        drain_s=_DRAIN_S,
        relaxed=True,
    )
    yield stage
    await stage.stop()
    await turns.stop()


@dataclass(slots=True, eq=False)
class _Playing:
    """An episode in progress."""

    rollout: RolloutRequested
    deliveries: list[Delivery]
    """All that asked for this trajectory: after a rebalance the same request may come once more."""
    task: asyncio.Task[None] | None = None


class Stage:
    """Turns rollout requests into running episodes and their ends into trajectories."""

    def __init__(self, context: Context, player: EpisodePlayer) -> None:
        self._context = context
        self._player = player
        self._stopping = False
        self.running: dict[str, _Playing] = {}
        """By trajectory id."""

    def handle(self, deliveries: Sequence[Delivery]) -> None:
        """A batch from `rollouts`. Acknowledged when the trajectory is in the broker."""
        if self._stopping:
            return
        for delivery in deliveries:
            rollout = delivery.event
            assert isinstance(rollout, RolloutRequested)
            known = self.running.get(rollout.trajectory_id)
            if known is not None:
                known.deliveries.append(delivery)
                continue
            playing = self.running[rollout.trajectory_id] = _Playing(rollout, [delivery])
            playing.task = asyncio.create_task(self._play(playing, delivery.traceparent))
        metrics.EPISODES_RUNNING.set(len(self.running))

    async def _play(self, playing: _Playing, traceparent: str) -> None:
        rollout, deliveries = playing.rollout, playing.deliveries

        def ack() -> None:
            for delivery in deliveries:
                delivery.ack()

        try:
            completed = await self._player.play(rollout, traceparent=traceparent)
            del self.running[rollout.trajectory_id]
            if completed.status is TrajectoryStatus.FAILED:
                self._context.count(f"episode_{completed.reason}")
            self._context.bus.publish(
                TRAJECTORIES,
                completed,
                key=completed.group_id,
                run_id=completed.run_id,
                purpose=completed.purpose,
                traceparent=traceparent,
                on_delivered=ack,
            )
        except Exception as error:
            for delivery in deliveries:
                delivery.fail(error)
        finally:
            if self.running.get(rollout.trajectory_id) is playing:
                del self.running[rollout.trajectory_id]
            metrics.EPISODES_RUNNING.set(len(self.running))

    async def watch_aborts(self) -> None:
        """Loop. Consumes aborts of runs; ends their episodes; woken by the hint `aborts` or every second."""
        while True:
            runs = {playing.rollout.run_id for playing in self.running.values()}
            self._player.aborted = await self._context.state.aborted(sorted(runs))
            for playing in list(self.running.values()):
                if playing.rollout.run_id in self._player.aborted and playing.task is not None:
                    playing.task.cancel()
            await self._context.state.wait_hint("aborts")

    async def stop(self) -> None:
        """Drop what is in hand: it was not acknowledged, another member plays it."""
        self._stopping = True
        tasks = [playing.task for playing in self.running.values() if playing.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._player.stop(within_s=_CLOSE_S)
