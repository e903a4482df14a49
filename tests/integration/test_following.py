"""New weights on their way into a worker that goes on sampling: pulled from a store as slow as a network."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import groupby

import odd_engines
import pytest
import pytest_asyncio
from turn_stack import TurnStack, turn_stack, until

from benchmarks.slow_store import slow_uri
from services.generation.app import create_app
from shared import weights
from shared.embedded.kafka import EmbeddedKafka
from shared.events import PolicyPublished
from shared.weights import RawTensor

pytestmark = pytest.mark.asyncio(loop_scope="module")
CALM = "odd_environments:Calm"
BUCKETS, BUCKET = 6, 1 << 20
MEGABITS = 80.0
"""A bucket takes a tenth of a second."""


@pytest_asyncio.fixture(loop_scope="module")
async def stack(
    _embedded_broker: EmbeddedKafka, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TurnStack]:
    odd_engines.Logged.log.clear()
    async with turn_stack(_embedded_broker, redis_url, tmp_path_factory.mktemp("following")) as made:
        yield made


@asynccontextmanager
async def following(stack: TurnStack) -> AsyncIterator[None]:
    """A worker on a slow store, with version 1 in it, and what turns need beside it."""
    settings = stack.settings("g1", generation={"engine": "odd_engines:Logged"})
    settings = settings.model_copy(update={"store": slow_uri(stack.store.root, megabits=MEGABITS)})
    app = create_app(settings)
    async with AsyncExitStack() as running:
        await running.enter_async_context(app.router.lifespan_context(app))
        router = await running.enter_async_context(stack.serving("router", "r1"))
        await running.enter_async_context(stack.serving("environment", "e1"))
        await stack.workers_of("g1")
        await until(lambda: router.status()["classes"])
        await stack.ended(stack.ask(CALM))
        odd_engines.Logged.log.clear()
        yield


async def publish(stack: TurnStack, version: int) -> None:
    """A version in several buckets."""
    tensors = {f"t{i}": RawTensor("U8", (BUCKET,), bytes(BUCKET)) for i in range(BUCKETS)}
    prefix, digest = weights.publish(
        stack.store, tensors, policy="toy", version=version, step=version, bucket_bytes=BUCKET
    )
    record = PolicyPublished(
        policy="toy", version=version, step=version, uri=prefix, digest=digest, published_at=time.time()
    )
    known = await stack.state.policy("toy")
    assert known is not None
    await stack.state.publish_policy(record, model_uri=known[1], lease="trainer:toy", owner="test")


def done(version: int) -> list[str]:
    """What was done with a version."""
    return [what for what, which in odd_engines.Logged.log if which == version]


async def test_turns_are_answered_under_the_old_version_while_the_new_one_is_pulled(stack: TurnStack) -> None:
    async with following(stack):
        # Begun now: versions of an episode may not be older than its start.
        asked = [stack.ask(CALM, max_turns=40, context_window=8192) for _ in range(4)]
        await publish(stack, 2)
        await until(lambda: len(done(2)) >= 2)
        (end,) = await stack.ended(stack.ask(CALM, policy="toy@1"))
        assert "swap" not in done(2)
        assert {v for v in end.versions if v >= 0} == {1}
        await until(lambda: "swap" in done(2))
        assert done(2) == ["add"] * BUCKETS + ["check", "swap"]
        await stack.ended(*asked)


async def test_of_two_updates_in_quick_succession_only_the_newer_is_loaded(stack: TurnStack) -> None:
    async with following(stack):
        await publish(stack, 2)
        await until(lambda: len(done(2)) >= 2)
        await publish(stack, 3)
        await until(lambda: "swap" in done(3))
        assert "swap" not in done(2)
        # One after the other: what was begun is given up before the next begins.
        assert [version for version, _ in groupby(which for _, which in odd_engines.Logged.log)] == [2, 3]
        (end,) = await stack.ended(stack.ask(CALM))
        assert {v for v in end.versions if v >= 0} == {3}


async def test_a_trainer_faster_than_the_store_does_not_starve_its_workers(stack: TurnStack) -> None:
    async with following(stack):
        for version in range(2, 12):
            await publish(stack, version)
            await until(
                lambda version=version: done(version) or "swap" in [w for w, _ in odd_engines.Logged.log]
            )
        await until(lambda: "swap" in done(11))
        swapped = [version for what, version in odd_engines.Logged.log if what == "swap"]
        assert swapped == sorted(swapped)
        assert len(swapped) >= 2
