"""A real router, on a port of its own, and the test on the wire around it: it asks for turns, reports workers
and takes what is assigned to them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from turn_stack import CLASSES, TurnStack, until

from services.router.app import create_app
from shared import topics
from shared.api import AffinityReport, TaskAffinity
from shared.bus import Bus, Delivery
from shared.events import Event, GenerateRequested, PrefillRequested, Role, Sampling, TurnRequested
from shared.service import Context
from shared.state import WorkerRecord
from shared.state.records import TaskProfile
from shared.supervisor import Supervisor

KEY = "a-key"
Assigned = GenerateRequested | PrefillRequested


class _NoSignals:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class RouterWire:
    """The router under test and its surroundings."""

    def __init__(self, stack: TurnStack, context: Context, bus: Bus, url: str) -> None:
        self.context = context
        self.url = url
        self.taken: list[tuple[str, int, Assigned]] = []
        """Topic, partition and request, in the order in which they came."""
        self._stack = stack
        self._bus = bus
        self._beating: dict[str, asyncio.Task[None]] = {}
        self._records: dict[str, WorkerRecord] = {}

    def worker(self, name: str, role: Role, device_class: str, **changes: object) -> None:
        """Report a worker from now on."""
        fields: dict[str, object] = {
            "worker_id": name, "role": role, "device_class": device_class, "gpu_model": "", "url": "",
            "partitions": [0, 1], "running": 0, "waiting": 0, "kv_usage": 0.0, "policies": {},
            "updated_at": time.time(),
        }  # fmt: skip
        self._records[name] = WorkerRecord.model_validate(fields | changes)
        if name not in self._beating:
            self._beating[name] = asyncio.create_task(self._beat(name))

    async def _beat(self, name: str) -> None:
        while True:
            record = self._records[name].model_copy(update={"updated_at": time.time()})
            await self._stack.state.report_worker(record, ttl_s=0.8)
            await asyncio.sleep(0.2)

    def measured(self, name: str, task: str, profile: TaskProfile) -> None:
        """What a worker says it has needed so far."""
        self._records[name] = self._records[name].model_copy(update={"tasks": {task: profile}})

    async def silence(self, name: str) -> None:
        """A worker's heartbeats stop, as when it is killed."""
        self._beating.pop(name).cancel()
        await until(lambda: name not in str(self.context.status()["classes"]))

    async def live(self, *names: str) -> None:
        """Return once the router knows these workers and no others."""

        def known() -> set[str]:
            return {one for ids in self.context.status()["classes"].values() for one in ids}

        await until(lambda: known() == set(names))

    def ask(self, trajectory: str = "", **changes: object) -> str:
        """Ask for a turn; its trajectory id."""
        trajectory = trajectory or f"run/{uuid.uuid4().hex[:8]}.0#0"
        fields: dict[str, object] = {
            "run_id": "run", "trajectory_id": trajectory, "attempt": 0, "turn": 0, "task": "odd",
            "policy": "toy", "prompt_ids": [1, 2], "sampling": Sampling(), "context_window": 64,
            "deadline": time.time() + 60, "try_deadline": time.time() + 30, "asker": "test",
            "reply_partition": 0,
        }  # fmt: skip
        turn = TurnRequested.model_validate(fields | changes)
        self._bus.publish(topics.TURNS, turn, key=trajectory, run_id="run")
        return trajectory

    async def assigned(self, trajectory: str, *, number: int = 1) -> tuple[str, int, Assigned]:
        """Where the `number`-th request of a trajectory went."""

        def mine() -> list[tuple[str, int, Assigned]]:
            return [one for one in list(self.taken) if one[2].turn.trajectory_id == trajectory]

        await until(lambda: len(mine()) >= number)
        return mine()[number - 1]

    async def affinity(self, task: str = "odd") -> list[TaskAffinity]:
        """What the router says of a task."""
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, trust_env=False) as client:
            response = await client.get("/v1/affinity")
        assert response.status_code == 200, response.text
        found = AffinityReport.model_validate_json(response.content)
        return [one for one in found.tasks if one.task == task]

    async def switched(self, task: str = "odd") -> TaskAffinity:
        """What the router says of a task, once its choice has changed."""
        limit = time.monotonic() + 30
        while not (found := (await self.affinity(task))[0]).switches:
            assert time.monotonic() < limit, found.why
            await asyncio.sleep(0.05)
        return found

    def take(self, deliveries: list[Delivery]) -> None:
        """As the workers' subscriptions do."""
        for delivery in deliveries:
            event: Event = delivery.event
            assert isinstance(event, GenerateRequested | PrefillRequested)
            topic = delivery._message.topic().removeprefix(self._stack.kafka.prefix)
            self.taken.append((topic, delivery.partition, event))
            delivery.ack()

    async def stop(self) -> None:
        """No worker lives any more."""
        for beating in self._beating.values():
            beating.cancel()
        for name in self._records:
            await self._stack.state.remove_worker(name)


@asynccontextmanager
async def router_wire(stack: TurnStack, name: str, **router: object) -> AsyncIterator[RouterWire]:
    """A router with these settings, and the wire."""
    settings = stack.settings(name, router=router).model_copy(update={"api_keys": KEY})
    app = create_app(settings)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="on", http="h11"))
    server.capture_signals = _NoSignals  # type: ignore[method-assign, assignment]
    serving = asyncio.create_task(server.serve())
    while not server.started:
        assert not serving.done(), "the router did not start"
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    async with Supervisor() as supervisor:
        bus = Bus(stack.kafka, client_id=f"wire-{name}", store=stack.store, supervisor=supervisor)
        wire = RouterWire(stack, app.state.context, bus, url)
        work = [topics.worker_topic(role, one) for role in ("both", "prefill") for one in CLASSES]
        subscription = bus.subscribe(work, group=f"wire.{uuid.uuid4().hex}", handler=wire.take)
        await subscription.assigned.wait()
        try:
            yield wire
        finally:
            await wire.stop()
    app.state.supervisor.drain()
    server.should_exit = True
    await serving
