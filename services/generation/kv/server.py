"""Serves leased KV to decode workers, from threads of its own. Made by an engine with role `prefill`."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable

import structlog

from services.generation.kv.leases import Lease, LeaseTable
from services.generation.kv.wire import (
    ACK,
    Ask,
    KvBroken,
    KvLayout,
    Reply,
    receive_into,
    receive_model,
    send_chunks,
    send_model,
)
from shared.errors import FieldProblem, Invalid

log = structlog.get_logger()

_MAX_CONNECTIONS = 256
_IDLE_S = 300.0
"""A connection without a question for so long is closed."""
_STALL_S = 10.0
"""A client that takes nothing for so long in the middle of an exchange is dropped; its lease lives on."""


class KvServer:
    """Listens until `close`.

    `read(lease, start)` gives the KV of the lease's tokens from `start` on as contiguous bytes, layer by
    layer, keys then values. It is called by a serving thread, while the lease's blocks cannot change.
    """

    def __init__(
        self,
        leases: LeaseTable,
        *,
        layout: KvLayout,
        read: Callable[[Lease, int], Iterable[memoryview]],
        host: str,
        port: int,
        ports: int = 1,
    ) -> None:
        """Binds `port` or one of the `ports - 1` after it; 0 is any free one. Raises Invalid where all are
        in use."""
        self._leases = leases
        self._layout = layout
        self._read = read
        self._listener = _listen(host, port, ports if port else 1)
        self.host = socket.gethostname() if host in ("0.0.0.0", "::") else host
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._ended = threading.Event()
        threading.Thread(target=self._accept, name="kv accept", daemon=True).start()

    def close(self) -> None:
        """End all exchanges."""
        self._ended.set()
        with self._lock:
            open_ones = [self._listener, *self._connections]
        for one in open_ones:
            # A blocked accept or recv wakes by shutdown, not by close.
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        """Thread. Consumes connections; produces a thread for each; waits for the next connection."""
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # Closed, or out of file descriptors, which passes.
                self._ended.wait(0.05)
                continue
            with self._lock:
                welcome = len(self._connections) < _MAX_CONNECTIONS and not self._ended.is_set()
                if welcome:
                    self._connections.add(connection)
            if not welcome:
                connection.close()
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), name="kv serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Thread. Consumes questions of one client; produces KV; waits for the next question."""
        try:
            while True:
                connection.settimeout(_IDLE_S)
                ask = receive_model(connection, Ask)
                if ask is None:
                    return
                connection.settimeout(_STALL_S)
                self._answer(connection, ask)
        except (OSError, KvBroken) as error:
            if not self._ended.is_set():
                log.warning("kv_client_lost", error=str(error))
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket, ask: Ask) -> None:
        if ask.release:
            self._leases.release(ask.lease)
            return
        lease = self._leases.open(ask.lease)
        if lease is None:
            send_model(connection, Reply(found=False))
            return
        fetched = False
        try:
            start = min(ask.start, len(lease.tokens))
            nbytes = self._layout.token_bytes * (len(lease.tokens) - start)
            send_model(
                connection,
                Reply(
                    found=True,
                    version=lease.version,
                    start=start,
                    tokens=len(lease.tokens),
                    nbytes=nbytes,
                    layout=self._layout,
                ),
            )
            if nbytes:
                send_chunks(connection, self._read(lease, start))
            answer = bytearray(1)
            receive_into(connection, memoryview(answer))
            fetched = bytes(answer) == ACK
            if not fetched:
                raise KvBroken("the client did not acknowledge")
        finally:
            self._leases.close(lease, fetched=fetched)


def _listen(host: str, port: int, ports: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in range(port, port + ports):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
        except OSError as error:
            listener.close()
            last = error
            continue
        listener.listen(128)
        return listener
    name = "GENERATION__KV_PORT" if port else "GENERATION__KV_HOST"
    message = f"KV cannot be served at {host}:{port}: {last.strerror}; set {name} to one that is free"
    raise Invalid(message, fields=[FieldProblem(field=name, message=message)])
