"""Fetches the KV of prefilled prompts, in threads of its own. Made by an engine with role `decode`."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from services.generation.kv.wire import (
    ACK,
    Ask,
    KvBroken,
    KvDamaged,
    KvLayout,
    Reply,
    receive_chunks,
    receive_model,
    send_model,
)

_THREADS = 4
"""Exchanges with one peer at a time. Peers share none: one that hangs holds up nobody else's KV."""
_CONNECT_S = 2.0
_IDLE_S = 60.0
"""After that a thread without work ends, and with it its connection."""


class TransferParams(BaseModel):
    """`kv_transfer_params` of this transport, named as vLLM names them."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_host: str = Field(min_length=1, max_length=255)
    remote_port: int = Field(ge=1, le=65_535)
    remote_engine_id: str = ""
    remote_request_id: str
    remote_num_tokens: int = Field(ge=1)
    lease: str = Field(max_length=256)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came of one fetch."""

    reason: str
    """Why there is no KV: `gone`, `late`, `corrupt`, `incompatible`; empty where it is here."""
    version: int = 0
    start: int = 0
    """The KV is of tokens from here on."""
    data: memoryview = field(default_factory=lambda: memoryview(b""))
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Fetch:
    """One fetch, waiting or under way."""

    params: TransferParams
    start: int
    limit: float
    """By the monotonic clock."""
    done: Callable[[Fetched], None]
    cancelled: bool = False
    """Nobody wants it any more; it is not begun then, but `done` is called all the same."""


class KvClient:
    """Threads and connections for each peer."""

    def __init__(self, *, layout: KvLayout, timeout_s: float) -> None:
        self._layout = layout
        self._timeout_s = timeout_s
        self._peers: dict[tuple[str, int], _Peer] = {}

    def fetch(self, params: TransferParams, *, start: int, done: Callable[[Fetched], None]) -> Fetch:
        """Get the KV of tokens from `start` on; `done` hears the outcome, in a thread of the peer."""
        fetch = Fetch(params, start, time.monotonic() + self._timeout_s, done)
        self._peer(params).submit(lambda link: self._fetch(fetch, link))
        return fetch

    def release(self, params: TransferParams) -> None:
        """Tell the prefill worker that nothing will be fetched. Where that fails the lease expires."""
        self._peer(params).submit(lambda link: _release(params, link))

    def close(self) -> None:
        """End the threads; what is under way comes to nothing."""
        for peer in self._peers.values():
            peer.close()

    def _peer(self, params: TransferParams) -> _Peer:
        address = (params.remote_host, params.remote_port)
        return self._peers.setdefault(address, _Peer(address))

    def _fetch(self, fetch: Fetch, link: _Link) -> None:
        fetched = Fetched("late") if fetch.cancelled else self._try(fetch, link)
        if fetched.reason in ("late", "corrupt", "incompatible"):
            # It is computed here now: the prefill worker need not keep it until the lease ends.
            self.release(fetch.params)
        fetch.done(fetched)

    def _try(self, fetch: Fetch, link: _Link) -> Fetched:
        began = time.perf_counter()
        try:
            connection, fresh = link.open(fetch.limit)
            try:
                reason, version, data = self._exchange(connection, fetch)
            except (OSError, KvBroken) as error:
                link.drop()
                if fresh or isinstance(error, KvDamaged | TimeoutError):
                    raise
                # A kept connection may have been closed by its server meanwhile.
                connection, _ = link.open(fetch.limit)
                reason, version, data = self._exchange(connection, fetch)
        except TimeoutError:
            return _lost(link, "late")
        except KvDamaged:
            return _lost(link, "corrupt")
        except (OSError, KvBroken, UnicodeError):
            # UnicodeError: a host name that cannot be one.
            return _lost(link, "gone")
        if reason == "incompatible":
            return _lost(link, reason)
        return Fetched(reason, version, fetch.start, data, time.perf_counter() - began)

    def _exchange(self, connection: socket.socket, fetch: Fetch) -> tuple[str, int, memoryview]:
        params, start, limit = fetch.params, fetch.start, fetch.limit
        _set_limit(connection, limit)
        send_model(connection, Ask(lease=params.lease, start=start))
        reply = receive_model(connection, Reply, limit=limit)
        if reply is None:
            raise KvBroken("the connection was closed")
        if not reply.found:
            return "gone", 0, memoryview(b"")
        expected = self._layout.token_bytes * max(reply.tokens - start, 0)
        fits = reply.layout == self._layout and reply.tokens == params.remote_num_tokens
        if not fits or reply.start != start or reply.nbytes != expected:
            # What would follow is of no use, and of a size that only the other side vouches for.
            return "incompatible", 0, memoryview(b"")
        data = memoryview(bytearray(expected))
        receive_chunks(connection, data, limit=limit)
        _set_limit(connection, limit)
        connection.sendall(ACK)
        return "", reply.version, data


class _Link:
    """A thread's connection to its peer."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._connection: socket.socket | None = None

    def open(self, limit: float) -> tuple[socket.socket, bool]:
        """The connection, and whether it was made now. Raises TimeoutError where no time is left."""
        left = limit - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if self._connection is not None:
            return self._connection, False
        self._connection = socket.create_connection(self._address, timeout=min(left, _CONNECT_S))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._connection, True

    def drop(self) -> None:
        """The next one will be new."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def interrupt(self) -> None:
        """Wake whoever waits for it; from any thread."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Peer:
    """What is to be said to one prefill worker, by threads that come with the work and go without it."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[_Link], None]] = deque()
        self._links: set[_Link] = set()
        self._idle = 0
        self._closed = False

    def submit(self, job: Callable[[_Link], None]) -> None:
        """Have a thread do this."""
        with self._changed:
            if self._closed:
                return
            self._jobs.append(job)
            if len(self._jobs) > self._idle and len(self._links) < _THREADS:
                link = _Link(self._address)
                self._links.add(link)
                threading.Thread(target=self._work, args=(link,), name="kv fetch", daemon=True).start()
            self._changed.notify()

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for link in self._links:
                link.interrupt()

    def _work(self, link: _Link) -> None:
        """Thread. Consumes fetches; produces their outcomes; waits for the next one, a minute at most."""
        try:
            while (job := self._next(link)) is not None:
                job(link)
        finally:
            with self._changed:
                self._links.discard(link)
            link.drop()

    def _next(self, link: _Link) -> Callable[[_Link], None] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._jobs or self._closed, timeout=_IDLE_S)
            self._idle -= 1
            if self._jobs and not self._closed:
                return self._jobs.popleft()
            # Under the same lock, so that no job is left to a thread that is about to end.
            self._links.discard(link)
            return None


def parse_params(params: Mapping[str, JsonValue]) -> TransferParams | None:
    """The parameters of this transport; None for those of another."""
    try:
        return TransferParams.model_validate(params)
    except ValidationError:
        return None


def _lost(link: _Link, reason: str) -> Fetched:
    """No KV, and a connection with which nobody knows what comes next."""
    link.drop()
    return Fetched(reason)


def _release(params: TransferParams, link: _Link) -> None:
    try:
        connection, _ = link.open(time.monotonic() + _CONNECT_S)
        connection.settimeout(_CONNECT_S)
        send_model(connection, Ask(lease=params.lease, release=True))
    except (OSError, UnicodeError):
        link.drop()


def _set_limit(connection: socket.socket, limit: float) -> None:
    left = limit - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)
