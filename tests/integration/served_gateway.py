"""A gateway on a real port over real Redis and the embedded broker, for the gateway's tests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import uvicorn
from fastapi import FastAPI
from pydantic import JsonValue
from served_app import serving

from services.gateway import app as gateway_app
from shared import topics
from shared.embedded.kafka import EmbeddedKafka
from shared.embedded.redis import EmbeddedRedis
from shared.events import PolicyPublished, RolloutRequested, TrajectoryCompleted, TrajectoryScored
from shared.http import ApiClient
from shared.service import Context
from shared.settings import KafkaSettings, RedisSettings, Settings

KEY = "a-key"
RECIPE: dict[str, JsonValue] = {
    "name": "lake",
    "tasks": {"lake": {"environment": "frozenlake", "max_turns": 9}},
    "training": {"steps": 7},
}


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    kafka = KafkaSettings(partitions=2, reply_partitions=2)
    with EmbeddedKafka(topics.plan(kafka), prefix=kafka.prefix, session_timeout_s=1.0) as broker:
        yield broker.bootstrap


class Served:
    """A gateway on a real port, and the doors to what is behind it."""

    def __init__(self, app: FastAPI, server: uvicorn.Server) -> None:
        self.app, self.server = app, server
        port = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.raw = httpx.AsyncClient(
            base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False
        )
        self.client = ApiClient(self.url, KEY)

    @property
    def context(self) -> Context:
        context = self.app.state.context
        assert isinstance(context, Context)
        return context


@asynccontextmanager
async def serve(settings: Settings) -> AsyncIterator[Served]:
    app = gateway_app.create_app(settings)
    async with serving(app) as server:
        served = Served(app, server)
        async with served.raw, served.client:
            yield served


def settings_of(folder: Path, redis_url: str, bootstrap: str) -> Settings:
    return Settings(
        ROLLART_STATE_DIR=folder / "state",
        ROLLART_RUNS_DIR=folder / "runs",
        ROLLART_API_KEYS=KEY,
        kafka=KafkaSettings(bootstrap=bootstrap, partitions=2, reply_partitions=2, fetch_wait_ms=5),
        redis=RedisSettings(url=redis_url, prefix=f"{folder.name}:"),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    redis_url: str, bootstrap: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    async with serve(settings_of(tmp_path_factory.mktemp("gateway"), redis_url, bootstrap)) as it:
        yield it


async def post(served: Served, path: str, body: object, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await served.raw.post(path, content=content, headers=headers)


def fields(response: httpx.Response) -> list[str]:
    assert response.status_code == 422, response.text
    return [item["field"] for item in response.json()["error"]["fields"]]


async def publish_policy(served: Served, name: str, version: int) -> None:
    state = served.context.state
    assert await state.acquire_lease(f"trainer:{name}", "me", ttl_s=60)
    record = PolicyPublished(
        policy=name, version=version, step=version, uri="weights", digest="0", published_at=1.0
    )
    await state.publish_policy(record, model_uri="model", lease=f"trainer:{name}", owner="me")


def scored(request: RolloutRequested, reward: float | None, reason: str = "") -> TrajectoryScored:
    return TrajectoryScored(
        trajectory=TrajectoryCompleted(
            run_id=request.run_id,
            trajectory_id=request.trajectory_id,
            group_id=request.group_id,
            member=request.member,
            attempt=0,
            task=request.task,
            purpose=request.purpose,
            split=request.split,
            seed=request.seed,
            policy=request.policy,
            status="finished" if reward is not None else "failed",
            started_at=1.0,
            completed_at=2.0,
        ),
        reward=reward,
        reason=reason,
        scored_at=3.0,
    )


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, "the condition did not come true"
        await asyncio.sleep(0.01)
