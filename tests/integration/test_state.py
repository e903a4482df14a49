"""The rules of shared state: one newest version, one lease holder, hints that only hurry, a lost Redis."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from shared.embedded.redis import EmbeddedRedis
from shared.errors import Conflict, LeaseLost, NotFound, Unavailable
from shared.events import PolicyPublished
from shared.settings import RedisSettings
from shared.state import ProcessRecord, RunRecord, State, WorkerRecord


@pytest.fixture
async def state(redis_settings: RedisSettings) -> AsyncIterator[State]:
    state = State(redis_settings)
    await state.connect()
    yield state
    await state.close()


@pytest.fixture
async def rival(redis_settings: RedisSettings) -> AsyncIterator[State]:
    """Another process's."""
    state = State(redis_settings)
    yield state
    await state.close()


def version(number: int, *, digest: str = "d", policy: str = "p") -> PolicyPublished:
    return PolicyPublished(
        policy=policy, version=number, step=number, uri=f"weights/v{number}", digest=digest, published_at=1.5
    )


async def publish(state: State, number: int, *, owner: str = "me", digest: str = "d") -> None:
    await state.publish_policy(version(number, digest=digest), model_uri="m", lease="trainer:p", owner=owner)


def run(run_id: str, created_at: float) -> RunRecord:
    return RunRecord(run_id=run_id, state="queued", recipe="{}", created_at=created_at)


async def until(condition: Callable[[], object], *, seconds: float = 20) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "waited in vain"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


@contextlib.asynccontextmanager
async def background(*loops: Callable[[], object]) -> AsyncIterator[list[asyncio.Task[object]]]:
    tasks = [asyncio.ensure_future(loop()) for loop in loops]  # type: ignore[call-overload]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# Policies and leases


async def test_a_policy_version_only_grows(state: State) -> None:
    await state.acquire_lease("trainer:p", "me", ttl_s=10)
    await publish(state, 3)
    for refused in (2, 3):
        with pytest.raises(Conflict):
            await publish(state, refused, digest="another")
    await publish(state, 4)
    newest = await state.policy("p")
    assert newest is not None
    assert newest == (version(4), "m")
    assert await state.policy_versions("p") == [3, 4]


async def test_publishing_the_same_record_again_is_no_conflict(state: State) -> None:
    await state.acquire_lease("trainer:p", "me", ttl_s=10)
    await publish(state, 1)
    await publish(state, 1)
    assert await state.policy_versions("p") == [1]


async def test_concurrent_publishers_of_one_version_have_one_winner(state: State, rival: State) -> None:
    await state.acquire_lease("trainer:p", "me", ttl_s=10)
    outcomes = await asyncio.gather(
        *(publish(s, 1, digest=f"{i}") for i, s in enumerate([state, rival] * 8)), return_exceptions=True
    )
    assert sum(outcome is None for outcome in outcomes) == 1
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 15


async def test_a_trainer_whose_lease_was_taken_over_cannot_publish(state: State, rival: State) -> None:
    assert await state.acquire_lease("trainer:p", "me", ttl_s=0.2)
    await publish(state, 1)
    assert not await rival.acquire_lease("trainer:p", "rival", ttl_s=10)
    while not await rival.acquire_lease("trainer:p", "rival", ttl_s=10):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    await publish(rival, 2, owner="rival")
    for number in (2, 3):
        with pytest.raises(LeaseLost, match="rival"):
            await publish(state, number)
    newest = await state.policy("p")
    assert newest is not None
    assert newest[0].version == 2
    assert not await state.acquire_lease("trainer:p", "me", ttl_s=10)


async def test_an_expired_lease_does_not_publish_even_when_nobody_took_it(state: State) -> None:
    with pytest.raises(LeaseLost, match="nobody"):
        await publish(state, 1)


async def test_a_lease_has_one_holder_under_contention_and_is_renewed_by_it(
    state: State, rival: State
) -> None:
    owners = [f"o{i}" for i in range(20)]
    won = await asyncio.gather(
        *((rival if i % 2 else state).acquire_lease("x", o, ttl_s=5) for i, o in enumerate(owners))
    )
    (winner,) = [owner for owner, ok in zip(owners, won, strict=True) if ok]
    assert await state.lease_owner("x") == winner
    assert await rival.acquire_lease("x", winner, ttl_s=5)
    await state.release_lease("x", "somebody else")
    assert await state.lease_owner("x") == winner
    await state.release_lease("x", winner)
    assert await state.lease_owner("x") is None


async def test_unknown_things_are_not_found(state: State) -> None:
    assert await state.policy("nobody") is None
    for asked in (state.policy_version("nobody", 1), state.run("nobody"), state.task("nobody")):
        with pytest.raises(NotFound, match="nobody"):
            await asked


# Idempotency


async def test_concurrent_requests_with_one_key_make_one_thing(state: State, rival: State) -> None:
    made = await asyncio.gather(
        *((rival if i % 2 else state).claim_idempotency("key", b"body", f"id-{i}") for i in range(30))
    )
    assert len(set(made)) == 1
    with pytest.raises(Conflict, match="another body"):
        await state.claim_idempotency("key", b"other body", "id-x")
    assert await state.claim_idempotency("key 2", b"other body", "id-y") == "id-y"


async def test_the_first_result_of_a_trajectory_counts(state: State) -> None:
    for result in ('{"n": 1}', '{"n": 2}'):
        await state.add_task_result("t", "t/g.0#0", result)
    results = await state._redis.hgetall(state._key("task", "t", "results"))
    assert results == {"t/g.0#0": '{"n": 1}'}


# Heartbeats and the queue


async def test_heartbeats_expire_and_come_back(state: State) -> None:
    worker = WorkerRecord(
        worker_id="w", role="both", device_class="bandwidth", gpu_model="cpu", url="", partitions=[0],
        running=0, waiting=0, kv_usage=0.0, policies={}, updated_at=1.0,
    )  # fmt: skip
    process = ProcessRecord(process_id="p", service="reward", busy_s=0, started_at=0, updated_at=0)
    await state.report_worker(worker, ttl_s=0.3)
    await state.report_process(process, ttl_s=0.3)
    assert await state.workers() == [worker]
    assert await state.processes() == [process]
    while await state.workers() or await state.processes():  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert await state._redis.scard(state._key("workers")) == 0
    await state.report_worker(worker, ttl_s=5)
    assert await state.workers() == [worker]
    await state.remove_worker("w")
    assert await state.workers() == []


async def test_an_id_that_came_back_while_it_was_being_forgotten_stays(state: State) -> None:
    process = ProcessRecord(process_id="p", service="reward", busy_s=0, started_at=0, updated_at=0)
    await state.report_process(process, ttl_s=5)
    await state._forget_gone("processes", "process", ["p"])
    assert await state.processes() == [process]


async def test_runs_leave_the_queue_in_the_order_they_came(state: State) -> None:
    for run_id, created_at in (("c", 30.0), ("a", 20.0), ("b", 10.0)):
        await state.create_run(run(run_id, created_at))
    queued = frozenset({"queued"})
    left = []
    while (oldest := await state.oldest_run(queued)) is not None:
        left.append(oldest.run_id)
        await state.update_run(oldest.run_id, state="running", step=3, reward=0.5)
    assert left == ["b", "a", "c"]
    assert [r.run_id for r in await state.runs(limit=2)] == ["c", "a"]
    assert (await state.run("a")).step == 3


async def test_open_groups_are_a_set(state: State) -> None:
    await state.set_open_groups("r", added=["g1", "g2"])
    await state.set_open_groups("r", added=["g2", "g3"], removed=["g1"])
    await state.set_open_groups("r")
    assert await state.open_groups("r") == {"g2", "g3"}


# Many at once


async def test_a_thousand_callers_at_once_share_the_connections(state: State) -> None:
    assert await asyncio.gather(*(state.lease_owner(f"x{i}") for i in range(1000))) == [None] * 1000


# Hints


async def test_a_hint_hurries_and_its_absence_only_costs_the_interval(state: State, rival: State) -> None:
    async with background(state.follow_hints):
        # Until the subscription stands, a hint is lost: that is what the interval is for.
        while True:
            waiting = asyncio.ensure_future(state.wait_hint("x", timeout_s=5))
            await rival.hint("x")
            done, _ = await asyncio.wait({waiting}, timeout=0.2)
            if done:
                break
            waiting.cancel()
    began = time.monotonic()
    await rival.wait_hint("x", timeout_s=0.2)
    assert time.monotonic() - began >= 0.19


async def test_an_event_stream_delivers_in_order_and_from_where_one_left(state: State) -> None:
    for i in range(250):
        await state.append_run_event("r", str(i))
    seen: list[tuple[str, str]] = []
    async for event_id, document in state.run_events("r"):
        if document:
            seen.append((event_id, document))
        if len(seen) == 250:
            break
    assert [document for _, document in seen] == [str(i) for i in range(250)]
    async for _, document in state.run_events("r", after=seen[200][0]):
        assert document == "201"
        break


# Redis that goes away


async def test_redis_down_for_seconds_kills_no_loop_and_is_learned_from_within_the_interval(
    tmp_path: Path,
) -> None:
    redis = EmbeddedRedis(tmp_path / "redis")
    settings = RedisSettings(url=redis.url)
    state, trainer = State(settings), State(settings)
    versions: list[int] = []
    events: list[str] = []
    beats = 0

    async def follow() -> None:
        while True:
            newest = await state.policy("p")
            if newest is not None and newest[0].version not in versions:
                versions.append(newest[0].version)
            await state.wait_hint("policies")

    async def stream() -> None:
        async for _, document in state.run_events("r"):
            events.extend([document] if document else [])

    async def beat() -> None:
        nonlocal beats
        while True:
            assert await state.acquire_lease("beat", "me", ttl_s=10)
            beats += 1
            await asyncio.sleep(0.05)

    with redis:
        await state.connect()
        await trainer.acquire_lease("trainer:p", "me", ttl_s=60)
        async with background(state.follow_hints, follow, stream, beat) as loops:
            await publish(trainer, 1)
            await trainer.append_run_event("r", "before")
            await until(lambda: versions == [1] and events == ["before"] and beats)
            await asyncio.sleep(1.1)  # what is written within the last second may be lost
            redis.child.kill()
            redis.child.reap()
            assert not await state.ping()
            await asyncio.sleep(4.0)
            assert not any(loop.done() for loop in loops)
            redis.spawn()
            await asyncio.to_thread(redis.wait_ready)
            await publish(trainer, 2)
            await trainer.append_run_event("r", "after")
            seen = beats
            await until(lambda: versions == [1, 2] and events == ["before", "after"] and beats > seen)
            assert not any(loop.done() for loop in loops)
    await state.close()
    await trainer.close()


async def test_a_redis_that_stays_away_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.state.link._PATIENCE_S", 0.3)
    state = State(RedisSettings(url="redis://127.0.0.1:9/0"))
    for asked in (state.policy("p"), state.acquire_lease("x", "me", ttl_s=1), state.hint("x")):
        with pytest.raises(Unavailable):
            await asked
    with pytest.raises(Unavailable):
        await anext(state.run_events("r"))
    with pytest.raises(Unavailable, match="REDIS__URL"):
        await state.connect(timeout_s=0.1)
    await state.close()


class Wire:
    """A TCP way to Redis that can fall silent without closing, as a cable that is pulled does."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._silent: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._open:
            writer.close()

    def cut(self) -> None:
        """Nothing passes on the connections of now any more; new ones work."""
        self._silent |= self._open

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._open |= {writer, back}
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                if sink not in self._silent:
                    sink.write(data)
        if sink not in self._silent:
            sink.close()


async def test_connections_that_fall_silent_are_replaced(redis_url: str) -> None:
    port = int(redis_url.rsplit(":", 1)[1].split("/")[0])
    prefix = f"t{uuid.uuid4().hex[:10]}:"
    async with Wire(port) as wire:
        state = State(RedisSettings(url=f"redis://127.0.0.1:{wire.port}/0", prefix=prefix))
        direct = State(RedisSettings(url=redis_url, prefix=prefix))
        await direct.acquire_lease("trainer:p", "me", ttl_s=60)
        versions: list[int] = []
        hurried = asyncio.Event()

        async def follow() -> None:
            while True:
                newest = await state.policy("p")
                if newest is not None:
                    versions.append(newest[0].version)
                await asyncio.sleep(0.05)

        async def listen() -> None:
            while True:
                await state.wait_hint("x", timeout_s=60)
                hurried.set()

        async with background(state.follow_hints, follow, listen):
            await publish(direct, 1)
            await until(lambda: 1 in versions)
            await direct.hint("x")
            await until(hurried.is_set)
            hurried.clear()
            wire.cut()
            await publish(direct, 2)
            await until(lambda: 2 in versions, seconds=10)
            while not hurried.is_set():
                await direct.hint("x")
                await asyncio.sleep(0.05)
        await state.close()
        await direct.close()
