"""The turn path for tests: real services in this process on the embedded broker and Redis, and a policy whose
tokens are letters."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, models

from services.environment.app import create_app as create_environment
from services.generation.app import create_app as create_generation
from services.reward.app import create_app as create_reward
from services.router.app import create_app as create_router
from shared import topics, weights
from shared.bus import Bus, Delivery
from shared.embedded.kafka import EmbeddedKafka
from shared.events import PolicyPublished, RolloutRequested, TrajectoryCompleted, TrajectoryScored
from shared.service import Context
from shared.settings import KafkaSettings, RedisSettings, Settings
from shared.state import State
from shared.store import FileStore
from shared.supervisor import Supervisor
from shared.topics import TopicPlan

APPS = {
    "environment": create_environment,
    "generation": create_generation,
    "reward": create_reward,
    "router": create_router,
}
ROOT = Path(__file__).parents[2]
_SERVE = """
import sys
from services import host
from shared.settings import load_settings
sys.exit(host.serve(sys.argv[1].split(","), load_settings()))
"""
CLASSES = ("bandwidth", "compute")
LETTERS = [chr(code) for code in range(32, 127)] + ["\n"]
EOS = len(LETTERS)


def write_model(folder: Path, *, window: int = 65_536) -> Path:
    """A model folder for the instant engine: a tokenizer of letters and a window."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (folder / "config.json").write_text(f'{{"vocab_size": {EOS + 1}, "max_position_embeddings": {window}}}')
    return folder


async def until(condition: Callable[[], object], *, seconds: float = 30) -> None:
    """Return once it holds; the test fails where it never does."""
    limit = time.monotonic() + seconds
    while True:
        if condition():
            return
        assert time.monotonic() < limit, "waited in vain"
        await asyncio.sleep(0.01)


class TurnStack:
    """Starts services, publishes policies, asks for rollouts and collects what becomes of them."""

    def __init__(self, kafka: KafkaSettings, redis: RedisSettings, folder: Path) -> None:
        self.kafka = kafka
        self.redis = redis
        self.folder = folder
        self.store = FileStore(folder / "store")
        self.state = State(redis)
        self.model = write_model(folder / "model")
        self.trajectories: dict[str, list[TrajectoryCompleted]] = {}
        self.samples: dict[str, list[TrajectoryScored]] = {}
        self._bus: Bus | None = None
        self._asked = 0

    def settings(self, name: str, **sections: dict[str, object]) -> Settings:
        """Settings of a service's process called `name`."""
        fields: dict[str, object] = {
            "kafka": self.kafka,
            "redis": self.redis,
            "ROLLART_STATE_DIR": self.folder,
            "ROLLART_STORE": (self.folder / "store").as_uri(),
            "ROLLART_WORKER_ID": name,
            "generation": {"engine": "instant", "max_batch": 64},
            "telemetry": {"log_level": "error"},
        }
        for section, keys in sections.items():
            before = cast("dict[str, object]", fields.get(section, {}))
            fields[section] = before | keys
        return Settings.model_validate(fields)

    @contextlib.asynccontextmanager
    async def serving(self, service: str, name: str, **sections: dict[str, object]) -> AsyncIterator[Context]:
        """One service, started as its server would; leaving stops it in order."""
        app: FastAPI = APPS[service](self.settings(name, **sections))
        async with app.router.lifespan_context(app):
            yield app.state.context

    @contextlib.contextmanager
    def process(self, service: str, name: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
        """One or more, with commas between, in an OS process; killed at the end, where it still lives."""
        folders = (ROOT, ROOT / "tests" / "integration")
        ours = {
            "KAFKA__BOOTSTRAP": self.kafka.bootstrap,
            "KAFKA__PREFIX": self.kafka.prefix,
            "KAFKA__REPLY_PARTITIONS": str(self.kafka.reply_partitions),
            "KAFKA__FETCH_WAIT_MS": "5",
            "REDIS__URL": self.redis.url,
            "REDIS__PREFIX": self.redis.prefix,
            "ROLLART_STATE_DIR": str(self.folder),
            "ROLLART_WORKER_ID": name,
            "GENERATION__ENGINE": "instant",
            "TELEMETRY__LOG_LEVEL": "error",
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
        }
        process = subprocess.Popen([sys.executable, "-c", _SERVE, service], env=os.environ | ours | environ)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    async def alive(self, name: str) -> None:
        """Return once the process of this name reports itself."""
        limit = time.monotonic() + 40
        while name not in {process.process_id for process in await self.state.processes()}:
            assert time.monotonic() < limit, f"{name} does not start"
            await asyncio.sleep(0.05)

    async def workers_of(self, *names: str) -> None:
        """Return once these workers, and no others, own partitions."""
        limit = time.monotonic() + 40
        while {w.worker_id for w in await self.state.workers() if w.partitions} != set(names):
            assert time.monotonic() < limit, f"not the workers {names}"
            await asyncio.sleep(0.05)

    async def publish_policy(self, version: int, *, policy: str = "toy", corrupt: bool = False) -> None:
        """A version of a policy, with weights of one number."""
        uri = weights.publish_model(self.store, policy=policy, folder=self.model)
        tensors = {"none": weights.RawTensor("F32", (1,), b"\0\0\0\0")}
        prefix, digest = weights.publish(self.store, tensors, policy=policy, version=version, step=version)
        if corrupt:
            self.store.put(f"{prefix}/bucket-0000.safetensors", b"no weights")
        record = PolicyPublished(
            policy=policy, version=version, step=version, uri=prefix, digest=digest, published_at=time.time()
        )
        await self.state.acquire_lease(f"trainer:{policy}", "test", ttl_s=60)
        await self.state.publish_policy(record, model_uri=uri, lease=f"trainer:{policy}", owner="test")

    def ask(self, environment: str = "guess_number", *, seconds: float = 30, **changes: object) -> str:
        """Request a rollout; its trajectory id."""
        self._asked += 1
        run = str(changes.pop("run_id", "run"))
        group = f"{run}/{uuid.uuid4().hex[:8]}"
        fields: dict[str, object] = {
            "run_id": run,
            "trajectory_id": f"{group}.0#0",
            "group_id": group,
            "member": 0,
            "task": "odd",
            "environment": environment,
            "seed": self._asked,
            "policy": "toy",
            "sampling": {"max_tokens": 4},
            "max_turns": 3,
            "deadline": time.time() + seconds,
        }
        rollout = RolloutRequested.model_validate(fields | changes)
        self.request(rollout)
        return rollout.trajectory_id

    def request(self, rollout: RolloutRequested) -> None:
        """Publish a rollout request."""
        assert self._bus is not None
        self._bus.publish(topics.ROLLOUTS, rollout, key=rollout.trajectory_id, run_id=rollout.run_id)

    async def ended(self, *ids: str, seconds: float = 40) -> list[TrajectoryCompleted]:
        """The trajectories, once all have ended; each has exactly one."""
        await until(lambda: all(i in self.trajectories for i in ids), seconds=seconds)
        assert [len(self.trajectories[i]) for i in ids] == [1] * len(ids)
        return [self.trajectories[i][0] for i in ids]

    async def start(self, supervisor: Supervisor) -> None:
        """Connect, and follow what the services produce."""
        await self.state.connect()
        self._bus = Bus(self.kafka, client_id="test", store=self.store, supervisor=supervisor)
        reader = self._bus.subscribe(
            [topics.TRAJECTORIES, topics.SAMPLES], group=f"test.{uuid.uuid4().hex}", handler=self._collect
        )
        await self.publish_policy(1)
        await reader.assigned.wait()

    def _collect(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            event = delivery.event
            if isinstance(event, TrajectoryCompleted):
                self.trajectories.setdefault(event.trajectory_id, []).append(event)
            elif isinstance(event, TrajectoryScored):
                self.samples.setdefault(event.trajectory.trajectory_id, []).append(event)
            delivery.ack()


@contextlib.asynccontextmanager
async def turn_stack(
    broker: EmbeddedKafka, redis_url: str, folder: Path, **kafka: object
) -> AsyncIterator[TurnStack]:
    """A stack without services on topics and keys of its own."""
    prefix = f"t{uuid.uuid4().hex[:10]}"
    settings = KafkaSettings.model_validate(
        {
            "bootstrap": broker.bootstrap, "prefix": f"{prefix}.", "partitions": 4, "reply_partitions": 3,
            "session_timeout_s": 3.0, "fetch_wait_ms": 5,
        }
        | kafka
    )  # fmt: skip
    plans = topics.plan(settings, CLASSES)
    broker.create_topics([TopicPlan(settings.prefix + plan.name, plan.partitions) for plan in plans])
    stack = TurnStack(settings, RedisSettings(url=redis_url, prefix=f"{prefix}:"), folder)
    async with Supervisor() as supervisor:
        await stack.start(supervisor)
        yield stack
    await stack.state.close()


@contextlib.asynccontextmanager
async def whole_path(stack: TurnStack, **sections: dict[str, object]) -> AsyncIterator[dict[str, Context]]:
    """One of each service, named e1, r1, g1 and s1, ready for turns."""
    async with AsyncExitStack() as running:
        contexts = {}
        for name, service in (
            ("g1", "generation"),
            ("r1", "router"),
            ("e1", "environment"),
            ("s1", "reward"),
        ):
            contexts[name] = await running.enter_async_context(stack.serving(service, name, **sections))
        router = contexts["r1"]
        await until(lambda: router.status()["classes"])
        yield contexts
