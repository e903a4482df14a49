"""The rules of delivery: at least once, the commit is the low watermark, a revoked partition is fenced."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from bus_process import Collector, committed, event, joined, number, process, publish, until
from confluent_kafka.admin import AdminClient

from shared import metrics, topics
from shared.bus import Delivery
from shared.embedded import admin
from shared.events import Event, PolicyPublished
from shared.settings import KafkaSettings
from shared.topics import REPLIES, SAMPLES, TURNS

ROOT = Path(__file__).parents[2]


async def more_than(count: int, got: Collector) -> None:
    await until(lambda: len(got.held) > count)


MEMBER = """
import asyncio, pathlib, sys
from shared.settings import KafkaSettings
from bus_process import process
async def main():
    kafka = KafkaSettings.model_validate_json(sys.argv[1])
    async with process(kafka, pathlib.Path(sys.argv[2]), "victim") as p:
        p.bus.subscribe(["turns"], group="router", handler=lambda ds: print(len(ds), flush=True))
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_unacked_deliveries_return_to_the_next_member_and_the_acked_prefix_does_not(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    first, second = Collector(), Collector(ack=True)
    async with process(kafka, tmp_path) as p:
        publish(p.bus, TURNS, range(10))
        p.bus.subscribe([TURNS], group="router", handler=first, drain_s=0.0)
        await until(lambda: len(first.held) == 10)
        for i in (0, 1, 2, 3, 6):
            first.held[i].ack()
    async with process(kafka, tmp_path) as p:
        p.bus.subscribe([TURNS], group="router", handler=second)
        await until(lambda: len(second.held) >= 6)
    assert second.numbers == [4, 5, 6, 7, 8, 9]


async def test_the_commit_is_the_low_watermark_whatever_threads_ack_in_whatever_order(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    got = Collector()
    async with process(kafka, tmp_path) as p:
        publish(p.bus, TURNS, range(3000))
        p.bus.subscribe([TURNS], group="router", handler=got, max_unacked=10_000)
        await until(lambda: len(got.held) == 3000)
        hole = got.held[1234]
        rest = [d for d in got.held if d is not hole]
        random.Random(1).shuffle(rest)
        # Each acknowledged twice, by two of three threads.
        shares = [rest[:2000], rest[1000:], rest[2000:] + rest[:1000]]
        threads = [threading.Thread(target=lambda s=share: [d.ack() for d in s]) for share in shares]
        for thread in threads:
            thread.start()
        await until(lambda: not any(thread.is_alive() for thread in threads))
        await until(lambda: committed(kafka, "router", TURNS) == {0: 1234})
        hole.ack()
        await until(lambda: committed(kafka, "router", TURNS) == {0: 3000})


async def test_a_killed_members_events_move_within_the_session_timeout_and_none_is_lost(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", MEMBER, kafka.model_dump_json(), str(tmp_path)]
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as victim:  # noqa: ASYNC220
        assert victim.stdout is not None
        got = Collector(ack=True)
        async with process(kafka, tmp_path) as p:
            publish(p.bus, TURNS, range(40), partitions=4)
            await asyncio.to_thread(victim.stdout.readline)
            survivor = p.bus.subscribe([TURNS], group="router", handler=got)
            await until(lambda: len(survivor.partitions) == 2)
            victim.send_signal(signal.SIGKILL)
            began = time.monotonic()
            await until(lambda: len(survivor.partitions) == 4)
            moved = time.monotonic() - began
            publish(p.bus, TURNS, range(40, 80), partitions=4)
            await until(lambda: set(got.numbers) == set(range(80)))
    assert moved < 3 * kafka.session_timeout_s


async def test_over_the_limit_partitions_pause_while_the_membership_goes_on_and_then_resume(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    got = Collector()
    async with process(kafka, tmp_path) as p:
        publish(p.bus, TURNS, range(4000))
        member = p.bus.subscribe(
            [TURNS], group="router", handler=got, max_unacked=100, drain_s=0.0, max_poll_interval_s=1.0
        )
        await until(lambda: len(got.held) >= 100)
        held = len(got.held)
        await asyncio.sleep(2.0)  # twice the poll interval: who does not poll is out by now
        assert len(got.held) == held < 500
        assert member.partitions == [0, 1, 2, 3]
        while len(got.held) < 4000:
            for delivery in got.held[:]:
                delivery.ack()
            await more_than(len(got.held), got)
        assert got.numbers == list(range(4000))


async def test_partitions_that_come_while_paused_are_paused_too(kafka: KafkaSettings, tmp_path: Path) -> None:
    full, other = Collector(), Collector()
    async with process(kafka, tmp_path) as p:
        async with process(kafka, tmp_path, "other") as q:
            a = p.bus.subscribe([TURNS], group="router", handler=full, max_unacked=10, drain_s=0.0)
            b = q.bus.subscribe([TURNS], group="router", handler=other, drain_s=0.0)
            await joined(a, b, partitions=4)
            publish(p.bus, TURNS, range(40), partitions=4)
            await until(lambda: len(full.held) >= 10 and len(other.held) == 20)
        held = len(full.held)
        await joined(a, partitions=4)
        await asyncio.sleep(0.5)
        assert len(full.held) == held
        full.ack = True
        for delivery in full.held[:]:
            delivery.ack()
        await until(lambda: len(full.held) == 40)
        assert sorted(full.numbers) == list(range(40))


async def test_a_revoked_partition_is_drained_and_committed_then_late_acks_are_counted_and_void(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    first, second = Collector(), Collector(ack=True)
    group = f"g{time.time_ns()}"
    fenced = metrics.FENCED_ACKS.labels(group)
    async with process(kafka, tmp_path) as p, process(kafka, tmp_path, "q") as q:
        a = p.bus.subscribe([TURNS], group=group, handler=first, drain_s=0.5)
        await joined(a, partitions=4)
        publish(p.bus, TURNS, range(40), partitions=4)
        await until(lambda: len(first.held) == 40)
        b = q.bus.subscribe([TURNS], group=group, handler=second)
        # Within the drain time the first half of each partition is acknowledged, afterwards all.
        for delivery in [d for d in first.held if d.offset < 5]:
            delivery.ack()
        await joined(a, b, partitions=4)
        moved = set(b.partitions)
        assert len(moved) == 2
        for delivery in first.held:
            delivery.ack()
        assert fenced._value.get() == 20
        await until(lambda: len(second.held) >= 10)
        assert sorted(number(d) for d in second.held) == sorted(
            number(d) for d in first.held if d.partition in moved and d.offset >= 5
        )


async def test_a_retry_whose_partition_has_moved_is_the_new_members_alone(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    attempts = 0

    def failing(deliveries: list[Delivery]) -> None:
        nonlocal attempts
        attempts += 1
        raise RuntimeError("never")

    got = Collector(ack=True)
    async with process(kafka, tmp_path) as p, process(kafka, tmp_path, "q") as q:
        member = p.bus.subscribe([TURNS], group="router", handler=failing, drain_s=0.0)
        await joined(member, partitions=4)
        publish(q.bus, TURNS, range(1))
        await until(lambda: attempts == 1)
        p.bus.leave(member)
        await until(lambda: not member.partitions)
        before = attempts
        q.bus.subscribe([TURNS], group="router", handler=got)
        await until(lambda: got.numbers == [0])
        await asyncio.sleep(1.5)  # longer than all retries take
        assert attempts == before


async def test_a_handler_longer_than_the_poll_interval_keeps_the_membership(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    got = Collector()

    def slow(deliveries: list[Delivery]) -> None:
        if not got.held:
            time.sleep(2.0)
        got(deliveries)

    async with process(kafka, tmp_path) as p:
        member = p.bus.subscribe([TURNS], group="router", handler=slow, max_poll_interval_s=1.0, drain_s=0.0)
        await joined(member, partitions=4)
        before = list(member._partitions.values())
        publish(p.bus, TURNS, range(3))
        await until(lambda: got.numbers == [0, 1, 2])
        assert list(member._partitions.values()) == before, "it left the group and came back"
        for delivery in got.held:
            delivery.ack()
        await until(lambda: committed(kafka, "router", TURNS) == {0: 3})


async def test_events_from_before_the_group_are_received(kafka: KafkaSettings, tmp_path: Path) -> None:
    got = Collector(ack=True)
    async with process(kafka, tmp_path) as p:
        assert publish(p.bus, SAMPLES, range(5), partitions=4).wait(20)
        p.bus.subscribe([SAMPLES], group="training.r1", handler=got)
        await until(lambda: sorted(got.numbers) == list(range(5)))


async def test_a_partition_that_is_added_loses_nothing(local_kafka: KafkaSettings, tmp_path: Path) -> None:
    got = Collector(ack=True)
    async with process(local_kafka, tmp_path) as p:
        member = p.bus.subscribe([SAMPLES], group="training.r1", handler=got)
        await joined(member, partitions=4)
        more = local_kafka.model_copy(update={"partitions": 6})
        admin.ensure_topics(more.bootstrap, topics.plan(more), settings=more)
        client = AdminClient({"bootstrap.servers": more.bootstrap})
        name = more.prefix + SAMPLES
        await until(lambda: len(client.list_topics(name).topics[name].partitions) == 6)
        async with process(more, tmp_path, "fresh") as q:
            assert publish(q.bus, SAMPLES, range(60), partitions=6).wait(20)
        await until(lambda: sorted(got.numbers) == list(range(60)))


async def test_a_reader_misses_nothing_after_open_and_reads_nothing_from_before(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    got: list[int] = []

    def keep(events: list[Event]) -> None:
        for one in events:
            assert isinstance(one, PolicyPublished)
            got.append(one.version)

    async with process(kafka, tmp_path) as p:
        assert publish(p.bus, REPLIES, range(20)).wait(20)
        await p.bus.read(REPLIES, partition=0, handler=keep)
        publish(p.bus, REPLIES, range(20, 60))
        await until(lambda: len(got) >= 40)
    assert got == list(range(20, 60))


async def test_a_reader_goes_on_after_a_handler_that_raises(kafka: KafkaSettings, tmp_path: Path) -> None:
    got: list[int] = []

    def picky(events: list[Event]) -> None:
        numbers = [one.version for one in events if isinstance(one, PolicyPublished)]
        if 3 in numbers:
            raise ValueError("not three")
        got.extend(numbers)

    async with process(kafka, tmp_path) as p:
        await p.bus.read(REPLIES, partition=0, handler=picky)
        publish(p.bus, REPLIES, range(8))
        await until(lambda: got == [0, 1, 2, 4, 5, 6, 7])
        assert p.supervisor.ready


async def test_partitions_can_be_asked_for_while_they_change(
    embedded_kafka: KafkaSettings, tmp_path: Path
) -> None:
    async with process(embedded_kafka, tmp_path) as p:
        member = p.bus.subscribe([TURNS], group="router", handler=Collector())
        await joined(member, partitions=4)
        stop = time.monotonic() + 0.3
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                while time.monotonic() < stop:
                    assert len(member.partitions) + member.unacked >= 0
            except BaseException as error:
                errors.append(error)

        asker = threading.Thread(target=ask)
        asker.start()
        async with process(embedded_kafka, tmp_path, "q") as q:
            other = q.bus.subscribe([TURNS], group="router", handler=Collector())
            await until(lambda: other.partitions)
        await until(lambda: not asker.is_alive())
        assert errors == []


@pytest.mark.parametrize("purpose", ["train", ""])
async def test_headers_carry_run_purpose_and_trace(
    embedded_kafka: KafkaSettings, tmp_path: Path, purpose: str
) -> None:
    got = Collector(ack=True)
    trace = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    async with process(embedded_kafka, tmp_path) as p:
        p.bus.subscribe([TURNS], group="router", handler=got, accept=lambda h: h["run"] == b"r1")
        p.bus.publish(TURNS, event(1), partition=0, run_id="other")
        await p.bus.send(TURNS, event(2), run_id="r1", traceparent=trace, purpose=purpose)
        await until(lambda: got.numbers == [2])
        assert got.held[0].traceparent == trace
        assert got.held[0].headers.get("purpose", b"") == purpose.encode()
