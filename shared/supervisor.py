"""Named loops of a service that live and die together.

A task that dies inside a lifespan leaves a server that answers 200 and does nothing. Here a loop or thread
that ends or raises turns readiness red and then fires `failed`, on which `services.host` ends the process
with exit code 1. Every service's `create_app` puts one into `app.state.supervisor`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Literal, Self

import structlog

from shared.errors import Internal

Status = Literal["running", "stopped", "failed"]
log = structlog.get_logger()
_ASK_AGAIN_S = 1.0


class LoopDied(Internal):
    """A loop ended or raised while its service was running; the cause is `__cause__`."""

    code = "loop_died"


class _Loop:
    """One started loop: how to end it and whether it has ended."""

    def __init__(self, name: str, end: Callable[[], object]) -> None:
        self.name = name
        self.end = end
        self.status: Status = "running"
        self.ended = asyncio.Event()
        self.released = False


class Supervisor:
    """Runs named loops; the first that dies takes the process with it."""

    def __init__(self, *, on_death: Callable[[LoopDied], None] | None = None, stop_s: float = 5.0) -> None:
        self.failure: LoopDied | None = None
        """Why this process must end; None while all is well."""
        self.failed = asyncio.Event()
        """Set right after `failure`."""
        self.stopping = asyncio.Event()
        """Set when the service is being stopped: an event stream ends on it."""
        self._on_death = on_death
        self._stop_s = stop_s
        self._loops: dict[str, _Loop] = {}

    @property
    def ready(self) -> bool:
        """False as soon as a loop has died or the service is being stopped."""
        return self.failure is None and not self.stopping.is_set()

    @property
    def loops(self) -> dict[str, Status]:
        """Name → `running`, `stopped` (by us) or `failed`, in order of start."""
        return {name: loop.status for name, loop in self._loops.items()}

    def start(self, name: str, loop: Callable[[], Coroutine[object, object, object]]) -> None:
        """Run a coroutine function until `stop`. Raises Internal for a name in use or after a stop."""
        self._refuse(name)
        task = asyncio.create_task(loop(), name=name)
        entry = _Loop(name, task.cancel)
        self._loops[name] = entry
        task.add_done_callback(lambda done: self._ended(entry, _cause(done)))

    def start_thread(
        self, name: str, target: Callable[[], object], *, end: Callable[[], None] | None = None
    ) -> None:
        """Run `target` in a daemon thread; `end` must make it return and is called by `stop`."""
        self._refuse(name)
        event_loop = asyncio.get_running_loop()
        entry = _Loop(name, end or (lambda: None))
        self._loops[name] = entry

        def run() -> None:
            cause: BaseException | None = None
            try:
                target()
            except BaseException as error:
                cause = error
            try:
                event_loop.call_soon_threadsafe(self._ended, entry, cause)
            except RuntimeError:
                log.warning("thread_outlived_event_loop", loop=name)

        threading.Thread(target=run, name=name, daemon=True).start()

    def release(self, name: str) -> None:
        """End one loop on purpose while the service goes on; its name is free again at once."""
        loop = self._loops.pop(name)
        loop.released = True
        loop.end()

    def drain(self) -> None:
        """Readiness turns red and event streams end; loops go on until `stop`."""
        self.stopping.set()

    async def stop(self) -> None:
        """End all loops, last started first, each within `stop_s`. Idempotent; never raises for a loop."""
        self.stopping.set()
        for loop in reversed(self._loops.values()):
            if loop.ended.is_set():
                continue
            try:
                await self._end(loop)
            except TimeoutError:
                log.error("loop_did_not_stop", loop=loop.name, after_s=self._stop_s)
            except Exception:
                log.exception("loop_stop_failed", loop=loop.name)

    async def _end(self, loop: _Loop) -> None:
        """End one loop within the bound. Asks again: a cancellation can be lost, for instance in a `wait_for`
        that has its result at that moment.
        """
        async with asyncio.timeout(self._stop_s):
            while not loop.ended.is_set():
                loop.end()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(loop.ended.wait(), _ASK_AGAIN_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _refuse(self, name: str) -> None:
        if name in self._loops:
            raise Internal(f"a loop named {name!r} is running already")
        if self.stopping.is_set():
            raise Internal(f"loop {name!r} cannot start: this service is being stopped")

    def _ended(self, loop: _Loop, cause: BaseException | None) -> None:
        deliberate = (self.stopping.is_set() or loop.released) and (
            cause is None or isinstance(cause, asyncio.CancelledError)
        )
        loop.status = "stopped" if deliberate else "failed"
        loop.ended.set()
        if deliberate:
            return
        log.error("loop_died", loop=loop.name, exc_info=cause)
        if self.failure is not None or self.stopping.is_set():
            return
        what = f"{type(cause).__name__}: {cause}" if cause else "it returned"
        self.failure = LoopDied(f"loop {loop.name!r} died: {what}")
        self.failure.__cause__ = cause
        self.failed.set()
        if self._on_death is not None:
            self._on_death(self.failure)


def _cause(task: asyncio.Task[object]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()
