"""The whole path under faults: killed processes, shared reply partitions, orderly ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from turn_stack import TurnStack, turn_stack, until, whole_path

from shared.embedded.kafka import EmbeddedKafka

pytestmark = pytest.mark.asyncio(loop_scope="module")
CALM = "odd_environments:Calm"
GRACE_S = 10.0


@pytest_asyncio.fixture(loop_scope="module")
async def stack(
    _embedded_broker: EmbeddedKafka, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TurnStack]:
    async with turn_stack(_embedded_broker, redis_url, tmp_path_factory.mktemp("turns")) as made:
        yield made


async def test_more_askers_than_reply_partitions_share_them_and_skip_what_is_not_theirs(
    stack: TurnStack,
) -> None:
    async with AsyncExitStack() as running:
        for service, name in (("generation", "g1"), ("router", "r1")):
            await running.enter_async_context(stack.serving(service, name))
        askers = [
            await running.enter_async_context(stack.serving("environment", f"e{i}"))
            for i in range(stack.kafka.reply_partitions + 1)
        ]
        partitions = [asker.status()["reply_partition"] for asker in askers]
        assert len(set(map(str, partitions))) == stack.kafka.reply_partitions
        # Each has rollouts to play: those that share a partition see replies of one another.
        await until(lambda: all(asker.bus._subscriptions[0].partitions for asker in askers))
        ends = await stack.ended(*(stack.ask(CALM) for _ in range(40)))
        assert {end.reason for end in ends} == {"turn_limit"}
        assert [asker.status()["late_replies"] for asker in askers] == [0] * len(askers)
    # The leases end with their askers, not with their time.
    async with stack.serving("environment", "next") as asker:
        leased = [await stack.state.lease_owner(f"reply:{i}") for i in range(stack.kafka.reply_partitions)]
        assert [owner for owner in leased if owner is not None] == ["next"]
        assert leased[int(str(asker.status()["reply_partition"]))] == "next"


async def test_turns_of_a_killed_worker_are_answered_by_another_within_ten_seconds(stack: TurnStack) -> None:
    async with AsyncExitStack() as running:
        router = await running.enter_async_context(stack.serving("router", "r1"))
        await running.enter_async_context(stack.serving("environment", "e1"))
        silent = running.enter_context(
            stack.process("generation", "g2", GENERATION__ENGINE="odd_engines:Silent")
        )
        await stack.workers_of("g2")
        asked = [stack.ask(CALM) for _ in range(8)]
        await until(lambda: router.status()["assigned"] == 8)
        await running.enter_async_context(stack.serving("generation", "g1"))
        os.kill(silent.pid, signal.SIGKILL)
        began = time.monotonic()
        ends = await stack.ended(*asked)
        assert time.monotonic() - began < 10
        assert {turn.worker_id for end in ends for turn in end.turns} == {"g1"}


async def test_two_routers_share_the_load_and_the_death_of_one_loses_no_turn(stack: TurnStack) -> None:
    async with AsyncExitStack() as running:
        for service, name in (("generation", "g1"), ("environment", "e1")):
            await running.enter_async_context(stack.serving(service, name))
        doomed = running.enter_context(stack.process("router", "r2"))
        await stack.alive("r2")
        asked = [stack.ask(CALM, max_turns=100, context_window=8192) for _ in range(16)]
        router = await running.enter_async_context(stack.serving("router", "r1"))
        await until(lambda: int(str(router.status()["assigned"])) > 50)
        os.kill(doomed.pid, signal.SIGKILL)
        assert len(stack.trajectories) < 16
        ends = await stack.ended(*asked)
        assert {(end.reason, len(end.turns)) for end in ends} == {("turn_limit", 100)}
        assert int(str(router.status()["assigned"])) < 16 * 100


async def test_services_end_with_0_on_sigterm_and_hand_back_what_they_had(stack: TurnStack) -> None:
    with stack.process("environment,reward,router,generation", "p9") as process:
        await stack.workers_of("p9")
        asked = [stack.ask(CALM, max_turns=100, context_window=8192, seconds=90) for _ in range(12)]
        first = stack.ask(CALM)
        await stack.ended(first)
        began = time.monotonic()
        process.terminate()
        assert await asyncio.to_thread(process.wait, GRACE_S + 5) == 0
        assert time.monotonic() - began < GRACE_S
    assert len(stack.trajectories) < 13
    async with whole_path(stack):
        await until(lambda: all(i in stack.samples for i in asked), seconds=60)
    assert {stack.trajectories[i][-1].reason for i in asked} == {"turn_limit"}
