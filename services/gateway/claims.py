"""`Idempotency-Key`: a request that is sent again makes nothing twice. Called by the routes that create.

The first request with a key claims it for the id it will make. A later one with the same body is answered
with what that id stands for; where its maker died before it was done, the later one makes it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.gateway.bodies import invalid
from shared.errors import NotFound, Unavailable
from shared.state import State

T = TypeVar("T")
_MAKER_TTL_S = 10.0
_WAIT_S = 20.0
_MAX_KEY = 256


async def create_once(
    state: State,
    *,
    route: str,
    key: str | None,
    body: bytes,
    made_id: str,
    find: Callable[[str], Awaitable[T]],
    make: Callable[[str], Awaitable[T]],
) -> tuple[T, bool]:
    """What the key stands for and whether this call made it; without a key, always a new one.

    `find` raises NotFound until `make` is done. Raises Conflict where the key was used with another body.
    """
    if key is None:
        return await make(made_id), True
    if not 0 < len(key) <= _MAX_KEY or not key.isprintable():
        raise invalid("Idempotency-Key", f"needs 1 to {_MAX_KEY} printable characters")
    claimed = await state.claim_idempotency(key, route.encode() + b"\n" + body, made_id)
    owner = uuid.uuid4().hex
    lease = f"create:{claimed}"
    until = asyncio.get_running_loop().time() + _WAIT_S
    while asyncio.get_running_loop().time() < until:
        try:
            return await find(claimed), False
        except NotFound:
            pass
        if await state.acquire_lease(lease, owner, ttl_s=_MAKER_TTL_S):
            try:
                return await find(claimed), False
            except NotFound:
                return await make(claimed), True
            finally:
                await state.release_lease(lease, owner)
        await asyncio.sleep(0.05)
    raise Unavailable(f"another request with this Idempotency-Key is still making {claimed}")
