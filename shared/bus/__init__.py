"""The event bus: typed events over Kafka, at least once.

`Bus` is one process's door to the broker. `publish`/`send` produce; `subscribe` joins a consumer group;
`read` follows one partition without a group. Every thread runs under the process's supervisor: one that
dies ends the process, and Kafka replays what it had in hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from shared.bus.delivery import Delivery
from shared.bus.publisher import Publisher
from shared.bus.reader import PartitionReader
from shared.bus.subscription import Subscription
from shared.events import Event
from shared.settings import KafkaSettings
from shared.store import ObjectStore
from shared.supervisor import Supervisor

__all__ = ["Bus", "Delivery", "PartitionReader", "Publisher", "Subscription"]

_RELAXED = 5


class Bus:
    """Producer, memberships and readers of one process."""

    def __init__(
        self, settings: KafkaSettings, *, client_id: str, store: ObjectStore, supervisor: Supervisor
    ) -> None:
        self.settings = settings
        self._client_id = client_id
        self._store = store
        self._supervisor = supervisor
        self._subscriptions: list[Subscription] = []
        self._readers: list[PartitionReader] = []
        self._lost_before = 0
        self.publisher = Publisher(settings, client_id=client_id, store=store)
        self.publish = self.publisher.publish
        self.send = self.publisher.send
        supervisor.start_thread("delivery reports", self.publisher.run, end=self.publisher.stop)

    def subscribe(
        self,
        topics: Sequence[str],
        *,
        group: str,
        handler: Callable[[list[Delivery]], None],
        max_unacked: int = 1024,
        accept: Callable[[dict[str, bytes]], bool] | None = None,
        drain_s: float = 2.0,
        max_poll_interval_s: float = 300.0,
        relaxed: bool = False,
    ) -> Subscription:
        """Join a group. `accept` sees the headers and may skip an event undecoded (it is acknowledged).

        `drain_s`: how long what is in hand may still be acknowledged once a partition is taken away.
        `relaxed`: a few more milliseconds do not matter here; where the broker has to be asked often (the
        embedded one), it is asked less often.
        """
        settings = self.settings
        if relaxed and settings.fetch_wait_ms is not None:
            settings = settings.model_copy(update={"fetch_wait_ms": settings.fetch_wait_ms * _RELAXED})
        subscription = Subscription(
            settings,
            topics=topics,
            group=group,
            handler=handler,
            publisher=self.publisher,
            store=self._store,
            client_id=self._client_id,
            max_unacked=max_unacked,
            accept=accept,
            drain_s=drain_s,
            max_poll_interval_s=max_poll_interval_s,
        )
        self._subscriptions.append(subscription)
        self._supervisor.start_thread(f"subscription {group}", subscription.run, end=subscription.stop)
        return subscription

    async def read(
        self, topic: str, *, partition: int, handler: Callable[[list[Event]], None]
    ) -> PartitionReader:
        """Follow a partition from its present end. Returns when nothing later can be missed."""
        reader = PartitionReader(
            self.settings,
            topic=topic,
            partition=partition,
            handler=handler,
            store=self._store,
            client_id=self._client_id,
        )
        await asyncio.to_thread(reader.open)
        self._readers.append(reader)
        name = f"reader {topic}[{partition}]"
        self._supervisor.start_thread(name, reader.run, end=reader.stop)
        return reader

    @property
    def events_lost(self) -> int:
        """Offsets that jumped in this process without our having read them."""
        followed: list[Subscription | PartitionReader] = [*self._subscriptions, *self._readers]
        return self._lost_before + sum(one.events_lost for one in followed)

    def leave(self, subscription: Subscription) -> None:
        """End one membership while the process goes on; its thread drains, commits and leaves."""
        self._supervisor.release(f"subscription {subscription.group}")
        self._subscriptions.remove(subscription)
        self._lost_before += subscription.events_lost
