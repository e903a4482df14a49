"""Serves leased KV to decode workers, from threads of its own. Made by an engine with role `prefill`."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

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
"""A client that has had KV and asks nothing for so long is dropped."""
_STRANGER_S = 10.0
"""One that has not named a lease yet is dropped after this."""
_STALL_S = 10.0
"""A client that takes not one chunk for so long is dropped; its lease lives on."""


@dataclass(slots=True, eq=False)
class _Client:
    """The other end of one connection."""

    connection: socket.socket
    known: bool = False
    """It has named a lease that lived."""
    waiting: bool = True
    """Nothing is being sent to it."""


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
        self._clients: dict[_Client, None] = {}
        """Longest silent first."""
        self._ended = threading.Event()
        threading.Thread(target=self._accept, name="kv accept", daemon=True).start()

    def close(self) -> None:
        """End all exchanges."""
        self._ended.set()
        with self._lock:
            connections = [self._listener, *(client.connection for client in self._clients)]
        for connection in connections:
            _interrupt(connection)
        self._listener.close()

    def _accept(self) -> None:
        """Thread. Consumes connections; produces a thread for each; waits for the next connection."""
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # Closed, or out of file descriptors, which passes.
                self._ended.wait(0.05)
                continue
            client = _Client(connection)
            if not self._welcome(client):
                connection.close()
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(client,), name="kv serve", daemon=True).start()

    def _welcome(self, client: _Client) -> bool:
        """Whether there is room, made where needed by dropping who says nothing: strangers first."""
        with self._lock:
            if self._ended.is_set():
                return False
            if len(self._clients) >= _MAX_CONNECTIONS:
                silent = [other for other in self._clients if other.waiting]
                if not silent:
                    return False
                dropped = next((other for other in silent if not other.known), silent[0])
                del self._clients[dropped]
                _interrupt(dropped.connection)
            self._clients[client] = None
            return True

    def _serve(self, client: _Client) -> None:
        """Thread. Consumes questions of one client; produces KV; waits for the next question."""
        try:
            while (ask := self._next(client)) is not None:
                self._answer(client, ask)
                with self._lock:
                    client.waiting = True
                    if self._clients.pop(client, client) is None:
                        self._clients[client] = None
        except (OSError, KvBroken) as error:
            if not self._ended.is_set():
                log.warning("kv_client_lost", error=str(error))
        finally:
            with self._lock:
                self._clients.pop(client, None)
            client.connection.close()

    def _next(self, client: _Client) -> Ask | None:
        """The next question; None where the client has left, or has been silent for too long."""
        patience = _IDLE_S if client.known else _STRANGER_S
        try:
            ask = receive_model(client.connection, Ask, limit=time.monotonic() + patience)
        except TimeoutError:
            return None
        with self._lock:
            client.waiting = False
        return ask

    def _answer(self, client: _Client, ask: Ask) -> None:
        connection = client.connection
        connection.settimeout(_STALL_S)
        if ask.release:
            self._leases.release(ask.lease)
            return
        lease = self._leases.open(ask.lease)
        if lease is None:
            send_model(connection, Reply(found=False))
            return
        client.known = True
        fetched = False
        try:
            self._send(connection, lease, min(ask.start, len(lease.tokens)))
            answer = bytearray(1)
            receive_into(connection, memoryview(answer))
            fetched = bytes(answer) == ACK
            if not fetched:
                raise KvBroken("the client did not acknowledge")
        finally:
            self._leases.close(lease, fetched=fetched)

    def _send(self, connection: socket.socket, lease: Lease, start: int) -> None:
        tokens = len(lease.tokens)
        nbytes = self._layout.token_bytes * (tokens - start)
        reply = Reply(
            found=True, version=lease.version, start=start, tokens=tokens, nbytes=nbytes, layout=self._layout
        )
        send_model(connection, reply)

        def proceed() -> None:
            # However slowly a client reads, it holds the blocks no longer than its lease.
            left = lease.left_s
            if not left:
                raise KvBroken("the lease has ended")
            connection.settimeout(min(_STALL_S, left))

        if nbytes:
            send_chunks(connection, self._read(lease, start), proceed=proceed)
        proceed()


def _interrupt(connection: socket.socket) -> None:
    """Wake whoever waits in accept or recv: that happens by shutdown, not by close."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


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
