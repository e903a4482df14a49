"""Takes the scored trajectories of tasks from the bus. Started by `services.gateway.app`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from shared.api import TaskResult
from shared.archive import TrajectoryArchive
from shared.bus import Bus, Delivery
from shared.errors import NotFound
from shared.events import TrajectoryScored
from shared.state import State
from shared.topics import SAMPLES

log = structlog.get_logger()
GROUP = "gateway"
_PURPOSE = b"task"


class TaskResults:
    """Archives each trajectory, records its result, then acknowledges it."""

    def __init__(self, state: State, *, folder_of: Callable[[str], Path]) -> None:
        self._state = state
        self._folder_of = folder_of
        self._waiting: asyncio.Queue[list[Delivery]] = asyncio.Queue()
        self.recorded = 0

    def subscribe(self, bus: Bus) -> None:
        """Join the group. Samples of runs are skipped undecoded."""
        bus.subscribe(
            [SAMPLES],
            group=GROUP,
            handler=self._waiting.put_nowait,
            accept=lambda headers: headers.get("purpose") == _PURPOSE,
            relaxed=True,
        )

    async def run(self) -> None:
        """Loop. Consumes scored trajectories of tasks; produces archive lines and results in Redis;
        waits for the next batch; woken by the subscription."""
        while True:
            for delivery in await self._waiting.get():
                try:
                    await self._record(delivery)
                except Exception as error:
                    delivery.fail(error)
                else:
                    delivery.ack()

    async def _record(self, delivery: Delivery) -> None:
        scored = delivery.event
        if not isinstance(scored, TrajectoryScored):
            return
        trajectory = scored.trajectory
        try:
            folder = self._folder_of(trajectory.run_id)
        except NotFound:
            log.warning("result of an unknown task", run_id=trajectory.run_id[:128])
            return
        await asyncio.to_thread(_archive, folder, scored)
        result = TaskResult(
            trajectory_id=trajectory.trajectory_id,
            seed=trajectory.seed,
            member=trajectory.member,
            status=trajectory.status,
            reward=scored.reward,
            reason=scored.reason or trajectory.reason,
            turns=len(trajectory.turns),
        )
        await self._state.add_task_result(
            trajectory.run_id, trajectory.trajectory_id, result.model_dump_json()
        )
        await self._state.hint(f"task:{trajectory.run_id}")
        self.recorded += 1


def _archive(folder: Path, scored: TrajectoryScored) -> None:
    archive = TrajectoryArchive(folder)
    archive.append(scored)
    archive.flush()
