"""What a service process is to the bus: a supervisor, a store and a bus, without the service."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition

from shared.bus import Bus, Delivery, Subscription
from shared.events import PolicyPublished
from shared.settings import KafkaSettings
from shared.store import FileStore, ObjectStore
from shared.supervisor import Supervisor


@dataclass
class Process:
    """One of them."""

    bus: Bus
    supervisor: Supervisor
    store: ObjectStore


@contextlib.asynccontextmanager
async def process(kafka: KafkaSettings, folder: Path, name: str = "p") -> AsyncIterator[Process]:
    """A process of its own memberships and producer; ends as a service does."""
    supervisor = Supervisor(stop_s=20)
    store = FileStore(folder / "store")
    bus = Bus(kafka, client_id=name, store=store, supervisor=supervisor)
    async with supervisor:
        yield Process(bus, supervisor, store)


@dataclass
class Collector:
    """A handler that keeps what it gets."""

    ack: bool = False
    """Acknowledge at once."""
    held: list[Delivery] = field(default_factory=list)

    def __call__(self, deliveries: list[Delivery]) -> None:
        self.held += deliveries
        if self.ack:
            for delivery in deliveries:
                delivery.ack()

    @property
    def numbers(self) -> list[int]:
        """In order of arrival."""
        return [number(delivery) for delivery in self.held]


def event(i: int, text: str = "") -> PolicyPublished:
    """A numbered event."""
    return PolicyPublished(policy="p", version=i, step=i, uri=text, digest="", published_at=0.0)


def number(delivery: Delivery) -> int:
    """The number of such an event."""
    assert isinstance(delivery.event, PolicyPublished)
    return delivery.event.version


def publish(bus: Bus, topic: str, numbers: range, *, partitions: int = 1, text: str = "") -> threading.Event:
    """Numbered events, round robin over partitions; set once the broker has all of them."""
    done, left = threading.Event(), iter(numbers[1:])

    def delivered() -> None:
        if next(left, None) is None:
            done.set()

    for i in numbers:
        bus.publish(topic, event(i, text), partition=i % partitions, on_delivered=delivered)
    return done


async def until(condition: Callable[[], object], *, seconds: float = 30) -> None:
    """Wait for a condition; fails the test when it does not come."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        await asyncio.sleep(0.01)


async def joined(*subscriptions: Subscription, partitions: int) -> None:
    """Wait until they share so many partitions evenly."""
    share = partitions // len(subscriptions)
    await until(lambda: all(len(s.partitions) == share for s in subscriptions))


def committed(kafka: KafkaSettings, group: str, topic: str) -> dict[int, int]:
    """Partition → committed offset, of those that have one."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": kafka.prefix + group})
    try:
        asked = [TopicPartition(kafka.prefix + topic, n) for n in range(kafka.partitions)]
        found = consumer.committed(asked, timeout=20)
    finally:
        consumer.close()
    return {tp.partition: tp.offset for tp in found if tp.offset >= 0}
