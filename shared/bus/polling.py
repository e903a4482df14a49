"""How consumers take messages: at once when there are few, in batches when there are many."""

from __future__ import annotations

import time
from typing import Protocol, cast

from confluent_kafka import Consumer, KafkaError

_BATCH = 256
_CROWDED = 3
"""After a batch of this size more is on its way: waiting a moment costs no throughput and saves a wake-up of
the thread and of the event loop for every few messages."""
_GATHER_S = 0.002


class Taken(Protocol):
    """A `confluent_kafka.Message` from a consumer, or an error in its place: then the rest means nothing."""

    def error(self) -> KafkaError | None: ...
    def topic(self) -> str: ...
    def partition(self) -> int: ...
    def offset(self) -> int: ...
    def key(self) -> bytes | None: ...
    def value(self) -> bytes | None: ...
    def headers(self) -> list[tuple[str, bytes]] | None: ...


class BatchPoll:
    """Polls one consumer. Not thread-safe."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._last = 0
        self.revoked: set[tuple[str, int]] = set()
        """Where the rebalance callbacks put what has been taken from us."""

    def take(self, timeout_s: float) -> list[Taken]:
        """What is there, waiting for the first message at most so long. `Consumer.consume(n, t)` alone would
        wait for all n."""
        first = self._consumer.poll(timeout_s)
        if first is None:
            self._last = 0
            return []
        if self._last >= _CROWDED:
            time.sleep(_GATHER_S)
        self.revoked.clear()
        messages = cast(list[Taken], [first, *self._consumer.consume(_BATCH - 1, 0)])
        if self.revoked and (first.topic(), first.partition()) in self.revoked:
            # Taken before, handled after: it must not count for an assignment that began in between.
            del messages[0]
        self._last = len(messages)
        return messages
