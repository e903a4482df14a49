"""What goes wrong on the bus, and what comes of it: poison, large payloads, refusals, gaps, dead brokers."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from brokers import PARTITIONS, SESSION_S, prefixed, settings_for
from bus_process import Collector, committed, event, joined, number, process, publish, until

from shared import metrics, topics
from shared.bus import Delivery
from shared.bus.codec import encode
from shared.bus.tail import Tailed, tail
from shared.embedded import admin
from shared.embedded.kafka import EmbeddedKafka, LocalKafka
from shared.errors import Invalid, Unavailable
from shared.events import Event, PolicyPublished
from shared.settings import KafkaSettings
from shared.store import FileStore
from shared.topics import DEADLETTERS, REPLIES, TURNS

_PRODUCE, _OFFSET_COMMIT = 0, 8
_TOO_LARGE, _TOPIC_DENIED, _GROUP_DENIED = 10, 29, 30


def dead_letters(kafka: KafkaSettings, folder: Path) -> list[Tailed]:
    store = FileStore(folder / "store")
    return list(tail(kafka, DEADLETTERS, store=store, from_start=True, follow=False))


def value(counter: object) -> float:
    return counter._value.get()  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def faulty() -> Iterator[tuple[KafkaSettings, Callable[[int, list[int]], None]]]:
    """A broker of the test's own, and what makes it answer the next requests of a kind with errors."""
    with EmbeddedKafka(session_timeout_s=SESSION_S) as broker:
        settings = settings_for(broker.bootstrap, embedded=True)
        broker.create_topics(prefixed(settings))

        def fail(api: int, codes: list[int]) -> None:
            push = broker._library.rd_kafka_mock_push_request_errors_array
            push.restype = None
            push.argtypes = [ctypes.c_void_p, ctypes.c_int16, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int)]
            push(broker._cluster, api, len(codes), (ctypes.c_int * len(codes))(*codes))

        yield settings, fail


# Poison


async def test_poison_goes_to_deadletters_with_reason_and_origin_and_holds_nothing_up(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    got = Collector(ack=True)
    _, headers = encode(event(0), run_id="r", traceparent="", purpose="")
    claim = b'{"key":"payloads/../../../etc/passwd","sha256":"","size":1}'
    poison = {
        "not_json": (b"\xff not JSON", headers),
        "wrong_schema": (b'{"policy": 1}', headers),
        "unknown_version": (b"{}", [("event", b"PolicyPublished/2")]),
        "unknown_event": (b"{}", [("event", b"Nonsense/1")]),
        "empty": (None, headers),
        "claim_missing": (
            b'{"key":"payloads/ab/' + b"ab" * 32 + b'","sha256":"","size":1}',
            [*headers, ("claim", b"1")],
        ),
    }
    faults = [*poison, "unknown_event", "wrong_schema"]
    before = {reason: value(metrics.EVENTS_DEAD.labels(TURNS, reason)) for reason in poison}
    async with process(kafka, tmp_path) as p:
        for payload, tags in poison.values():
            p.bus.publisher.publish_raw(TURNS, payload, tags, partition=0)
        p.bus.publisher.publish_raw(TURNS, b"no headers at all", [], partition=0)
        p.bus.publisher.publish_raw(TURNS, claim, [*headers, ("claim", b"1")], partition=0)
        p.bus.publish(TURNS, event(7), partition=0)
        p.bus.subscribe([TURNS], group="router", handler=got)
        await until(lambda: got.numbers == [7])
        await until(lambda: committed(kafka, "router", TURNS) == {0: len(faults) + 1})
    letters = await asyncio.to_thread(dead_letters, kafka, tmp_path)
    assert [letter.headers["reason"] for letter in letters] == faults
    assert [letter.headers["origin"] for letter in letters] == [f"turns/0/{i}" for i in range(len(faults))]
    assert letters[0].event == "\\xff not JSON"
    for reason in poison:
        grown = value(metrics.EVENTS_DEAD.labels(TURNS, reason)) - before[reason]
        assert grown == faults.count(reason)


async def test_poison_too_large_or_with_too_many_headers_for_us_is_buried_all_the_same(
    embedded_kafka: KafkaSettings, tmp_path: Path
) -> None:
    small = embedded_kafka.model_copy(update={"inline_limit_bytes": 2000})
    got = Collector(ack=True)
    async with process(embedded_kafka, tmp_path) as p, process(small, tmp_path, "small") as q:
        p.bus.publisher.publish_raw(TURNS, b"x" * 100_000, [], partition=0)
        p.bus.publisher.publish_raw(TURNS, b"x", [(f"h{i}", b"y" * 500) for i in range(100)], partition=0)
        p.bus.publish(TURNS, event(1), partition=0)
        q.bus.subscribe([TURNS], group="router", handler=got)
        await until(lambda: got.numbers == [1])
        await until(lambda: committed(small, "router", TURNS) == {0: 3})
        assert q.supervisor.ready


async def test_one_event_that_cannot_be_handled_costs_no_other_and_is_given_up_after_retries(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    handled: list[int] = []
    attempts = 0

    def picky(deliveries: list[Delivery]) -> None:
        nonlocal attempts
        for delivery in deliveries:
            if number(delivery) == 5:
                attempts += 1
                raise ValueError("not five")
            handled.append(number(delivery))
            delivery.ack()

    async with process(kafka, tmp_path) as p:
        publish(p.bus, TURNS, range(10))
        p.bus.subscribe([TURNS], group="router", handler=picky)
        await until(lambda: set(handled) == set(range(10)) - {5})
        await until(lambda: committed(kafka, "router", TURNS) == {0: 10})
    (letter,) = await asyncio.to_thread(dead_letters, kafka, tmp_path)
    assert letter.headers["reason"] == "handler_failed"
    assert letter.headers["origin"] == "turns/0/5"
    assert "not five" in letter.headers["error"]
    assert 3 <= attempts <= 4


# Size


async def test_a_payload_at_the_limit_travels_inline_and_one_byte_more_by_reference(
    kafka: KafkaSettings, tmp_path: Path
) -> None:
    got = Collector(ack=True)
    empty = len(encode(event(1), run_id="", traceparent="", purpose="")[0])
    room = kafka.inline_limit_bytes - empty
    before = value(metrics.CLAIM_CHECKS.labels(TURNS))
    async with process(kafka, tmp_path) as p:
        p.bus.subscribe([TURNS], group="router", handler=got)
        await p.bus.send(TURNS, event(1, "x" * room))
        assert value(metrics.CLAIM_CHECKS.labels(TURNS)) == before
        assert p.store.list("payloads") == []
        await p.bus.send(TURNS, event(2, "y" * (room + 1)))
        assert value(metrics.CLAIM_CHECKS.labels(TURNS)) == before + 1
        assert len(p.store.list("payloads")) == 1
        await until(lambda: len(got.held) == 2)
    found = {number(d): d.event.uri for d in got.held}  # type: ignore[attr-defined]
    assert found == {1: "x" * room, 2: "y" * (room + 1)}


async def test_a_stored_payload_that_changed_is_not_handled(
    embedded_kafka: KafkaSettings, tmp_path: Path
) -> None:
    got = Collector(ack=True)
    dead = metrics.EVENTS_DEAD.labels(TURNS, "claim_corrupt")
    before = value(dead)
    async with process(embedded_kafka, tmp_path) as p:
        await p.bus.send(TURNS, event(1, "x" * 1_000_000))
        (key,) = p.store.list("payloads")
        p.store.put(key, p.store.get(key).replace(b"xx", b"xy", 1))
        await p.bus.send(TURNS, event(2))
        p.bus.subscribe([TURNS], group="router", handler=got)
        await until(lambda: got.numbers == [2] and value(dead) == before + 1)
    (letter,) = await asyncio.to_thread(dead_letters, embedded_kafka, tmp_path)
    assert letter.headers["reason"] == "claim_corrupt"


async def test_events_that_the_broker_dropped_unread_are_counted_as_lost(
    embedded_kafka: KafkaSettings, tmp_path: Path
) -> None:
    got = Collector()
    before = value(metrics.EVENTS_LOST.labels(TURNS))
    async with process(embedded_kafka, tmp_path) as p:
        slow = p.bus.subscribe([TURNS], group="router", handler=got, max_unacked=1, drain_s=0.0)
        publish(p.bus, TURNS, range(1))
        await until(lambda: got.numbers == [0])
        assert publish(p.bus, TURNS, range(1, 16), text="x" * 800_000).wait(20)
        got.ack = True
        got.held[0].ack()
        await until(lambda: 15 in got.numbers)
        lost = p.bus.events_lost
        assert lost == 16 - len(got.held) > 0
        assert value(metrics.EVENTS_LOST.labels(TURNS)) == before + lost
        p.bus.leave(slow)
        assert p.bus.events_lost == lost, "a membership that ended takes its losses along"


# Refusals


async def test_an_event_the_broker_refuses_ends_the_process(
    faulty: tuple[KafkaSettings, Callable[[int, list[int]], None]], tmp_path: Path
) -> None:
    kafka, fail = faulty
    async with process(kafka, tmp_path) as p:
        await p.bus.send(TURNS, event(0))
        fail(_PRODUCE, [_TOPIC_DENIED])
        p.bus.publish(TURNS, event(1))
        await until(lambda: not p.supervisor.ready)
        assert "delivery reports" in str(p.supervisor.failure)


async def test_who_waits_for_a_refused_event_hears_it_and_the_process_goes_on(
    faulty: tuple[KafkaSettings, Callable[[int, list[int]], None]], tmp_path: Path
) -> None:
    kafka, fail = faulty
    async with process(kafka, tmp_path) as p:
        await p.bus.send(TURNS, event(0))
        fail(_PRODUCE, [_TOO_LARGE])
        with pytest.raises(Unavailable):
            await p.bus.send(TURNS, event(1))
        await p.bus.send(TURNS, event(2))
        assert p.supervisor.ready


async def test_text_that_utf8_cannot_hold_is_refused_by_the_producer(
    embedded_kafka: KafkaSettings, tmp_path: Path
) -> None:
    async with process(embedded_kafka, tmp_path) as p:
        with pytest.raises(Invalid, match="PolicyPublished"):
            p.bus.publish(TURNS, event(1, "\ud800"))


async def test_a_refused_commit_is_repeated(
    faulty: tuple[KafkaSettings, Callable[[int, list[int]], None]], tmp_path: Path
) -> None:
    kafka, fail = faulty
    got = Collector()
    async with process(kafka, tmp_path) as p:
        p.bus.subscribe([TURNS], group="router", handler=got)
        publish(p.bus, TURNS, range(5))
        await until(lambda: len(got.held) == 5)
        fail(_OFFSET_COMMIT, [_GROUP_DENIED] * 2)
        for delivery in got.held:
            delivery.ack()
        await until(lambda: committed(kafka, "router", TURNS) == {0: 5})


# A broker that dies


async def test_a_broker_killed_and_restarted_on_its_data_loses_nothing(tmp_path: Path) -> None:
    if not os.environ.get("KAFKA_HOME"):
        pytest.skip("KAFKA_HOME is not set")
    replies: list[int] = []
    got = Collector(ack=True)
    settings = KafkaSettings(session_timeout_s=SESSION_S, partitions=PARTITIONS, reply_partitions=PARTITIONS)
    with LocalKafka(tmp_path / "kafka", settings=settings) as broker:
        kafka = settings.model_copy(update={"bootstrap": broker.bootstrap})
        admin.ensure_topics(kafka.bootstrap, topics.plan(kafka), settings=kafka)
        async with process(kafka, tmp_path) as p:
            member = p.bus.subscribe([TURNS], group="router", handler=got)
            await p.bus.read(REPLIES, partition=0, handler=lambda events: replies.extend(_numbers(events)))
            await joined(member, partitions=4)
            publish(p.bus, TURNS, range(2000), partitions=4)
            await until(lambda: len(got.held) > 200)
            broker.child.kill()
            publish(p.bus, TURNS, range(2000, 4000), partitions=4)
            publish(p.bus, REPLIES, range(100))
            await asyncio.to_thread(broker.child.reap)
            await asyncio.to_thread(broker.spawn)
            await asyncio.to_thread(broker.wait_ready)
            await until(lambda: set(got.numbers) == set(range(4000)), seconds=60)
            await until(lambda: sorted(set(replies)) == list(range(100)))
            assert p.supervisor.ready
            assert p.bus.events_lost == 0
            await until(lambda: sum(committed(kafka, "router", TURNS).values()) == 4000)


def _numbers(events: list[Event]) -> list[int]:
    return [one.version for one in events if isinstance(one, PolicyPublished)]


async def test_the_label_of_a_training_group_names_no_run(
    embedded_kafka: KafkaSettings, tmp_path: Path
) -> None:
    async with process(embedded_kafka, tmp_path) as p:
        member = p.bus.subscribe(["samples"], group=topics.training_group("run-1"), handler=Collector())
        assert member.label == "training"
