"""The producing half of the bus: one idempotent producer of a process.

`publish` returns at once; the delivery report, which says that the broker has the event, arrives on a
thread of its own. An event that the broker refuses for good stops the process: Kafka replays what it
had in hand.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import cast

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from prometheus_client import Counter

from shared import metrics
from shared.bus import codec
from shared.errors import Unavailable
from shared.events import Event
from shared.settings import KafkaSettings
from shared.store import ObjectStore

_LOG = structlog.get_logger()
_QUEUE_FULL_WAIT_S = 30.0
_IDLE_S = 0.5
_REPORTS_EVERY_S = 0.004


class Publisher:
    """Publishes events. Thread-safe."""

    def __init__(self, settings: KafkaSettings, *, client_id: str, store: ObjectStore) -> None:
        self._settings = settings
        self._store = store
        config = codec.common_settings(settings, client_id) | {
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 0.5,
            "message.max.bytes": settings.inline_limit_bytes + codec.FRAMING_BYTES,
            "delivery.timeout.ms": 300_000,
        }
        self._producer = Producer(config)
        self._stopping = threading.Event()
        self._reports_due = threading.Event()
        self._counts: dict[str, Counter] = {}
        self.failure: BaseException | None = None

    def publish(
        self,
        topic: str,
        event: Event,
        *,
        key: str | None = None,
        partition: int | None = None,
        run_id: str = "",
        traceparent: str = "",
        purpose: str = "",
        on_delivered: Callable[[], object] | None = None,
        on_failed: Callable[[Unavailable], None] | None = None,
    ) -> None:
        """Hand an event to the broker; `on_delivered` runs on another thread once it is there.

        `on_failed` takes a refusal for good, which without it ends the process. Raises Invalid for text that
        UTF-8 cannot hold, Unavailable when the producer's queue stays full or it is broken for good.
        """
        payload, headers = codec.encode(event, run_id=run_id, traceparent=traceparent, purpose=purpose)
        if len(payload) > self._settings.inline_limit_bytes:
            payload = codec.check_in(self._store, payload)
            headers.append(("claim", b"1"))
            metrics.CLAIM_CHECKS.labels(topic).inc()
        self.publish_raw(
            topic,
            payload,
            headers,
            key=key,
            partition=partition,
            on_delivered=on_delivered,
            on_failed=on_failed,
        )

    def publish_raw(
        self,
        topic: str,
        payload: bytes | None,
        headers: codec.Headers,
        *,
        key: str | bytes | None = None,
        partition: int | None = None,
        on_delivered: Callable[[], object] | None = None,
        on_failed: Callable[[Unavailable], None] | None = None,
    ) -> None:
        """Hand bytes to the broker, as `publish` does."""

        def report(error: KafkaError | None, message: Message) -> None:
            if error is None:
                if on_delivered is not None:
                    on_delivered()
                return
            if on_failed is not None:
                on_failed(Unavailable(f"{topic}: {error}"))
            if on_failed is None or error.fatal():
                self._fail(topic, error)

        callback = self._report if on_delivered is None and on_failed is None else report
        full = self._settings.prefix + topic
        tagged = cast("list[tuple[str, str | bytes | None]]", headers)
        # -1 lets the key decide.
        where = -1 if partition is None else partition
        until = time.monotonic() + _QUEUE_FULL_WAIT_S
        while True:
            try:
                self._producer.produce(full, payload, key, where, callback, headers=tagged)
                break
            except BufferError:
                if time.monotonic() > until:
                    raise Unavailable(f"the producer's queue to {full} stays full") from None
                self._producer.poll(0.05)
            except KafkaException as error:
                if error.args[0].fatal():
                    self._fail(topic, error.args[0])
                raise Unavailable(f"{full}: {error}") from error
        if not self._reports_due.is_set():
            self._reports_due.set()
        count = self._counts.get(topic)
        if count is None:
            count = self._counts[topic] = metrics.EVENTS_PUBLISHED.labels(topic)
        count.inc()

    def _report(self, error: KafkaError | None, message: Message) -> None:
        """The delivery report of an event that nobody waits for."""
        if error is not None:
            self._fail(message.topic() or "", error)

    async def send(
        self,
        topic: str,
        event: Event,
        *,
        key: str | None = None,
        run_id: str = "",
        traceparent: str = "",
        purpose: str = "",
    ) -> None:
        """Publish and wait until the broker has the event.

        Raises Unavailable when the broker refuses it, Invalid for text that UTF-8 cannot hold.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Unavailable | None] = loop.create_future()

        def settle(outcome: Unavailable | None) -> None:
            if not done.done():
                done.set_result(outcome)

        def tell(outcome: Unavailable | None) -> None:
            loop.call_soon_threadsafe(settle, outcome)

        self.publish(
            topic,
            event,
            key=key,
            run_id=run_id,
            traceparent=traceparent,
            purpose=purpose,
            on_delivered=partial(tell, None),
            on_failed=tell,
        )
        refusal = await done
        if refusal is not None:
            raise refusal

    def run(self) -> None:
        """Thread. Serves delivery reports, many at a time; woken by the first `publish` after a pause. Raises
        when a delivery failed for good.

        A report only moves a commit on, so it may wait a few milliseconds; waking up for each one would cost
        more than the reports themselves.
        """
        while not self._stopping.is_set():
            self._reports_due.wait(_IDLE_S)
            self._reports_due.clear()
            while len(self._producer) and not self._stopping.is_set():
                time.sleep(_REPORTS_EVERY_S)
                self._producer.poll(0)
                if self.failure is not None:
                    break
            # A report may also have been served by a `publish` that found the queue full.
            if self.failure is not None:
                raise self.failure

    def stop(self, timeout_s: float = 5.0) -> None:
        """Flush what is queued, then end `run`."""
        left = self._producer.flush(timeout_s)
        if left:
            _LOG.warning("events not flushed", count=left)
        self._stopping.set()
        self._reports_due.set()

    def _fail(self, topic: str, error: KafkaError) -> None:
        _LOG.error("delivery failed", topic=topic, error=str(error))
        self.failure = Unavailable(f"{topic}: {error}")
        self._reports_due.set()
