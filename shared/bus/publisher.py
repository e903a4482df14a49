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

import structlog
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from shared import metrics
from shared.bus import codec
from shared.errors import Unavailable
from shared.events import Event
from shared.settings import KafkaSettings
from shared.store import ObjectStore

_LOG = structlog.get_logger()
_QUEUE_FULL_WAIT_S = 30.0
_FRAMING_BYTES = 16_384
"""Headers and key on top of the largest inline payload."""


class Publisher:
    """Publishes events. Thread-safe."""

    def __init__(self, settings: KafkaSettings, *, client_id: str, store: ObjectStore) -> None:
        self._settings = settings
        self._store = store
        config = codec.common_settings(settings, client_id) | {
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 0,
            "message.max.bytes": settings.inline_limit_bytes + _FRAMING_BYTES,
            "delivery.timeout.ms": 300_000,
        }
        self._producer = Producer(config)
        self._stopping = threading.Event()
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
        on_delivered: Callable[[], None] | None = None,
    ) -> None:
        """Hand an event to the broker; `on_delivered` runs on another thread once it is there.

        Raises Unavailable when the producer's queue stays full.
        """
        payload, headers = codec.encode(event, run_id=run_id, traceparent=traceparent, purpose=purpose)
        if len(payload) > self._settings.inline_limit_bytes:
            payload = codec.check_in(self._store, payload)
            headers.append(("claim", b"1"))
            metrics.CLAIM_CHECKS.labels(topic).inc()
        self.publish_raw(topic, payload, headers, key=key, partition=partition, on_delivered=on_delivered)

    def publish_raw(
        self,
        topic: str,
        payload: bytes | None,
        headers: codec.Headers,
        *,
        key: str | bytes | None = None,
        partition: int | None = None,
        on_delivered: Callable[[], None] | None = None,
    ) -> None:
        """Hand bytes to the broker, as `publish` does."""

        def report(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._fail(topic, error)
            elif on_delivered is not None:
                on_delivered()

        full = self._settings.prefix + topic
        until = time.monotonic() + _QUEUE_FULL_WAIT_S
        while True:
            try:
                if partition is None:
                    self._producer.produce(full, payload, key, headers=headers, on_delivery=report)
                else:
                    self._producer.produce(full, payload, key, partition, headers=headers, on_delivery=report)
                break
            except BufferError:
                if time.monotonic() > until:
                    raise Unavailable(f"the producer's queue to {full} stays full") from None
                self._producer.poll(0.05)
            except KafkaException as error:
                raise Unavailable(f"{full}: {error}") from error
        metrics.EVENTS_PUBLISHED.labels(topic).inc()

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
        """Publish and wait until the broker has the event."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def delivered() -> None:
            loop.call_soon_threadsafe(lambda: done.done() or done.set_result(None))

        self.publish(
            topic,
            event,
            key=key,
            run_id=run_id,
            traceparent=traceparent,
            purpose=purpose,
            on_delivered=delivered,
        )
        await done

    def run(self) -> None:
        """Thread: serves delivery reports. Woken by librdkafka; ends when a delivery failed for good."""
        while not self._stopping.is_set():
            self._producer.poll(0.5)
            if self.failure is not None:
                raise self.failure

    def stop(self, timeout_s: float = 5.0) -> None:
        """Flush what is queued, then end `run`."""
        left = self._producer.flush(timeout_s)
        if left:
            _LOG.warning("events not flushed", count=left)
        self._stopping.set()

    def _fail(self, topic: str, error: KafkaError) -> None:
        _LOG.error("delivery failed", topic=topic, error=str(error))
        self.failure = Unavailable(f"{topic}: {error}")
