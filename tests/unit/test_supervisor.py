"""A dead loop is noticed, readiness turns red before anyone is told, and a stop is bounded and ordered."""

from __future__ import annotations

import asyncio
import threading

import pytest

from shared.errors import Internal
from shared.supervisor import LoopDied, Supervisor


async def forever() -> None:
    await asyncio.Event().wait()


async def test_a_loop_that_raises_fails_the_supervisor_with_its_cause() -> None:
    async def broken() -> None:
        raise KeyError("offset")

    async with Supervisor() as supervisor:
        supervisor.start("steady", forever)
        supervisor.start("broken", broken)
        await asyncio.wait_for(supervisor.failed.wait(), 5)
        assert isinstance(supervisor.failure, LoopDied)
        assert isinstance(supervisor.failure.__cause__, KeyError)
        assert "broken" in supervisor.failure.message
        assert supervisor.loops == {"steady": "running", "broken": "failed"}


async def test_a_loop_that_returns_counts_as_dead() -> None:
    async def short() -> None:
        return None

    async with Supervisor() as supervisor:
        supervisor.start("short", short)
        await asyncio.wait_for(supervisor.failed.wait(), 5)
        assert not supervisor.ready


async def test_a_loop_that_is_cancelled_from_outside_counts_as_dead() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    async with Supervisor() as supervisor:
        supervisor.start("cancelled", cancelled)
        await asyncio.wait_for(supervisor.failed.wait(), 5)
        assert supervisor.loops["cancelled"] == "failed"


async def test_readiness_is_false_before_death_is_reported() -> None:
    seen: list[bool] = []

    async def broken() -> None:
        raise ValueError("x")

    supervisor = Supervisor(on_death=lambda death: seen.append(supervisor.ready))
    assert supervisor.ready
    supervisor.start("broken", broken)
    await asyncio.wait_for(supervisor.failed.wait(), 5)
    await supervisor.stop()
    assert seen == [False]


async def test_death_is_reported_once_however_many_loops_die() -> None:
    deaths: list[LoopDied] = []

    async def broken() -> None:
        raise ValueError("x")

    supervisor = Supervisor(on_death=deaths.append)
    for number in range(3):
        supervisor.start(f"loop-{number}", broken)
    for _ in range(5):
        await asyncio.sleep(0)
    assert set(supervisor.loops.values()) == {"failed"}
    assert len(deaths) == 1


async def test_a_thread_that_raises_fails_the_supervisor() -> None:
    def broken() -> None:
        raise OSError("socket closed")

    async with Supervisor() as supervisor:
        supervisor.start_thread("poll", broken)
        await asyncio.wait_for(supervisor.failed.wait(), 5)
        assert isinstance(supervisor.failure, LoopDied)
        assert isinstance(supervisor.failure.__cause__, OSError)


async def test_stop_ends_loops_in_reverse_order_of_start_and_is_no_death() -> None:
    ended: list[str] = []
    release = threading.Event()
    deaths: list[LoopDied] = []

    async def loop(name: str) -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    def thread() -> None:
        release.wait()
        ended.append("thread")

    supervisor = Supervisor(on_death=deaths.append)
    supervisor.start("first", lambda: loop("first"))
    supervisor.start_thread("thread", thread, end=release.set)
    supervisor.start("last", lambda: loop("last"))
    await asyncio.sleep(0)
    await supervisor.stop()
    await supervisor.stop()
    assert ended == ["last", "thread", "first"]
    assert set(supervisor.loops.values()) == {"stopped"}
    assert deaths == []
    assert not supervisor.ready


async def test_a_loop_that_refuses_to_stop_does_not_hold_up_the_others() -> None:
    stubborn_alive = asyncio.Event()
    let_go = asyncio.Event()

    async def stubborn() -> None:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                stubborn_alive.set()

    supervisor = Supervisor(stop_s=0.05)
    supervisor.start("polite", forever)
    supervisor.start("stubborn", stubborn)
    await asyncio.sleep(0)
    await supervisor.stop()
    assert stubborn_alive.is_set()
    assert supervisor.loops == {"polite": "stopped", "stubborn": "running"}
    let_go.set()


async def test_a_name_in_use_and_a_start_after_stop_are_refused() -> None:
    supervisor = Supervisor()
    supervisor.start("poll", forever)
    with pytest.raises(Internal, match="poll"):
        supervisor.start("poll", forever)
    await supervisor.stop()
    with pytest.raises(Internal, match="being stopped"):
        supervisor.start("late", forever)
