"""The generation service on the path: weights, faults of engines, aborts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from odd_engines import Endless
from turn_stack import TurnStack, turn_stack, until, whole_path

from services.generation.hosted import UNHEALTHY_AFTER
from shared.embedded.kafka import EmbeddedKafka
from shared.errors import Internal
from shared.events import TrajectoryCompleted

pytestmark = pytest.mark.asyncio(loop_scope="module")
LOOP = {"scope": "module", "loop_scope": "module"}


@pytest_asyncio.fixture(loop_scope="module")
async def stack(
    _embedded_broker: EmbeddedKafka, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TurnStack]:
    async with turn_stack(_embedded_broker, redis_url, tmp_path_factory.mktemp("turns")) as made:
        yield made


def engine(name: str) -> dict[str, object]:
    return {"engine": f"odd_engines:{name}"}


def versions(trajectory: TrajectoryCompleted) -> list[int]:
    return sorted({v for v, m in zip(trajectory.versions, trajectory.mask, strict=True) if m})


async def test_a_new_version_is_served_before_any_turn_of_an_episode_that_began_with_it(
    stack: TurnStack,
) -> None:
    async with whole_path(stack) as services:
        (end,) = await stack.ended(stack.ask("odd_environments:Calm"))
        assert (end.start_version, versions(end)) == (1, [1])
        view = services["e1"]
        for version in (2, 3):
            await stack.publish_policy(version)
            ends = await stack.ended(*(stack.ask("odd_environments:Calm") for _ in range(5)))
            for end in ends:
                assert versions(end)[0] >= end.start_version
            started = {end.start_version for end in ends}
            assert started <= {version - 1, version}
        await until(lambda: services["g1"].status()["policies"] == {"toy": 3})
        pinned, newest = await stack.ended(
            stack.ask("odd_environments:Calm", policy="toy@2"), stack.ask("odd_environments:Calm")
        )
        assert (pinned.start_version, versions(pinned)) == (2, [2])
        assert versions(newest) == [3]
        assert view.status()["late_replies"] == 0


@pytest.mark.parametrize("where", ["store", "engine"])
async def test_a_version_that_cannot_be_loaded_leaves_the_old_one_live_labelled_and_counted_once(
    stack: TurnStack, where: str
) -> None:
    async with whole_path(stack, generation=engine("Picky")) as services:
        await stack.ended(stack.ask("odd_environments:Calm"))
        worker = services["g1"]
        # An episode of the old version goes on beside it.
        await stack.publish_policy(2, corrupt=where == "store")
        await until(lambda: worker.status()["load_failures"] == 1)
        assert worker.status()["policies"] == {"toy": 1}
        waiting = stack.ask("odd_environments:Calm")
        await asyncio.sleep(0)
        await stack.publish_policy(3)
        (end,) = await stack.ended(waiting)
        assert versions(end)[0] >= end.start_version
        await until(lambda: worker.status()["policies"] == {"toy": 3})
        assert worker.status()["load_failures"] == 1


async def test_numbers_that_json_cannot_hold_fail_their_turn_and_no_other(stack: TurnStack) -> None:
    async with whole_path(stack, generation=engine("NanFirst")) as services:
        ends = await stack.ended(*(stack.ask("odd_environments:Calm") for _ in range(8)))
        failed = [end for end in ends if end.status.value == "failed"]
        assert {end.reason for end in failed} == {"generation_internal"}
        assert len(failed) == 3
        assert services["g1"].status()["turns_failed"] == {"internal": 3}
        assert services["g1"].supervisor.ready
        await until(lambda: services["g1"].counters.get("turns_failed_internal") == 3.0)
        assert services["e1"].counters["episode_generation_internal"] == 3.0


async def test_an_engine_of_nothing_but_nan_turns_its_process_unready_and_ends_it(stack: TurnStack) -> None:
    async with whole_path(stack, generation=engine("NanAlways")) as services:
        supervisor = services["g1"].supervisor
        for _ in range(UNHEALTHY_AFTER):
            stack.ask("odd_environments:Calm")
        async with asyncio.timeout(30):
            await supervisor.failed.wait()
        assert not supervisor.ready
        assert isinstance(supervisor.failure, Internal)
        assert "unhealthy" in supervisor.failure.message


async def test_the_generation_of_an_aborted_run_ends_within_two_seconds(stack: TurnStack) -> None:
    Endless.aborted.clear()
    async with whole_path(stack, generation=engine("Endless")) as services:
        gone = [stack.ask("odd_environments:Calm", run_id="gone") for _ in range(3)]
        kept = stack.ask("odd_environments:Calm", run_id="kept")
        worker = services["g1"].status
        await until(lambda: services["e1"].status()["episodes"] == 4)
        await until(lambda: worker()["policies"])
        await until(lambda: services["r1"].status()["assigned"] == 4)
        began = time.monotonic()
        await stack.state.abort_run("gone", "cancelled")
        ends = await stack.ended(*gone, seconds=2)
        await until(lambda: len(Endless.aborted) == 3, seconds=2)
        assert time.monotonic() - began < 2
        assert {(end.status.value, end.reason) for end in ends} == {("aborted", "cancelled")}
        assert not any("kept" in request for request in Endless.aborted)
        assert kept not in stack.trajectories
        assert services["e1"].status()["episodes"] == 1
