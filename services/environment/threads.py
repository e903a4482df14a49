"""Threads for blocking environments, that a hung one cannot use up and that never hold the process back."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_Job = Callable[[], None]


class DaemonPool:
    """A fixed number of useful threads. One whose caller gave up waiting is replaced, not waited for."""

    def __init__(self, threads: int) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self.abandoned = 0
        """Threads that still run a call nobody waits for."""
        for _ in range(threads):
            self._add_thread()

    def _add_thread(self) -> None:
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._jobs.get()()

    async def call(self, function: Callable[[], T]) -> T:
        """Run a blocking function in a thread. Cancelled while it runs: the thread is given up for another."""
        answer: asyncio.Future[T] = self._loop.create_future()
        running = threading.Event()
        done = threading.Event()

        def job() -> None:
            running.set()
            if answer.cancelled():
                return
            try:
                outcome = function()
            except BaseException as error:
                self._loop.call_soon_threadsafe(lambda e=error: answer.done() or answer.set_exception(e))
            else:
                self._loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(outcome))
            done.set()

        self._jobs.put(job)
        try:
            return await answer
        except asyncio.CancelledError:
            if running.is_set() and not done.is_set():
                self.abandoned += 1
                self._add_thread()
            raise
