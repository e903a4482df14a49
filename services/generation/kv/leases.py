"""Who may still fetch which KV. Filled by the engine, read by the threads that serve KV, emptied by the
engine.

A lease ends when its KV was fetched and acknowledged, when its request is aborted, or when its time is over.
Its blocks go back to the engine's thread once nobody reads them any more; only that thread touches the pool.
"""

from __future__ import annotations

import secrets
import threading
import time
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
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    """What a decode worker must know to fetch it."""
    readers: int = 0
    outcome: Outcome | None = None
    """How it ended; None while it lives."""


class LeaseTable:
    """All leases of one engine. Every method may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_token: dict[str, Lease] = {}
        self._by_request: dict[str, Lease] = {}
        self._ended: list[Lease] = []

    def __len__(self) -> int:
        """Leases that live."""
        with self._lock:
            return len(self._by_token)

    def add(self, lease: Lease) -> None:
        """Begin one."""
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

    def release(self, token: str) -> None:
        """The decode worker has no use for it."""
        with self._lock:
            lease = self._by_token.get(token)
            if lease is not None:
                self._end(lease, "aborted")

    def abort(self, request_id: str) -> bool:
        """End the lease of a request; False where it has none."""
        with self._lock:
            lease = self._by_request.get(request_id)
            if lease is not None:
                self._end(lease, "aborted")
            return lease is not None

    def expire(self) -> None:
        """End those whose time is over."""
        now = time.monotonic()
        with self._lock:
            for lease in [lease for lease in self._by_token.values() if lease.expires_at <= now]:
                self._end(lease, "expired")

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
