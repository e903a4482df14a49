"""What client and server of a KV transfer say to each other. Used by `server.py` and `client.py`.

    client → server   length, JSON Ask
    server → client   length, JSON Reply; where KV comes, chunks of (length, crc32, bytes), `nbytes` in all
    client → server   one byte ACK: everything has arrived and its checksums are right

The bytes are, layer by layer, keys then values, each as rows of one token in the dtype of the model. A
connection carries any number of such exchanges, one after the other.
"""

from __future__ import annotations

import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterable
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

CHUNK_BYTES = 1 << 20
ACK = b"\x06"
MAX_HEADER_BYTES = 65_536
M = TypeVar("M", bound=BaseModel)
_LENGTH = struct.Struct(">I")
_CHUNK = struct.Struct(">II")


class KvBroken(Exception):
    """The other side speaks no KV protocol, or went away in the middle."""


class KvDamaged(KvBroken):
    """What has come is not what was sent."""


class Ask(BaseModel):
    """What a client wants."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    lease: str = Field(max_length=256)
    start: int = Field(0, ge=0)
    """First token whose KV is wanted."""
    release: bool = False
    """Nothing is wanted any more: end the lease."""


class KvLayout(BaseModel):
    """What KV of a model looks like; two engines can exchange KV where it is equal."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    dtype: str
    widths: list[tuple[int, int]]
    """Elements of one token's keys and values in each layer."""
    itemsize: int = Field(ge=1, le=16)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.itemsize * sum(key + value for key, value in self.widths)


class Reply(BaseModel):
    """What a server answers."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    found: bool
    """False: there is no such lease (any more)."""
    version: int = 0
    """Policy version that computed the KV."""
    start: int = 0
    tokens: int = 0
    """Tokens from position 0 that the lease covers: KV comes for those from `start` on."""
    nbytes: int = 0
    layout: KvLayout | None = None


def send_model(connection: socket.socket, model: BaseModel) -> None:
    """Length and JSON."""
    data = model.model_dump_json().encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_model(connection: socket.socket, kind: type[M], *, limit: float | None = None) -> M | None:
    """The next model; None where the other side has closed in between. Raises KvBroken, TimeoutError."""
    head = bytearray(_LENGTH.size)
    if not receive_into(connection, memoryview(head), may_end=True, limit=limit):
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_HEADER_BYTES:
        raise KvBroken(f"a header of {length} bytes")
    body = bytearray(length)
    receive_into(connection, memoryview(body), limit=limit)
    try:
        return kind.model_validate_json(bytes(body))
    except ValidationError as error:
        raise KvBroken(f"no {kind.__name__}: {error}") from error


def receive_into(
    connection: socket.socket, target: memoryview, *, may_end: bool = False, limit: float | None = None
) -> bool:
    """Fill the target; False, where that `may_end` the connection, if it was closed and not a byte has come.

    Raises KvBroken where the other side closes before, and TimeoutError at `limit` (monotonic clock) however
    steadily bytes drip in.
    """
    at = 0
    while at < len(target):
        if limit is not None:
            left = limit - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
        count = connection.recv_into(target[at:])
        if not count:
            if may_end and not at:
                return False
            raise KvBroken("the connection was closed in the middle")
        at += count
    return True


def send_chunks(
    connection: socket.socket, parts: Iterable[memoryview], *, proceed: Callable[[], None]
) -> None:
    """Raw bytes as chunks with checksums. `proceed` is called before each, to raise where it is of no use."""
    for part in parts:
        view = part.cast("B")
        for at in range(0, len(view), CHUNK_BYTES):
            proceed()
            chunk = view[at : at + CHUNK_BYTES]
            connection.sendall(_CHUNK.pack(len(chunk), zlib.crc32(chunk)))
            connection.sendall(chunk)


def receive_chunks(connection: socket.socket, target: memoryview, *, limit: float | None = None) -> None:
    """Fill the target. Raises KvDamaged for a wrong checksum or a chunk that goes beyond it."""
    at, head = 0, bytearray(_CHUNK.size)
    while at < len(target):
        receive_into(connection, memoryview(head), limit=limit)
        length, checksum = _CHUNK.unpack(head)
        if not 0 < length <= min(CHUNK_BYTES, len(target) - at):
            raise KvDamaged(f"a chunk of {length} bytes")
        chunk = target[at : at + length]
        receive_into(connection, chunk, limit=limit)
        if zlib.crc32(chunk) != checksum:
            raise KvDamaged("a chunk's checksum does not match")
        at += length
