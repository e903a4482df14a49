"""How consumers take messages: at once when there are few, in batches when there are many."""

from __future__ import annotations

import time

from confluent_kafka import Consumer, Message

_BATCH = 256
_CROWDED = 12
"""After a batch of this size more is on its way: waiting a moment costs no throughput and saves a wake-up of
the thread and of the event loop for every few messages."""
_GATHER_S = 0.0015


class BatchPoll:
    """Polls one consumer. Not thread-safe."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._last = 0

    def take(self, timeout_s: float) -> list[Message]:
        """What is there, waiting for the first message at most so long. `Consumer.consume(n, t)` alone would
        wait for all n."""
        first = self._consumer.poll(timeout_s)
        if first is None:
            self._last = 0
            return []
        if self._last >= _CROWDED:
            time.sleep(_GATHER_S)
        messages: list[Message] = [first, *self._consumer.consume(_BATCH - 1, 0)]
        self._last = len(messages)
        return messages
