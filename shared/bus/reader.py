"""Reads one partition without a consumer group: an asker's replies.

Starts at the end of the partition as it is when `open` returns, so that no reply to a later question
can be missed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from shared import metrics
from shared.bus import codec
from shared.bus.polling import BatchPoll, Taken
from shared.errors import Unavailable
from shared.events import Event
from shared.settings import KafkaSettings
from shared.store import ObjectStore

_LOG = structlog.get_logger()
_IDLE_POLL_S = 0.25
_OPEN_S = 15.0
_AGAIN_S = 0.1
_NOT_YET = (
    KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE, KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC,
)  # fmt: skip


class PartitionReader:
    """Feeds `handler` on the event loop with batches of events. `open`, then `run` on a thread."""

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        topic: str,
        partition: int,
        handler: Callable[[list[Event]], None],
        store: ObjectStore,
        client_id: str,
    ) -> None:
        self._topic = topic
        self._store = store
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._where = TopicPartition(settings.prefix + topic, partition)
        self._expected: int | None = None
        self.events_lost = 0
        config = codec.common_settings(settings, client_id) | {
            "group.id": f"{settings.prefix}reader.{client_id}",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.message.max.bytes": codec.fetch_bytes(settings),
        }
        if settings.fetch_wait_ms is not None:
            config["fetch.wait.max.ms"] = settings.fetch_wait_ms
        self._consumer = Consumer(config)

    def open(self) -> None:
        """Fix the starting offset. Blocks; raises Unavailable when the broker does not answer."""
        until = time.monotonic() + _OPEN_S
        while True:
            try:
                _, high = self._consumer.get_watermark_offsets(self._where, timeout=_OPEN_S)
                break
            except KafkaException as error:
                # A topic that was created just now has no leader for a moment.
                if not error.args[0].retriable() and error.args[0].code() not in _NOT_YET:
                    until = 0.0
                if time.monotonic() > until:
                    self._consumer.close()
                    raise Unavailable(f"{self._where.topic}: {error}") from error
                time.sleep(_AGAIN_S)
        self._where.offset = self._expected = high
        self._consumer.assign([self._where])

    def run(self) -> None:
        """Thread. Consumes the partition; waits in poll; woken by the broker; ends on `stop`."""
        poll = BatchPoll(self._consumer)
        consumed = metrics.EVENTS_CONSUMED.labels(self._topic)
        try:
            while not self._stopping.is_set():
                events = self._decode(poll.take(_IDLE_POLL_S))
                if events:
                    consumed.inc(len(events))
                    self._loop.call_soon_threadsafe(self._dispatch, events)
        finally:
            self._consumer.close()

    def stop(self) -> None:
        """Ask the thread to end."""
        self._stopping.set()

    def _dispatch(self, events: list[Event]) -> None:
        """On the loop: the whole batch, or, when that raises, one by one, so that one costs no other."""
        try:
            self._handler(events)
        except Exception:
            if len(events) == 1:
                metrics.EVENTS_DEAD.labels(self._topic, "handler_failed").inc()
                _LOG.exception("handling failed", topic=self._topic, event_kind=type(events[0]).__name__)
                return
            for event in events:
                self._dispatch([event])

    def _decode(self, messages: list[Taken]) -> list[Event]:
        events = []
        for message in messages:
            error = message.error()
            if error is not None:
                if error.fatal():
                    raise Unavailable(f"{self._topic}: {error}")
                continue
            offset = message.offset()
            if self._expected is not None and offset > self._expected:
                self.events_lost += offset - self._expected
                metrics.EVENTS_LOST.labels(self._topic).inc(offset - self._expected)
                _LOG.error("events lost", topic=self._topic, expected=self._expected, found=offset)
            self._expected = offset + 1
            try:
                events.append(codec.decode(message.value(), dict(message.headers() or ()), self._store))
            except codec.Undecodable as fault:
                metrics.EVENTS_DEAD.labels(self._topic, fault.reason).inc()
                _LOG.error("reply undecodable", reason=fault.reason, detail=fault.message)
        return events
