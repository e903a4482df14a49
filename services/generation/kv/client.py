"""Fetches the KV of prefilled prompts, in threads of its own. Made by an engine with role `decode`."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import defaultdict
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

_THREADS = 8
_CONNECT_S = 2.0
_KEPT = 8
"""Idle connections kept per peer."""


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


class KvClient:
    """A pool of threads and of connections."""

    def __init__(self, *, layout: KvLayout, timeout_s: float) -> None:
        self._layout = layout
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle: defaultdict[tuple[str, int], list[socket.socket]] = defaultdict(list)
        self._threads = 0
        self._busy = 0
        self._closed = False

    def fetch(self, params: TransferParams, *, start: int, done: Callable[[Fetched], None]) -> None:
        """Get the KV of tokens from `start` on; `done` hears the outcome, in a thread of the pool."""
        limit = time.monotonic() + self._timeout_s
        self._submit(lambda: done(self._fetch(params, start, limit)))

    def release(self, params: TransferParams) -> None:
        """Tell the prefill worker that nothing will be fetched. Where that fails the lease expires."""
        self._submit(lambda: self._release(params))

    def close(self) -> None:
        """End the threads; what is under way comes to nothing."""
        self._closed = True
        for _ in range(self._threads):
            self._jobs.put(None)
        with self._lock:
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()

    def _submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._busy += 1
            if self._threads < min(self._busy, _THREADS):
                self._threads += 1
                threading.Thread(target=self._work, name="kv fetch", daemon=True).start()
        self._jobs.put(job)

    def _work(self) -> None:
        """Thread. Consumes fetches; produces their outcomes; waits for the next."""
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._busy -= 1

    def _fetch(self, params: TransferParams, start: int, limit: float) -> Fetched:
        began = time.perf_counter()
        peer = (params.remote_host, params.remote_port)
        try:
            connection, fresh = self._connect(peer, limit)
            try:
                found = self._exchange(connection, params, start, limit)
            except (OSError, KvBroken):
                connection.close()
                if fresh or time.monotonic() >= limit:
                    raise
                # A kept connection may have been closed by its server meanwhile.
                connection, _ = self._connect(peer, limit, fresh=True)
                try:
                    found = self._exchange(connection, params, start, limit)
                except BaseException:
                    connection.close()
                    raise
        except TimeoutError:
            return Fetched("late")
        except OSError:
            return Fetched("gone")
        except KvDamaged:
            return Fetched("corrupt")
        except KvBroken:
            return Fetched("gone")
        self._keep(peer, connection)
        reason, version, data = found
        return Fetched(reason, version, start, data, time.perf_counter() - began)

    def _exchange(
        self, connection: socket.socket, params: TransferParams, start: int, limit: float
    ) -> tuple[str, int, memoryview]:
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
            connection.close()
            return "incompatible", 0, memoryview(b"")
        data = memoryview(bytearray(expected))
        receive_chunks(connection, data, limit=limit)
        _set_limit(connection, limit)
        connection.sendall(ACK)
        return "", reply.version, data

    def _release(self, params: TransferParams) -> None:
        peer = (params.remote_host, params.remote_port)
        try:
            connection, _ = self._connect(peer, time.monotonic() + _CONNECT_S)
            send_model(connection, Ask(lease=params.lease, release=True))
        except OSError:
            return
        self._keep(peer, connection)

    def _connect(
        self, peer: tuple[str, int], limit: float, *, fresh: bool = False
    ) -> tuple[socket.socket, bool]:
        """A connection, and whether it was made now. Raises TimeoutError where no time is left."""
        left = limit - time.monotonic()
        if left <= 0:
            raise TimeoutError
        with self._lock:
            if self._idle[peer] and not fresh:
                return self._idle[peer].pop(), False
        try:
            connection = socket.create_connection(peer, timeout=min(left, _CONNECT_S))
        except TimeoutError as error:
            raise TimeoutError from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, True

    def _keep(self, peer: tuple[str, int], connection: socket.socket) -> None:
        with self._lock:
            if not self._closed and connection.fileno() >= 0 and len(self._idle[peer]) < _KEPT:
                self._idle[peer].append(connection)
                return
        connection.close()


def parse_params(params: Mapping[str, JsonValue]) -> TransferParams | None:
    """The parameters of this transport; None for those of another."""
    try:
        return TransferParams.model_validate(params)
    except ValidationError:
        return None


def _set_limit(connection: socket.socket, limit: float) -> None:
    left = limit - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)
