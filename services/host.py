"""Runs services in this process: `rollart serve NAME`, or several of them in one.

Owns the signals and the exit code. SIGTERM or SIGINT: the servers are stopped one by one, callers before
those they call, exit code 0 within the grace period; a second signal ends the process at once. A dead loop
of any service stops all of them, exit code 1. Called by `services.cli`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn, cast

import setproctitle
import structlog
import uvicorn
import uvloop
from fastapi import FastAPI

from shared.embedded import leash
from shared.embedded.process import bind
from shared.errors import Invalid
from shared.settings import GenerationSettings, Settings
from shared.supervisor import Supervisor

APPS: dict[str, str] = {
    name: f"services.{name}.app:create_app"
    for name in ("gateway", "training", "environment", "reward", "router", "generation")
}
"""Service → its factory, in the order in which services are stopped: callers before callees."""

CHILD_OF = "ROLLART_CHILD"
"""Environment variable with the pid of the launcher: this process ends when that one does."""

log = structlog.get_logger()


class _StartupFailed(Exception):
    """The lifespan of an app raised before it yielded; uvicorn has logged it."""


class _Server(uvicorn.Server):
    """A server that leaves signals and `sys.exit` to the host."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit as error:
            raise _StartupFailed from error


@dataclass(frozen=True)
class _Hosted:
    """One service of this process."""

    name: str
    app: FastAPI
    listener: socket.socket
    server: _Server

    @property
    def supervisor(self) -> Supervisor | None:
        """The app's own, where `create_app` has put one into `app.state.supervisor`."""
        return cast("Supervisor | None", getattr(self.app.state, "supervisor", None))


def serve(services: Sequence[str], settings: Settings, *, apps: Mapping[str, str] = APPS) -> int:
    """Run services until a signal or the death of a loop; the exit code of the process.

    `apps` maps a name to `module:create_app`; `create_app(settings)` returns the FastAPI app, which finds
    the URL it is served at in `app.state.base_url`. Raises Invalid for an unknown service or a port in
    use, before any app has started.
    """
    ordered = [name for name in apps if name in services]
    for name in services:
        if name not in apps:
            raise Invalid(f"unknown service {name!r}; known: {', '.join(apps)}")
    _obey_launcher(settings)
    # Imports of heavy services take seconds; asked to end meanwhile, there is nothing to bring down.
    signal.signal(signal.SIGTERM, _exit_quietly)
    setproctitle.setproctitle(f"rollart serve {_title(ordered, settings)}")
    hosted = [_prepare(name, apps[name], settings, first=name == ordered[0]) for name in ordered]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Host(hosted, settings).run())


def _title(services: Sequence[str], settings: Settings) -> str:
    """Several generation workers of one machine are told apart in the process list."""
    worker = worker_label(settings.generation)
    return " ".join(f"{name} {worker}" if name == "generation" else name for name in services)


def worker_label(generation: GenerationSettings) -> str:
    """A worker in the words of LAUNCHER__WORKERS: `class:role`."""
    return f"{generation.device_class}:{generation.role}"


def _obey_launcher(settings: Settings) -> None:
    launcher = os.environ.pop(CHILD_OF, "")
    if launcher:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        leash.hold(int(launcher), grace_s=settings.http.grace_s + 2)


def _exit_quietly(number: int, frame: FrameType | None) -> NoReturn:
    # Not SystemExit: raised within an import, it can be taken for a failure of that import.
    _leave(0)


def _prepare(name: str, target: str, settings: Settings, *, first: bool) -> _Hosted:
    """Bind before anything is imported: a port in use is told at once."""
    listener = bind(settings.http.host, settings.http.port if first else 0)
    module, _, attribute = target.partition(":")
    app: FastAPI = getattr(importlib.import_module(module), attribute)(settings)
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    app.state.base_url = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
    config = uvicorn.Config(
        app,
        http="h11",
        lifespan="on",
        log_config=None,
        access_log=False,
        # What is left of open streams after this is cancelled; the rest of the grace is for the loops.
        timeout_graceful_shutdown=min(3, int(settings.http.grace_s * 0.3)),
    )
    return _Hosted(name, app, listener, _Server(config))


class _Host:
    """The servers of one process, from start to exit code."""

    def __init__(self, hosted: Sequence[_Hosted], settings: Settings) -> None:
        self._hosted = hosted
        self._grace_s = settings.http.grace_s
        self._stop = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._code: int | None = None
        self._limited = False

    async def run(self) -> int:
        """Start callees first, wait for a reason to end, stop callers first."""
        loop = asyncio.get_running_loop()
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        for number in (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        failed = not await self._start()
        if not failed:
            failed = await self._until_end()
        self._limit_shutdown()
        for one in self._hosted:
            if one.supervisor is not None:
                one.supervisor.drain()
        for one in self._hosted:
            failed = await self._stop_server(one) or failed
        self._code = 1 if failed else 0
        return self._code

    async def _start(self) -> bool:
        for one in reversed(self._hosted):
            if self._stop.is_set():
                return True
            task = asyncio.create_task(one.server.serve([one.listener]), name=f"serve {one.name}")
            self._tasks[one.name] = task
            while not one.server.started and not task.done():
                await asyncio.wait([task], timeout=0.02)
            if task.done():
                log.error("service_did_not_start", service=one.name)
                return False
            log.info("serving", service=one.name, url=one.app.state.base_url)
        return True

    async def _until_end(self) -> bool:
        """Wait for a signal (False) or a death (True)."""
        waits: dict[asyncio.Task[object], str] = {}
        for one in self._hosted:
            waits[cast("asyncio.Task[object]", self._tasks[one.name])] = one.name
            if one.supervisor is not None:
                waits[asyncio.create_task(one.supervisor.failed.wait())] = one.name
        signalled: asyncio.Task[object] = asyncio.create_task(self._stop.wait())
        done, _ = await asyncio.wait([signalled, *waits], return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            if task in done:
                log.error("service_died", service=waits[task])
        return signalled not in done

    async def _stop_server(self, one: _Hosted) -> bool:
        """Stop one server and its app; True when it had failed."""
        task = self._tasks.get(one.name)
        if task is None:
            one.listener.close()
            return False
        one.server.should_exit = True
        try:
            await task
        except _StartupFailed:
            return True
        except Exception:
            log.exception("service_failed", service=one.name)
            return True
        return one.supervisor is not None and one.supervisor.failure is not None

    def _on_signal(self) -> None:
        if self._stop.is_set():
            log.warning("forced_exit")
            _leave(1)
        self._stop.set()
        self._limit_shutdown()

    def _limit_shutdown(self) -> None:
        """Leave at the end of the grace whatever hangs: a lifespan, or a thread that never returns."""

        def leave() -> None:
            if self._code is None:
                log.error("grace_exceeded", grace_s=self._grace_s)
            _leave(1 if self._code is None else self._code)

        if not self._limited:
            self._limited = True
            timer = threading.Timer(self._grace_s, leave)
            timer.daemon = True
            timer.start()


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
