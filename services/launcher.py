"""The whole stack on one machine: Kafka, Redis and each service as a process of its own.

`async with Launcher(settings) as stack:` starts everything and waits until it is ready, restarts what dies
and brings all down in order, also on Ctrl-C at any moment and when the launcher itself is killed. Called by
`rollart run`, `rollart up` and the end-to-end tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, get_args

import httpx
import structlog

from services.host import APPS, CHILD_OF
from services.processes import Process, environment, kv_ports, plan, serve_command
from shared import topics
from shared.embedded import admin
from shared.embedded.kafka import EmbeddedKafka, LocalKafka
from shared.embedded.process import Child, RestartPolicy, bind, check_folder, free_port, locked
from shared.embedded.redis import EmbeddedRedis, answers
from shared.errors import Internal, Invalid, Unavailable
from shared.events import Role
from shared.settings import Settings

MIN_FREE_BYTES = 500_000_000
_READY_S = 120.0
_POLL_S = 0.1
_ANSWERING = ("reward", "router", "generation")
"""Services that the others ask: stopped after them."""

log = structlog.get_logger()


class _Part(Protocol):
    """A broker or store that the launcher runs as a child."""

    child: Child

    def spawn(self) -> None: ...
    def wait_ready(self) -> None: ...


class Launcher:
    """Starts, watches and stops a stack.

    Making one raises Invalid for a wrong LAUNCHER__WORKERS. Entering raises Invalid (a port in use, no disk,
    no Java: nothing was started), Conflict (the state folder is in use) or Unavailable (a part died while
    starting; carries the end of its log). When the stack fails later, the task inside the `async with` is
    cancelled and leaving it raises the reason.
    On SIGINT or SIGTERM the same, leaving raises KeyboardInterrupt; a second signal kills all children.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        services: Sequence[str] = tuple(APPS),
        command: Callable[[str], list[str]] = serve_command,
        device_classes: Sequence[str] = (),
    ) -> None:
        folder = settings.state_dir.absolute()
        self.settings = settings.model_copy(
            update={"state_dir": folder, "runs_dir": settings.runs_dir.absolute()}
        )
        self.restarts: dict[str, list[float]] = {}
        """Name of a process, `kafka` or `redis` → Unix times at which it was found dead."""
        self.interrupted: int | None = None
        """The signal that ended the stack."""
        self.api_key = next(iter(sorted(settings.keys)), "") or secrets.token_urlsafe(24)
        self.bootstrap = settings.kafka.bootstrap
        self.redis_url = settings.redis.url
        self.ports: dict[str, int] = {}
        self.processes = {process.name: process for process in plan(self.settings, services)}
        """By name, in the order in which they are stopped."""
        self._command = command
        workers = [one.settings.generation for one in self.workers] or [settings.generation]
        own = (*(one.device_class for one in workers), settings.router.default_class, *device_classes)
        self._device_classes = tuple(dict.fromkeys(own))
        self._children: dict[str, Child] = {}
        self._broker: EmbeddedKafka | None = None
        self._started_at: dict[str, float] = {}
        self._policies: dict[str, RestartPolicy] = {}
        self._lock = contextlib.ExitStack()
        self._owner: asyncio.Task[object] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._signals: list[int] = []
        self._failure: Exception | None = None
        self._forced = False
        self._cancels = 0

    @property
    def workers(self) -> list[Process]:
        """The processes of `generation`."""
        return [process for process in self.processes.values() if process.service == "generation"]

    @property
    def urls(self) -> dict[str, str]:
        """Name of a process → base URL."""
        host = self.settings.http.host
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
        return {name: f"http://{shown}:{port}" for name, port in self.ports.items()}

    @property
    def pids(self) -> dict[str, int]:
        """Name of a process, `kafka` or `redis` → pid, of those that run now."""
        return {name: child.pid for name, child in self._children.items() if child.pid is not None}

    @property
    def log_dir(self) -> Path:
        """Folder of one log file per child."""
        return self.settings.state_dir / "logs"

    async def __aenter__(self) -> Self:
        self._owner = asyncio.current_task()
        self._catch_signals()
        try:
            await self._start()
        except BaseException as error:
            await self._leave(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(error)

    async def wait(self) -> None:
        """Block until the stack ends: by a signal, a failure or a cancellation."""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Those that ask first, then those that answer them, then Redis and Kafka; each within the grace.
        Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        services = [self._children[name] for name in self.processes if name in self._children]
        asking = [child for child in services if self.processes[child.name].service not in _ANSWERING]
        limits: dict[str, float] = {}
        for wave in (asking, [child for child in services if child not in asking]):
            for child in wave:
                child.terminate()
                limits[child.name] = time.monotonic() + self.settings.http.grace_s + 1
            # A wave that takes its time does not hold up the next for longer than this.
            soon = time.monotonic() + 2
            for child in wave:
                await self._ended(child, min(limits[child.name], soon))
        for child in services:
            await self._end(child, limits[child.name])
        for name in ("redis", "kafka"):
            if name in self._children:
                self._children[name].terminate()
                await self._end(self._children[name], time.monotonic() + 15)
        if self._broker is not None:
            self._broker.stop()
            self._broker = None
        self._lock.close()

    async def _start(self) -> None:
        folder = self.settings.state_dir
        check_folder("ROLLART_STATE_DIR", folder, min_free_bytes=MIN_FREE_BYTES)
        check_folder("ROLLART_RUNS_DIR", self.settings.runs_dir, min_free_bytes=MIN_FREE_BYTES)
        self._lock.enter_context(locked(folder / "lock"))
        self._choose_ports()
        parts: list[_Part] = []
        if self.settings.kafka.bootstrap == "local":
            local = LocalKafka(
                folder / "kafka", settings=self.settings.kafka, log_path=self._fresh_log("kafka")
            )
            self.bootstrap = local.bootstrap
            parts.append(local)
        if self.settings.redis.url == "embedded":
            redis = EmbeddedRedis(folder / "redis", log_path=self._fresh_log("redis"))
            self.redis_url = redis.url
            parts.append(redis)
        elif not await asyncio.to_thread(answers, self.redis_url):
            raise Unavailable("no Redis answers at REDIS__URL: start it, or set REDIS__URL=embedded")
        for part in parts:
            self._adopt(part.child)
            part.spawn()
        if self.settings.kafka.bootstrap == "embedded":
            plan = topics.plan(self.settings.kafka, self._device_classes)
            self._broker = EmbeddedKafka(plan, prefix=self.settings.kafka.prefix)
            self.bootstrap = self._broker.bootstrap
        for part in parts:
            await asyncio.to_thread(part.wait_ready)
        if self._broker is None:
            await asyncio.to_thread(self._prepare_broker)
        for process in reversed(self.processes.values()):
            child = Child(
                name=process.name,
                command=self._command(process.service),
                log_path=self._fresh_log(process.name),
                env=self._environ(process),
                leashed=False,
            )
            self._adopt(child)
            child.spawn()
        await self._until_ready()
        self._watch = asyncio.create_task(self._restart_the_dead(), name="launcher watch")
        log.info("stack_ready", kafka=self.bootstrap, redis=self.redis_url, **self.urls)

    def create_topics(self, plan: Sequence[topics.TopicPlan]) -> None:
        """Topics besides the stack's own, for benchmarks and tests."""
        if self._broker is not None:
            self._broker.create_topics(plan)
        else:
            admin.ensure_topics(self.bootstrap, plan, settings=self.settings.kafka)

    def _prepare_broker(self) -> None:
        kafka = self.settings.kafka
        admin.ensure_topics(self.bootstrap, topics.plan(kafka, self._device_classes), settings=kafka)
        groups = ["environment", "router", "reward", "gateway"]
        roles: tuple[Role, ...] = get_args(Role)
        groups += [topics.worker_group(role, name) for name in self._device_classes for role in roles]
        admin.set_group_sessions(self.bootstrap, groups, settings=kafka)

    def _choose_ports(self) -> None:
        """Before anything is started. Raises Invalid for a port in use."""
        host = self.settings.http.host
        taken = [port for worker in self.workers for port in kv_ports(worker.settings.generation)]
        for port in taken:
            bind(self.settings.generation.kv_host, port, field_name="GENERATION__KV_PORT").close()
        for name, process in self.processes.items():
            port = self.settings.http.port if process.service == "gateway" else 0
            if port:
                bind(host, port).close()
            self.ports[name] = port or free_port(host, avoid=taken)
            taken.append(self.ports[name])

    def _environ(self, process: Process) -> dict[str, str]:
        ours = environment(process.settings) | {
            "KAFKA__BOOTSTRAP": self.bootstrap,
            "REDIS__URL": self.redis_url,
            "HTTP__PORT": str(self.ports[process.name]),
            "ROLLART_API_KEYS": self.settings.api_keys or self.api_key,
            CHILD_OF: str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }
        if self.settings.worker_id:
            ours["ROLLART_WORKER_ID"] = f"{self.settings.worker_id}-{process.name}"
        if self._broker is not None and self.settings.kafka.fetch_wait_ms is None:
            ours["KAFKA__FETCH_WAIT_MS"] = "5"
        inherited = {name: value for name, value in os.environ.items() if name.upper() not in ours}
        return {"OMP_NUM_THREADS": "1"} | inherited | ours

    def _fresh_log(self, name: str) -> Path:
        """Log of this stack; that of the one before is kept beside it."""
        path = self.log_dir / f"{name}.log"
        with contextlib.suppress(FileNotFoundError):
            path.replace(path.with_suffix(".log.1"))
        return path

    def _adopt(self, child: Child) -> None:
        self._children[child.name] = child
        self._policies[child.name] = RestartPolicy()
        self._started_at[child.name] = time.monotonic()

    async def _until_ready(self) -> None:
        """Poll `/readyz` of every service. Raises with the end of the log of one that ends or hangs."""
        limit = time.monotonic() + _READY_S
        waiting = set(self.processes)
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
            while waiting:
                for child in self._children.values():
                    if not child.alive:
                        # A service leaves with 2 when a setting is wrong.
                        raise (Invalid if child.returncode == 2 else Unavailable)(child.epitaph())
                names = sorted(waiting)
                ready = await asyncio.gather(*(_is_ready(client, self.urls[name]) for name in names))
                waiting -= {name for name, yes in zip(names, ready, strict=True) if yes}
                if waiting and time.monotonic() > limit:
                    tails = "\n".join(self._children[name].log_tail() for name in sorted(waiting))
                    raise Unavailable(
                        f"not ready after {_READY_S:g} s: {', '.join(sorted(waiting))}\n{tails}"
                    )
                if waiting:
                    await asyncio.sleep(_POLL_S)

    async def _restart_the_dead(self) -> None:
        """Consumes nothing / starts children / waits for a death. Woken every 100 ms."""
        due: dict[str, float] = {}
        try:
            while True:
                for name, child in self._children.items():
                    if child.alive:
                        continue
                    if name not in due:
                        due[name] = time.monotonic() + self._bury(child)
                    if time.monotonic() >= due[name]:
                        del due[name]
                        child.spawn()
                        self._started_at[name] = time.monotonic()
                await asyncio.sleep(_POLL_S)
        except Exception as error:
            self._failure = error
            self._cancel_owner()

    def _bury(self, child: Child) -> float:
        """Note a death; seconds until the restart. Raises Internal when the child is given up."""
        delay = self._policies[child.name].delay(time.monotonic() - self._started_at[child.name])
        if delay is None:
            raise Internal(f"given up after {RestartPolicy.LIMIT} restarts: {child.epitaph()}")
        self.restarts.setdefault(child.name, []).append(time.time())
        log.warning("restarting", service=child.name, exit_code=child.returncode, delay_s=delay)
        return delay

    def _catch_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            # Not in the main thread: whoever runs us there has the signals.
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
                self._signals.append(number)

    def _on_signal(self, number: int) -> None:
        if self.interrupted is not None:
            self._forced = True
            for child in self._children.values():
                child.kill()
            # What the body does about the first signal needs those children.
            self._cancel_owner()
            return
        self.interrupted = number
        self._cancel_owner()

    def _cancel_owner(self) -> None:
        if self._owner is not None:
            self._owner.cancel()
            self._cancels += 1

    async def _leave(self, error: BaseException | None) -> None:
        """Stop whatever happens, then raise why the stack ended, if it was not the body's own doing."""
        stopping = asyncio.ensure_future(self.stop())
        cancelled = False
        while not stopping.done():
            try:
                await asyncio.shield(stopping)
            except asyncio.CancelledError:
                cancelled = True
        for number in self._signals:
            asyncio.get_running_loop().remove_signal_handler(number)
        self._signals.clear()
        if self._owner is not None:
            for _ in range(self._cancels):
                self._owner.uncancel()
        stopping.result()
        if self._failure is not None:
            # What the body stumbled over is a consequence.
            raise self._failure from error
        if error is None or isinstance(error, asyncio.CancelledError):
            if self.interrupted is not None:
                raise KeyboardInterrupt
            if cancelled:
                raise asyncio.CancelledError

    async def _ended(self, child: Child, limit: float) -> bool:
        while True:
            if not child.alive or self._forced or time.monotonic() >= limit:
                return not child.alive
            await asyncio.sleep(0.02)

    async def _end(self, child: Child, limit: float) -> None:
        if not await self._ended(child, limit):
            log.error("killed_after_grace", service=child.name)
            child.kill()
        child.reap()


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/readyz")).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
