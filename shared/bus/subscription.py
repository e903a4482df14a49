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
from collections.abc import Callable, Sequence
from functools import partial

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from shared import metrics
from shared.bus import codec
from shared.bus.delivery import Delivery, Partition
from shared.bus.polling import BatchPoll, Taken
from shared.bus.publisher import Publisher
from shared.errors import EventsLost, Unavailable
from shared.settings import KafkaSettings
from shared.store import ObjectStore
from shared.topics import DEADLETTERS, training_group

_LOG = structlog.get_logger()
_COMMIT_EVERY_S = 0.5
_MAX_ATTEMPTS = 3
_PAUSED_POLL_S = 0.01
_IDLE_POLL_S = 0.25
_HARMLESS = {
    KafkaError._PARTITION_EOF, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN,
    KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._TIMED_OUT,
}  # fmt: skip


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
        max_poll_interval_s: float = 300.0,
    ) -> None:
        self.group = group
        self.label = _label(group)
        self._settings = settings
        self._topics = [settings.prefix + topic for topic in topics]
        self._handler = handler
        self._publisher = publisher
        self._store = store
        self._max_unacked = max_unacked
        self._accept = accept
        self._drain_s = drain_s
        self._loop = asyncio.get_running_loop()
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._paused = False
        self._stopping = threading.Event()
        self.assigned = asyncio.Event()
        self.events_lost = 0
        self._max_poll_interval_s = max_poll_interval_s
        self._consumer = Consumer(self._config(client_id) | {"on_commit": self._on_commit})
        self._poll = BatchPoll(self._consumer)

    def _config(self, client_id: str) -> dict[str, str | int | bool]:
        config = codec.common_settings(self._settings, client_id) | {
            "group.id": self._settings.prefix + self.group,
            "group.protocol": self._settings.protocol,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "max.poll.interval.ms": int(self._max_poll_interval_s * 1000),
            "fetch.message.max.bytes": codec.fetch_bytes(self._settings),
        }
        if self._settings.protocol == "classic":
            config["session.timeout.ms"] = int(self._settings.session_timeout_s * 1000)
        if self._settings.fetch_wait_ms is not None:
            config["fetch.wait.max.ms"] = self._settings.fetch_wait_ms
        return config

    @property
    def unacked(self) -> int:
        """Events delivered and not yet acknowledged."""
        # Copied at once: the polling thread changes it while others ask.
        return sum(len(p.outstanding) for p in list(self._partitions.values()))

    @property
    def partitions(self) -> list[int]:
        """Partition numbers assigned now (of the only topic, for one-topic subscriptions)."""
        return sorted(number for _, number in list(self._partitions))

    def run(self) -> None:
        """Thread. Consumes the topics; waits in poll; woken by the broker; ends on `stop` or fatal error."""
        consumer = self._consumer
        consumer.subscribe(
            self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )
        unacked = metrics.EVENTS_UNACKED.labels(self.label)
        due = time.monotonic() + _COMMIT_EVERY_S
        try:
            while not self._stopping.is_set():
                messages = self._poll.take(_PAUSED_POLL_S if self._paused else _IDLE_POLL_S)
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
            unacked.set(0)

    def stop(self) -> None:
        """Ask the thread to drain, commit and leave the group."""
        self._stopping.set()

    def _close(self) -> None:
        self._drain(list(self._partitions.values()))
        self._commit()
        self._drain_s = 0.0
        self._consumer.close()
        for partition in self._partitions.values():
            partition.fence()

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
        if delivery._partition.fenced:
            return
        delivery.attempts += 1
        _LOG.warning("handling failed", group=self.group, attempt=delivery.attempts, error=repr(error))
        if delivery.attempts < _MAX_ATTEMPTS:
            self._loop.call_later(0.2 * 2**delivery.attempts, self._redeliver, delivery)
        else:
            self._bury(delivery._message, delivery._partition, "handler_failed", repr(error))

    def _redeliver(self, delivery: Delivery) -> None:
        # Where its partition has moved meanwhile, the event is another member's.
        if not delivery._partition.fenced:
            self._dispatch([delivery])

    def _decode(self, messages: list[Taken]) -> list[Delivery]:
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

    def _check_gap(self, partition: Partition, topic: str, number: int, offset: int) -> None:
        expected = partition.expected
        partition.expected = offset + 1
        if expected is None or offset == expected:
            return
        if offset < expected:
            partition.rewind(offset)
        else:
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

    def _bury(self, message: Taken, partition: Partition, reason: str, detail: str) -> None:
        topic = message.topic().removeprefix(self._settings.prefix)
        offset = message.offset()
        metrics.EVENTS_DEAD.labels(topic, reason).inc()
        _LOG.error("event dead-lettered", topic=topic, offset=offset, reason=reason, detail=detail)
        payload, headers = codec.dead_letter(
            message.value(),
            message.headers() or [],
            origin=f"{topic}/{message.partition()}/{offset}",
            reason=reason,
            error=detail,
            store=self._store,
            settings=self._settings,
        )
        self._publisher.publish_raw(
            DEADLETTERS, payload, headers, key=message.key(), on_delivered=partial(partition.ack, offset)
        )

    def _flow(self) -> None:
        """Pause over the limit, resume below four fifths of it."""
        unacked = self.unacked
        if not self._paused and unacked >= self._max_unacked:
            self._consumer.pause(self._consumer.assignment())
            self._paused = True
        elif self._paused and unacked <= self._max_unacked * 4 // 5:
            self._resume()

    def _resume(self) -> None:
        self._consumer.resume(self._consumer.assignment())
        self._paused = False
        for (topic, number), partition in list(self._partitions.items()):
            if partition.expected is not None:
                # To where it stands: librdkafka looks at a resumed partition only within a second, but at one
                # that is sought at once.
                try:
                    self._consumer.seek(TopicPartition(topic, number, partition.expected))
                except KafkaException as error:
                    _LOG.debug("seek refused", group=self.group, partition=number, error=str(error))

    def _commit(self) -> None:
        self._commit_offsets(list(self._partitions), asynchronous=not self._stopping.is_set())

    def _commit_offsets(self, keys: list[tuple[str, int]], *, asynchronous: bool) -> None:
        """Commit the watermarks that the broker does not have yet."""
        offsets = []
        for topic, number in keys:
            partition = self._partitions.get((topic, number))
            watermark = partition.watermark if partition else None
            if partition is not None and watermark is not None and watermark != partition.committed:
                partition.committed = watermark
                offsets.append(TopicPartition(topic, number, watermark))
        if not offsets:
            return
        try:
            if asynchronous:
                self._consumer.commit(offsets=offsets, asynchronous=True)
            else:
                self._on_commit(None, self._consumer.commit(offsets=offsets, asynchronous=False))
        except KafkaException as error:
            self._on_commit(error.args[0], offsets)

    def _on_commit(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None:
        """The broker's answer: what it did not take is committed again; until then the events would only be
        delivered twice."""
        for tp in offsets:
            fault = error or tp.error
            if fault is None:
                continue
            _LOG.warning("commit failed", group=self.group, partition=tp.partition, error=str(fault))
            partition = self._partitions.get((tp.topic, tp.partition))
            if partition is not None:
                partition.committed = None

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        for tp in partitions:
            self._partitions[tp.topic, tp.partition] = Partition()
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
        keys = [key for tp in partitions if (key := (tp.topic, tp.partition)) in self._partitions]
        self._drain([self._partitions[key] for key in keys])
        self._commit_offsets(keys, asynchronous=False)
        self._let_go(consumer, partitions)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        _LOG.warning("partitions lost", group=self.group, partitions=[tp.partition for tp in partitions])
        self._let_go(consumer, partitions)

    def _let_go(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._fence(partitions)
        self._poll.revoked.update((tp.topic, tp.partition) for tp in partitions)
        if self._incremental:
            consumer.incremental_unassign(partitions)
        else:
            consumer.unassign()

    def _fence(self, partitions: list[TopicPartition]) -> None:
        for tp in partitions:
            partition = self._partitions.pop((tp.topic, tp.partition), None)
            if partition is not None:
                partition.fence()
        if not self._partitions:
            self._loop.call_soon_threadsafe(self.assigned.clear)

    def _drain(self, partitions: list[Partition]) -> None:
        """Give handlers a moment to finish what they have in hand."""
        until = time.monotonic() + self._drain_s
        while any(p.outstanding for p in partitions) and time.monotonic() < until:
            time.sleep(0.01)


def _label(group: str) -> str:
    """The group as a metric label: without the id of the run, where it has one."""
    training = training_group("")
    return training.rstrip(".") if group.startswith(training) else group
