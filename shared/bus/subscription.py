"""The consuming half of the bus: one membership in one consumer group.

A thread polls and keeps the membership whatever the handlers do. Events reach the handler in batches on
the event loop; each is acknowledged on its own, in any order; the commit is the low watermark of what is
acknowledged. Over `max_unacked` the partitions are paused and polling goes on. A revoked partition is
drained, committed, then fenced.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from shared import metrics
from shared.bus import codec
from shared.bus.polling import BatchPoll
from shared.bus.publisher import Publisher
from shared.errors import EventsLost, Unavailable
from shared.events import Event
from shared.settings import KafkaSettings
from shared.store import ObjectStore
from shared.topics import DEADLETTERS

_LOG = structlog.get_logger()
_COMMIT_EVERY_S = 0.5
_MAX_ATTEMPTS = 3
_PAUSED_POLL_S = 0.01
_IDLE_POLL_S = 0.25
_HARMLESS = {
    KafkaError._PARTITION_EOF, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN,
    KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._TIMED_OUT,
}  # fmt: skip


class _Partition:
    """Bookkeeping of one assigned partition. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.outstanding: deque[int] = deque()
        self.acked: set[int] = set()
        self.expected: int | None = None
        self.watermark: int | None = None
        self.committed: int | None = None
        self.fenced = False

    def delivered(self, offset: int) -> None:
        with self.lock:
            self.outstanding.append(offset)

    def ack(self, offset: int) -> bool:
        """Whether it counted; False after fencing."""
        with self.lock:
            if self.fenced:
                return False
            self.acked.add(offset)
            while self.outstanding and self.outstanding[0] in self.acked:
                done = self.outstanding.popleft()
                self.acked.discard(done)
                self.watermark = done + 1
            return True


class Delivery:
    """One event in hand. Exactly one of `ack` and `fail` ends it."""

    __slots__ = ("_message", "_partition", "_subscription", "attempts", "event", "headers")

    def __init__(
        self, event: Event, headers: dict[str, bytes], message: Message, partition: _Partition,
        subscription: Subscription,
    ) -> None:  # fmt: skip
        self.event = event
        self.headers = headers
        self.attempts = 0
        self._message = message
        self._partition = partition
        self._subscription = subscription

    @property
    def offset(self) -> int:
        """Its offset in its partition."""
        offset: int = self._message.offset()
        return offset

    @property
    def partition(self) -> int:
        """The partition it came from."""
        partition: int = self._message.partition()
        return partition

    @property
    def traceparent(self) -> str:
        """The trace context it carries, or an empty string."""
        return self.headers.get("traceparent", b"").decode()

    def ack(self) -> None:
        """Its effect is safe: never deliver it again. From any thread."""
        if not self._partition.ack(self._message.offset()):
            metrics.FENCED_ACKS.labels(self._subscription.group).inc()

    def fail(self, error: BaseException) -> None:
        """Its handling failed: deliver it again, or give it up to `deadletters`. On the event loop."""
        self._subscription.retry(self, error)


class Subscription:
    """A membership that feeds `handler`. Start it with `run` on a thread."""

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        topics: Sequence[str],
        group: str,
        handler: Callable[[list[Delivery]], None],
        publisher: Publisher,
        store: ObjectStore,
        client_id: str,
        max_unacked: int,
        accept: Callable[[dict[str, bytes]], bool] | None = None,
        drain_s: float = 2.0,
    ) -> None:
        self.group = group
        self._settings = settings
        self._topics = [settings.prefix + topic for topic in topics]
        self._handler = handler
        self._publisher = publisher
        self._store = store
        self._max_unacked = max_unacked
        self._accept = accept
        self._drain_s = drain_s
        self._loop = asyncio.get_running_loop()
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._paused = False
        self._stopping = threading.Event()
        self.assigned = asyncio.Event()
        self.events_lost = 0
        self._consumer = Consumer(self._config(client_id))

    def _config(self, client_id: str) -> dict[str, str | int | bool]:
        config = codec.common_settings(self._settings, client_id) | {
            "group.id": self._settings.prefix + self.group,
            "group.protocol": self._settings.protocol,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "max.poll.interval.ms": 300_000,
            "fetch.message.max.bytes": self._settings.inline_limit_bytes * 2,
        }
        if self._settings.protocol == "classic":
            config["session.timeout.ms"] = int(self._settings.session_timeout_s * 1000)
        if self._settings.fetch_wait_ms is not None:
            config["fetch.wait.max.ms"] = self._settings.fetch_wait_ms
        return config

    @property
    def unacked(self) -> int:
        """Events delivered and not yet acknowledged."""
        return sum(len(p.outstanding) for p in self._partitions.values())

    @property
    def partitions(self) -> list[int]:
        """Partition numbers assigned now (of the only topic, for one-topic subscriptions)."""
        return sorted(number for _, number in self._partitions)

    def run(self) -> None:
        """Thread. Consumes the topics; waits in poll; woken by the broker. Ends on `stop` or a fatal error."""
        consumer = self._consumer
        consumer.subscribe(
            self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )
        poll = BatchPoll(consumer)
        unacked = metrics.EVENTS_UNACKED.labels(self.group)
        due = time.monotonic() + _COMMIT_EVERY_S
        try:
            while not self._stopping.is_set():
                messages = poll.take(_PAUSED_POLL_S if self._paused else _IDLE_POLL_S)
                deliveries = self._decode(messages)
                if deliveries:
                    self._loop.call_soon_threadsafe(self._dispatch, deliveries)
                self._flow()
                if time.monotonic() >= due:
                    self._commit()
                    unacked.set(self.unacked)
                    due = time.monotonic() + _COMMIT_EVERY_S
        finally:
            self._close()

    def stop(self) -> None:
        """Ask the thread to drain, commit and leave the group."""
        self._stopping.set()

    def _close(self) -> None:
        self._drain(list(self._partitions.values()))
        self._commit()
        self._drain_s = 0.0
        self._consumer.close()

    def _dispatch(self, deliveries: list[Delivery]) -> None:
        """On the loop: the whole batch, or, when that raises, one by one to find the culprit."""
        try:
            self._handler(deliveries)
        except Exception as error:
            if len(deliveries) == 1:
                self.retry(deliveries[0], error)
                return
            for delivery in deliveries:
                self._dispatch([delivery])

    def retry(self, delivery: Delivery, error: BaseException) -> None:
        """Deliver again after a while; the third failure moves the event to `deadletters`."""
        delivery.attempts += 1
        _LOG.warning("handling failed", group=self.group, attempt=delivery.attempts, error=repr(error))
        if delivery.attempts < _MAX_ATTEMPTS:
            self._loop.call_later(0.2 * 2**delivery.attempts, self._dispatch, [delivery])
        else:
            self._bury(delivery._message, delivery._partition, "handler_failed", repr(error))

    def _decode(self, messages: list[Message]) -> list[Delivery]:
        deliveries = []
        for message in messages:
            error = message.error()
            if error is not None:
                self._on_error(error)
                continue
            topic, number, offset = message.topic(), message.partition(), message.offset()
            partition = self._partitions.get((topic, number))
            if partition is None:
                continue
            self._check_gap(partition, topic, number, offset)
            partition.delivered(offset)
            headers = dict(message.headers() or ())
            if self._accept is not None and not self._accept(headers):
                partition.ack(offset)
                continue
            try:
                event = codec.decode(message.value(), headers, self._store)
            except codec.Undecodable as fault:
                self._bury(message, partition, fault.reason, fault.message)
                continue
            deliveries.append(Delivery(event, headers, message, partition, self))
        if deliveries:
            topic = deliveries[0]._message.topic().removeprefix(self._settings.prefix)
            metrics.EVENTS_CONSUMED.labels(topic).inc(len(deliveries))
        return deliveries

    def _check_gap(self, partition: _Partition, topic: str, number: int, offset: int) -> None:
        expected = partition.expected
        partition.expected = offset + 1
        if expected is not None and offset > expected:
            lost = EventsLost(f"{topic}[{number}] jumped from {expected} to {offset}")
            self.events_lost += offset - expected
            metrics.EVENTS_LOST.labels(topic.removeprefix(self._settings.prefix)).inc(offset - expected)
            _LOG.error("events lost", group=self.group, error=lost.message, count=offset - expected)

    def _on_error(self, error: KafkaError) -> None:
        if error.code() in _HARMLESS:
            return
        if error.fatal():
            raise Unavailable(f"{self.group}: {error}")
        _LOG.warning("consumer error", group=self.group, error=str(error))

    def _bury(self, message: Message, partition: _Partition, reason: str, detail: str) -> None:
        topic = message.topic().removeprefix(self._settings.prefix)
        metrics.EVENTS_DEAD.labels(topic, reason).inc()
        _LOG.error("event dead-lettered", topic=topic, offset=message.offset(), reason=reason, detail=detail)
        origin = f"{topic}/{message.partition()}/{message.offset()}"
        headers = [*(message.headers() or ())]
        headers += [
            ("origin", origin.encode()),
            ("reason", reason.encode()),
            ("error", detail.encode()[:4096]),
        ]
        offset = message.offset()
        self._publisher.publish_raw(
            DEADLETTERS,
            message.value(),
            headers,
            key=message.key(),
            on_delivered=lambda: partition.ack(offset),
        )

    def _flow(self) -> None:
        """Pause over the limit, resume below four fifths of it."""
        unacked = self.unacked
        if not self._paused and unacked >= self._max_unacked:
            self._consumer.pause(self._consumer.assignment())
            self._paused = True
        elif self._paused and unacked <= self._max_unacked * 4 // 5:
            self._consumer.resume(self._consumer.assignment())
            self._paused = False

    def _commit(self) -> None:
        offsets = []
        for (topic, number), partition in list(self._partitions.items()):
            if partition.watermark is not None and partition.watermark != partition.committed:
                partition.committed = partition.watermark
                offsets.append(TopicPartition(topic, number, partition.watermark))
        if offsets:
            self._commit_offsets(offsets, asynchronous=not self._stopping.is_set())

    def _commit_offsets(self, offsets: list[TopicPartition], *, asynchronous: bool) -> None:
        try:
            self._consumer.commit(offsets=offsets, asynchronous=asynchronous)
        except KafkaException as error:
            # The next commit repeats it; until then the events would only be delivered twice.
            _LOG.warning("commit failed", group=self.group, error=str(error))

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for tp in partitions:
            self._partitions[tp.topic, tp.partition] = _Partition()
        self._expect_committed(partitions)
        consumer.incremental_assign(partitions) if self._incremental else consumer.assign(partitions)
        if self._paused:
            consumer.pause(partitions)
        if self._partitions:
            self._loop.call_soon_threadsafe(self.assigned.set)
        _LOG.debug("partitions assigned", group=self.group, partitions=[tp.partition for tp in partitions])

    @property
    def _incremental(self) -> bool:
        return self._settings.protocol == "consumer"

    def _expect_committed(self, partitions: list[TopicPartition]) -> None:
        """From a committed offset on nothing may be missing."""
        try:
            committed = self._consumer.committed(partitions, timeout=5)
        except KafkaException as error:
            _LOG.warning("committed offsets unknown", group=self.group, error=str(error))
            return
        for tp in committed:
            if tp.offset >= 0:
                partition = self._partitions[tp.topic, tp.partition]
                partition.expected = partition.committed = tp.offset

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        leaving = [self._partitions[tp.topic, tp.partition] for tp in partitions
                   if (tp.topic, tp.partition) in self._partitions]  # fmt: skip
        self._drain(leaving)
        offsets = [
            TopicPartition(tp.topic, tp.partition, self._partitions[tp.topic, tp.partition].watermark)
            for tp in partitions
            if (p := self._partitions.get((tp.topic, tp.partition))) and p.watermark is not None
        ]
        if offsets:
            self._commit_offsets(offsets, asynchronous=False)
        self._fence(partitions)
        if self._incremental:
            consumer.incremental_unassign(partitions)
        else:
            consumer.unassign()

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        _LOG.warning("partitions lost", group=self.group, partitions=[tp.partition for tp in partitions])
        self._fence(partitions)
        if self._incremental:
            consumer.incremental_unassign(partitions)
        else:
            consumer.unassign()

    def _fence(self, partitions: list[TopicPartition]) -> None:
        for tp in partitions:
            partition = self._partitions.pop((tp.topic, tp.partition), None)
            if partition is not None:
                with partition.lock:
                    partition.fenced = True
        if not self._partitions:
            self._loop.call_soon_threadsafe(self.assigned.clear)

    def _drain(self, partitions: list[_Partition]) -> None:
        """Give handlers a moment to finish what they have in hand."""
        until = time.monotonic() + self._drain_s
        while any(p.outstanding for p in partitions) and time.monotonic() < until:
            time.sleep(0.01)
