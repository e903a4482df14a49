"""`training`: learns. Takes queued runs one at a time, oldest first; each under a lease."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI

from services.training.run import Run, reason
from shared import recipe as recipes
from shared import service
from shared.errors import LeaseLost, RollArtError
from shared.service import Context
from shared.settings import Settings
from shared.state import RunRecord
from shared.summary import RunState

_LOG = structlog.get_logger()
_LEASE_S = 10.0
_LOST = "its trainer was lost; submit the recipe again"
_TAKEN_FOR_LOST = "its trainer was silent for too long and was taken for lost; submit the recipe again"


def create_app(settings: Settings) -> FastAPI:
    """The training service as an app."""
    return service.build("training", settings, lifespan=_lifespan)


@asynccontextmanager
async def _lifespan(context: Context) -> AsyncIterator[Queue]:
    queue = Queue(context)
    context.busy_s = lambda: queue.busy_s
    context.status = lambda: {"run": queue.current.run_id if queue.current else None}
    context.supervisor.start("runs", queue.serve)
    yield queue


class Queue:
    """The runs that wait, and the one that is being trained."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._state = context.state
        self.current: Run | None = None
        self._busy_before = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds of model work of this process."""
        return self._busy_before + (self.current.busy_s if self.current else 0.0)

    async def serve(self) -> None:
        """Loop. Consumes queued runs from Redis; woken by the hint `runs` or every second."""
        while True:
            await self._fail_orphans()
            record = await self._state.oldest_run(frozenset({"queued"}))
            if record is None:
                await self._state.wait_hint("runs")
                continue
            if await self._state.acquire_lease(f"trainer:{record.run_id}", self._owner, ttl_s=_LEASE_S):
                await self._train(record)

    @property
    def _owner(self) -> str:
        return f"{self._context.settings.process_id}/{self._context.started_at}"

    async def _fail_orphans(self) -> None:
        """A run whose trainer is gone cannot go on by itself: say so instead of leaving it `running`."""
        for record in await self._state.runs():
            if record.state != "running":
                continue
            owner = await self._state.lease_owner(f"trainer:{record.run_id}")
            if owner is None:
                await self._end(record.run_id, "failed", error=_LOST)
                await self._state.abort_run(record.run_id, "failed")

    async def _train(self, record: RunRecord) -> None:
        fresh = await self._state.run(record.run_id)
        if fresh.state != "queued":
            return
        await self._state.update_run(record.run_id, state="running", started_at=time.time(), phase="starting")
        try:
            # What this process cannot load or write fails the run, not the queue.
            recipe = recipes.validate(json.loads(record.recipe))
            run = Run(
                self._context, recipe, run_id=record.run_id, accepted_at=record.created_at, owner=self._owner
            )
        except (RollArtError, OSError, ValueError) as error:
            _LOG.error("run cannot start", run=record.run_id, exc_info=error)
            await self._end(record.run_id, "failed", error=reason(error, self._context.settings.runs_dir))
            await self._state.release_lease(f"trainer:{record.run_id}", self._owner)
            return
        await self._drive(run)

    async def _drive(self, run: Run) -> None:
        self.current = run
        try:
            state, error = await self._watch(run)
            await self._conclude(run, state, error)
        except LeaseLost as lost:
            # Its state is the other trainer's to write.
            _LOG.error("run given up", run=run.run_id, error=lost.message)
            run.abandon()
        finally:
            self._busy_before += run.busy_s
            self.current = None
            await self._state.release_lease(f"trainer:{run.run_id}", self._owner)

    async def _watch(self, run: Run) -> tuple[RunState, str]:
        """Let the run go on until it ends or is cancelled; how it ended. Raises LeaseLost."""
        work = asyncio.create_task(run.execute(), name=f"run {run.run_id}")
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=1.0)
                if work.done():
                    break
                if run.fault is not None:
                    raise run.fault
                if not await self._state.acquire_lease(f"trainer:{run.run_id}", self._owner, ttl_s=_LEASE_S):
                    raise LeaseLost(f"another trainer has taken over {run.run_id}")
                if ended := await self._aborted(run.run_id):
                    return ended
            await work
        except LeaseLost:
            raise
        except Exception as error:
            # The services drop the work of a cancelled run, which it may stumble over first.
            if ended := await self._aborted(run.run_id):
                return ended
            _LOG.error("run failed", run=run.run_id, exc_info=error)
            return "failed", reason(error, run.folder)
        finally:
            # Nothing of the run goes on while its books are closed. Again and again: Python 3.11's `wait_for`
            # swallows a cancellation that meets what it waits for.
            while not work.done():
                work.cancel()
                await asyncio.wait({work}, timeout=0.5)
        return "finished", ""

    async def _aborted(self, run_id: str) -> tuple[RunState, str] | None:
        why = (await self._state.aborted([run_id])).get(run_id)
        if why is None:
            return None
        return ("cancelled", "") if why == "cancelled" else ("failed", _TAKEN_FOR_LOST)

    async def _conclude(self, run: Run, state: RunState, error: str) -> None:
        try:
            summary = await run.conclude(state)
            await self._end(
                run.run_id, summary.state, error=error or run.violation, summary=summary.model_dump_json()
            )
        except Exception as fault:  # results that cannot be written are this run's loss, not the next one's
            _LOG.error("run not concluded", run=run.run_id, exc_info=fault)
            run.abandon()
            await self._end(run.run_id, "failed", error=error or reason(fault, run.folder))

    async def _end(self, run_id: str, state: RunState, *, error: str = "", summary: str = "") -> None:
        fields: dict[str, str | float] = {"state": state, "ended_at": time.time(), "error": error}
        if summary:
            fields["summary"] = summary
        await self._state.update_run(run_id, **fields)
        event = {"kind": "state", "state": state, "error": error}
        await self._state.append_run_event(run_id, json.dumps(event))
        _LOG.info("run ended", run=run_id, state=state)
