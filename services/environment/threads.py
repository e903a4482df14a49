"""Threads for blocking environments, that a hung one cannot use up and that never hold the process back."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    """One call."""

    function: Callable[[], T]
    answer: asyncio.Future[T]
    running: bool = False
    given_up: bool = False
    """Its caller no longer waits."""


class DaemonPool:
    """A fixed number of useful threads. One whose caller gave up waiting is replaced, not waited for."""

    def __init__(self, threads: int) -> None:
        self._jobs: queue.SimpleQueue[_Job[Any]] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self.abandoned = 0
        """Threads that still run a call nobody waits for; each ends with that call."""
        for _ in range(threads):
            self._add_thread()

    def _add_thread(self) -> None:
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            with self._lock:
                if job.given_up:
                    continue
                job.running = True
            settle = _outcome(job)
            with self._lock:
                job.running = False
                replaced = job.given_up
                self.abandoned -= replaced
            with contextlib.suppress(RuntimeError):  # the event loop has ended before the call
                self._loop.call_soon_threadsafe(settle)
            if replaced:
                return

    async def call(self, function: Callable[[], T]) -> T:
        """Run a blocking function in a thread. One that is cancelled while it runs costs its thread."""
        job: _Job[T] = _Job(function, self._loop.create_future())
        self._jobs.put(job)
        try:
            return await job.answer
        except asyncio.CancelledError:
            with self._lock:
                job.given_up = True
                if job.running:
                    self.abandoned += 1
                    self._add_thread()
            raise


def _outcome(job: _Job[T]) -> Callable[[], None]:
    """Run the call; what tells its caller, on the event loop."""
    answer = job.answer
    try:
        result = job.function()
    except BaseException as error:
        # A future takes neither of these for what it is.
        odd = isinstance(error, StopIteration | asyncio.CancelledError)
        fault = RuntimeError(repr(error)) if odd else error
        return lambda: None if answer.done() else answer.set_exception(fault)
    return lambda: None if answer.done() else answer.set_result(result)
