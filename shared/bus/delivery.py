"""What a subscription has in hand: one event, and the bookkeeping of the partition it came from."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from shared import metrics
from shared.bus.polling import Taken
from shared.events import Event

if TYPE_CHECKING:
    from shared.bus.subscription import Subscription


class Partition:
    """Bookkeeping of one assigned partition: what is in hand and how far all is acknowledged. Thread-safe.

    A partition that is revoked and assigned again gets a new one: acknowledgements of the old do not count.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.outstanding: deque[int] = deque()
        """Offsets delivered and above the watermark, ascending."""
        self.acked: set[int] = set()
        """Those of `outstanding` that were acknowledged before an earlier one."""
        self.expected: int | None = None
        """Offset that the next message must have."""
        self.watermark: int | None = None
        """Every offset below is acknowledged; None before the first is."""
        self.committed: int | None = None
        """What the broker is believed to have; None: unknown, commit again."""
        self.fenced = False

    def delivered(self, offset: int) -> None:
        """An offset is in hand."""
        with self.lock:
            self.outstanding.append(offset)

    def rewind(self, offset: int) -> None:
        """The broker delivers from `offset` once more: forget what is in hand from there on."""
        with self.lock:
            while self.outstanding and self.outstanding[-1] >= offset:
                self.acked.discard(self.outstanding.pop())
            if self.watermark is not None:
                self.watermark = min(self.watermark, offset)

    def ack(self, offset: int) -> bool:
        """Whether it counted; False after fencing. A second acknowledgement changes nothing."""
        with self.lock:
            if self.fenced:
                return False
            outstanding, acked = self.outstanding, self.acked
            if not outstanding or offset < outstanding[0]:
                return True
            acked.add(offset)
            while outstanding and outstanding[0] in acked:
                done = outstanding.popleft()
                acked.discard(done)
                self.watermark = done + 1
            return True

    def fence(self) -> None:
        """No acknowledgement counts any more."""
        with self.lock:
            self.fenced = True


class Delivery:
    """One event in hand. Exactly one of `ack` and `fail` ends it."""

    __slots__ = ("_message", "_partition", "_subscription", "attempts", "event", "headers")

    def __init__(
        self, event: Event, headers: dict[str, bytes], message: Taken, partition: Partition,
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
        return self._message.offset()

    @property
    def partition(self) -> int:
        """The partition it came from."""
        return self._message.partition()

    @property
    def traceparent(self) -> str:
        """The trace context it carries, or an empty string."""
        return (self.headers.get("traceparent") or b"").decode("ascii", "replace")

    def ack(self) -> None:
        """Its effect is safe: never deliver it again. From any thread."""
        if not self._partition.ack(self._message.offset()):
            metrics.FENCED_ACKS.labels(self._subscription.label).inc()

    def fail(self, error: BaseException) -> None:
        """Its handling failed: deliver it again, or give it up to `deadletters`. On the event loop."""
        self._subscription.retry(self, error)
