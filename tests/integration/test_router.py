"""The router on the path: waiting, fallback, stickiness, and workers that do not answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from turn_stack import TurnStack, turn_stack, until

from shared.embedded.kafka import EmbeddedKafka
from shared.events import TrajectoryCompleted
from shared.state import WorkerRecord

pytestmark = pytest.mark.asyncio(loop_scope="module")
CALM = "odd_environments:Calm"


@pytest_asyncio.fixture(loop_scope="module")
async def stack(
    _embedded_broker: EmbeddedKafka, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TurnStack]:
    async with turn_stack(_embedded_broker, redis_url, tmp_path_factory.mktemp("turns")) as made:
        yield made


def served_by(*ends: TrajectoryCompleted) -> Counter[str]:
    return Counter(turn.worker_id for end in ends for turn in end.turns)


async def test_turns_wait_visibly_for_a_worker_and_are_asked_again_until_there_is_one(
    stack: TurnStack,
) -> None:
    tries = {"try_deadline_s": 1.5}
    async with (
        stack.serving("router", "r1") as router,
        stack.serving("environment", "e1", environment=tries) as environment,
    ):
        asked = [stack.ask(CALM) for _ in range(3)]
        lost = stack.ask(CALM, seconds=2.5)
        await until(lambda: router.status()["waiting"] == 4)
        # Failed by the router as retryable, before the try's deadline: asked again.
        await until(lambda: environment.status()["turn_retries"] >= 4)
        (end,) = await stack.ended(lost)
        assert (end.status.value, end.reason) == ("aborted", "deadline")
        async with stack.serving("generation", "g1"):
            ends = await stack.ended(*asked)
            assert {end.reason for end in ends} == {"turn_limit"}
            await until(lambda: router.status()["waiting"] == 0)


async def test_a_class_without_a_worker_falls_back_and_is_counted_and_gets_its_own_when_it_comes(
    stack: TurnStack,
) -> None:
    async with AsyncExitStack() as running:
        router = await running.enter_async_context(stack.serving("router", "r1"))
        await running.enter_async_context(stack.serving("environment", "e1"))
        await running.enter_async_context(stack.serving("generation", "g1"))
        (end,) = await stack.ended(stack.ask(CALM, affinity="compute"))
        assert {turn.device_class for turn in end.turns} == {"bandwidth"}
        assert router.status()["fallbacks"] == 3
        async with stack.serving("generation", "g2", generation={"device_class": "compute"}):
            await until(lambda: "compute" in router.status()["classes"])
            own, other = await stack.ended(stack.ask(CALM, affinity="compute"), stack.ask(CALM))
            assert {turn.device_class for turn in own.turns} == {"compute"}
            assert {turn.device_class for turn in other.turns} == {"bandwidth"}
            assert router.status()["fallbacks"] == 3
        await until(lambda: "compute" not in router.status()["classes"])
        (end,) = await stack.ended(stack.ask(CALM, affinity="compute"))
        assert {turn.device_class for turn in end.turns} == {"bandwidth"}
        assert router.status()["fallbacks"] == 6


async def test_a_trajectory_stays_with_its_worker_and_the_load_is_shared(stack: TurnStack) -> None:
    async with AsyncExitStack() as running:
        router = await running.enter_async_context(stack.serving("router", "r1"))
        await running.enter_async_context(stack.serving("environment", "e1"))
        for name in ("g1", "g2"):
            await running.enter_async_context(stack.serving("generation", name))
        await stack.workers_of("g1", "g2")
        await until(lambda: router.status()["classes"] == {"bandwidth": ["g1", "g2"]})
        ends = await stack.ended(*(stack.ask(CALM, max_turns=5) for _ in range(20)))
        assert all(len(served_by(end)) == 1 for end in ends)
        assert set(served_by(*ends)) == {"g1", "g2"}


async def test_neither_a_draining_worker_nor_one_that_has_stopped_reporting_is_chosen(
    stack: TurnStack,
) -> None:
    async with AsyncExitStack() as running:
        await running.enter_async_context(stack.serving("generation", "g1"))
        await stack.workers_of("g1")
        (live,) = await stack.state.workers()
        # Both would be preferred: they own the same partitions and have nothing to do.
        for name, draining, ttl in (("a-draining", True, 60.0), ("a-dead", False, 0.2)):
            record = live.model_copy(update={"worker_id": name, "draining": draining, "waiting": -100})
            await stack.state.report_worker(WorkerRecord.model_validate(record.model_dump()), ttl_s=ttl)
        await stack.workers_of("a-draining", "g1")
        router = await running.enter_async_context(stack.serving("router", "r1"))
        await running.enter_async_context(stack.serving("environment", "e1"))
        await until(lambda: router.status()["classes"] == {"bandwidth": ["g1"]})
        (end,) = await stack.ended(stack.ask(CALM))
        assert end.reason == "turn_limit"


async def test_a_worker_that_answers_nothing_is_ejected_and_its_turns_run_once_elsewhere(
    stack: TurnStack,
) -> None:
    async with AsyncExitStack() as running:
        router = await running.enter_async_context(stack.serving("router", "r1"))
        environment = await running.enter_async_context(
            stack.serving("environment", "e1", environment={"try_deadline_s": 1.0})
        )
        # First by name, so that an idle stack prefers it.
        silent = {"engine": "odd_engines:Silent"}
        await running.enter_async_context(stack.serving("generation", "a-silent", generation=silent))
        for name in ("g1", "g2"):
            await running.enter_async_context(stack.serving("generation", name))
        await stack.workers_of("a-silent", "g1", "g2")
        await until(lambda: len(router.status()["classes"].get("bandwidth", [])) == 3)
        ends = await stack.ended(*(stack.ask(CALM) for _ in range(30)))
        assert {end.reason for end in ends} == {"turn_limit"}
        assert set(served_by(*ends)) == {"g1", "g2"}
        assert router.status()["ejected"] == ["a-silent"]
        retries = environment.status()["turn_retries"]
        slow = [turn.wait_s for end in ends for turn in end.turns if turn.wait_s >= 1.0]
        assert 0 < len(slow) == retries < 30
        assert max(slow) < 2.0
        ends = await stack.ended(*(stack.ask(CALM) for _ in range(30)))
        assert environment.status()["turn_retries"] == retries
        assert max(turn.wait_s for end in ends for turn in end.turns) < 1.0
