"""Who may still fetch which KV. Filled by the engine, read by the threads that serve KV, emptied by the
engine.

A lease ends when its KV was fetched and acknowledged, when its request is aborted, or when its time is over.
Its blocks go back to the engine's thread once nobody reads them any more; only that thread touches the pool.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["fetched", "aborted", "expired"]


@dataclass(slots=True, eq=False)
class Lease:
    """The KV of one prefilled prompt."""

    request_id: str
    session: str
    tokens: list[int]
    """The prompt: their KV is in `blocks`, from position 0."""
    blocks: list[int]
    version: int
    """Policy version that computed the KV."""
    expires_at: float
    """By the monotonic clock."""
    keep: bool = True
    """Whether the KV is of use for the session's next turn, once it was fetched."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    """What a decode worker must know to fetch it."""
    readers: int = 0
    outcome: Outcome | None = None
    """How it ended; None while it lives."""

    @property
    def left_s(self) -> float:
        """Seconds until it ends; none where it has ended."""
        return 0.0 if self.outcome is not None else max(self.expires_at - time.monotonic(), 0.0)


class LeaseTable:
    """All leases of one engine. Every method may be called by any thread."""

    def __init__(self, ended: Callable[[], None]) -> None:
        """`ended` is called, by any thread, when `take_ended` would give a lease that it did not before."""
        self._lock = threading.Lock()
        self._by_token: dict[str, Lease] = {}
        """In the order in which they expire."""
        self._by_request: dict[str, Lease] = {}
        self._ended: list[Lease] = []
        self._on_ended = ended

    def __len__(self) -> int:
        """Leases that live."""
        with self._lock:
            return len(self._by_token)

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` would give a lease."""
        return bool(self._ended)

    def add(self, lease: Lease) -> None:
        """Begin one. It must expire no earlier than those before it."""
        with self._lock:
            self._by_token[lease.token] = lease
            self._by_request[lease.request_id] = lease

    def open(self, token: str) -> Lease | None:
        """A lease to be read, until `close`; None where there is none that lives."""
        with self._lock:
            lease = self._by_token.get(token)
            if lease is None or lease.expires_at <= time.monotonic():
                return None
            lease.readers += 1
            return lease

    def close(self, lease: Lease, *, fetched: bool) -> None:
        """Reading is over; where the KV has arrived that ends the lease."""
        with self._lock:
            lease.readers -= 1
            if fetched and lease.outcome is None:
                self._end(lease, "fetched")
            elif lease.outcome is not None and not lease.readers:
                self._ended.append(lease)
        self._tell()

    def release(self, token: str) -> None:
        """The decode worker has no use for it."""
        with self._lock:
            lease = self._by_token.get(token)
            if lease is not None:
                self._end(lease, "aborted")
        self._tell()

    def abort(self, request_id: str) -> bool:
        """End the lease of a request; False where it has none."""
        with self._lock:
            lease = self._by_request.get(request_id)
            if lease is not None:
                self._end(lease, "aborted")
            return lease is not None

    def forget(self, session: str) -> None:
        """What is leased of a session stays fetchable, but is not kept for a next turn."""
        with self._lock:
            for lease in self._by_token.values():
                if lease.session == session:
                    lease.keep = False

    def expire(self) -> None:
        """End those whose time is over."""
        now = time.monotonic()
        with self._lock:
            while self._by_token:
                oldest = next(iter(self._by_token.values()))
                if oldest.expires_at > now:
                    return
                self._end(oldest, "expired")

    def take_ended(self) -> list[Lease]:
        """Leases that have ended and are read by nobody, each once: their blocks are the caller's."""
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def _end(self, lease: Lease, outcome: Outcome) -> None:
        lease.outcome = outcome
        del self._by_token[lease.token]
        if self._by_request.get(lease.request_id) is lease:
            del self._by_request[lease.request_id]
        if not lease.readers:
            self._ended.append(lease)

    def _tell(self) -> None:
        if self._ended:
            self._on_ended()
