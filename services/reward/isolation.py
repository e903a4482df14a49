"""Child processes for scorers that may never return, and that die when they do not.

Called by `scoring.py`. Threads and coroutines cannot be stopped while they spin, processes can: each
child leads a process group of its own that is killed at the time limit, with all that the scorer
started. Works from any thread and any event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Pipe
from queue import Empty, SimpleQueue

from services.reward.verdict import Verdict, refuse
from shared.events import TrajectoryCompleted
from shared.settings import RewardSettings

START_S = 30.0
"""Starting a child and loading a scorer take this at most; not part of the scorer's time."""
_KEPT_FROM_CHILDREN = ("ROLLART_", "REDIS__", "KAFKA__")


class Children:
    """At most `settings.processes` children, started when first needed and used again."""

    def __init__(self, settings: RewardSettings) -> None:
        self._timeout_s = settings.timeout_s
        self._threads = ThreadPoolExecutor(settings.processes, thread_name_prefix="isolated-scorer")
        self._idle: SimpleQueue[_Child] = SimpleQueue()
        self._lock = threading.Lock()
        self._alive: set[_Child] = set()
        self._closed = False

    async def grade(self, trajectory: TrajectoryCompleted) -> Verdict:
        """The verdict of a child; `timeout` or `scorer_failed` where it gave none. Waits for a free
        child first: that wait does not count."""
        if self._closed:
            return refuse("scorer_failed", "the service is shutting down")
        job = trajectory.model_dump_json().encode()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._grade, job)

    def close(self) -> None:
        """Kill every child, gradings in progress included (they end as `scorer_failed`)."""
        with self._lock:
            self._closed = True
            children = list(self._alive)
        for child in children:
            child.kill()
        self._threads.shutdown(wait=True)

    def _grade(self, job: bytes) -> Verdict:
        try:
            child = self._take()
        except _ChildLost as error:
            return refuse("scorer_failed", str(error))
        try:
            verdict = child.ask(job, timeout_s=self._timeout_s)
        except TimeoutError:
            verdict = refuse("timeout", f"more than {self._timeout_s} s")
        except _ChildLost as error:
            verdict = refuse("scorer_failed", str(error))
        else:
            self._idle.put(child)
            return verdict
        child.kill()
        with self._lock:
            self._alive.discard(child)
        with contextlib.suppress(_ChildLost):
            # The replacement gets ready while nobody waits for it.
            self._idle.put(self._start())
        return verdict

    def _take(self) -> _Child:
        try:
            return self._idle.get_nowait()
        except Empty:
            return self._start()

    def _start(self) -> _Child:
        with self._lock:
            if self._closed:
                raise _ChildLost("the service is shutting down")
            try:
                child = _Child(self._timeout_s)
            except OSError as error:
                raise _ChildLost(f"no process could be started: {error}") from error
            self._alive.add(child)
            return child


class _ChildLost(Exception):
    """The child ended, or never started."""


class _Child:
    """One process, asked one thing at a time."""

    def __init__(self, timeout_s: float) -> None:
        """Raises OSError. Does not wait for the process to be ready."""
        ours, theirs = Pipe()
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_KEPT_FROM_CHILDREN)}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        handle = theirs.fileno()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.reward.child", str(handle), str(timeout_s)],
                pass_fds=(handle,),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._connection = ours
        self._killing = threading.Lock()

    def ask(self, job: bytes, *, timeout_s: float) -> Verdict:
        """Raises TimeoutError or _ChildLost; the child is of no use after either."""
        try:
            self._connection.send_bytes(job)
            if not self._connection.poll(START_S):
                raise _ChildLost(f"the scorer was not loaded after {START_S} s")
            self._connection.recv_bytes()
            if not self._connection.poll(timeout_s):
                raise TimeoutError
            return Verdict.model_validate_json(self._connection.recv_bytes())
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise _ChildLost("its process died") from error
        except ValueError as error:
            raise _ChildLost("its process answered nonsense") from error

    def kill(self) -> None:
        """End the process and all it started. The leader is reaped after its group is killed, so the
        group's number cannot belong to anyone else."""
        with self._killing:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
