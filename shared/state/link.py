"""The connection to Redis: patience while it is away, compare-and-set, hints. The root of `shared.state`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar, cast

import redis.asyncio as redis
import structlog
from redis.asyncio.client import Pipeline, PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, WatchError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.errors import Unavailable
from shared.settings import RedisSettings

_LOG = structlog.get_logger()
HINT_INTERVAL_S = 1.0
_PATIENCE_S = 20.0
"""How long a method goes on trying while Redis is away."""
_ANSWER_S = 3.0
"""A command that is not answered by then goes to a new connection: the peer of a half-open one is silent."""
_CONNECTIONS = 256
_QUIET_S = 2.0
T = TypeVar("T")


def patient(
    method: Callable[..., Coroutine[object, object, T]],
) -> Callable[..., Coroutine[object, object, T]]:
    """Try a method again while Redis is away; Unavailable in the end."""

    @functools.wraps(method)
    async def tried(*args: object, **kwargs: object) -> T:
        until = time.monotonic() + _PATIENCE_S
        pause = 0.05
        while True:
            try:
                return await method(*args, **kwargs)
            except (RedisConnectionError, RedisTimeoutError) as error:
                if time.monotonic() + pause > until:
                    raise Unavailable(f"Redis does not answer: {error}") from error
            await asyncio.sleep(pause)
            pause = min(1.0, pause * 2)

    return tried


def multi(pipe: Pipeline) -> None:
    """From here on, what is asked of the pipeline is a write that waits for the others."""
    cast(Callable[[], None], pipe.multi)()


class Link:
    """One process's door to Redis. Methods of subclasses wait for a Redis that is away, and raise Unavailable
    when it stays so; each may run its commands again after a lost connection."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, member in list(vars(cls).items()):
            if inspect.iscoroutinefunction(member):
                setattr(cls, name, patient(member))

    def __init__(self, settings: RedisSettings) -> None:
        self._prefix = settings.prefix
        # Waits for a free connection where `ConnectionPool` would raise. Whole methods are tried again, by
        # `patient`: one retry below serves connections that died while idle.
        pool = redis.BlockingConnectionPool.from_url(
            settings.url,
            max_connections=_CONNECTIONS,
            timeout=_PATIENCE_S,
            decode_responses=True,
            retry=Retry(NoBackoff(), 1),
            socket_connect_timeout=_ANSWER_S,
            socket_timeout=_ANSWER_S,
            health_check_interval=15,
        )
        self._redis = redis.Redis.from_pool(pool)
        self._changed: dict[str, asyncio.Event] = {}

    def _key(self, *parts: object) -> str:
        return self._prefix + ":".join(str(part) for part in parts)

    async def connect(self, *, timeout_s: float = 30.0) -> None:
        """Wait until Redis answers. Raises Unavailable."""
        until = time.monotonic() + timeout_s
        while not await self.ping():
            if time.monotonic() > until:
                raise Unavailable("Redis does not answer; check REDIS__URL")
            await asyncio.sleep(0.1)

    async def ping(self) -> bool:
        """Whether Redis answers now."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                return bool(await self._redis.ping())
        except (RedisError, OSError):
            return False

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    # Hints

    async def follow_hints(self) -> None:
        """Loop. Consumes the channel `hints`; wakes `wait_hint`; woken by Redis. Survives its restart, and a
        connection that has gone silent."""
        while True:
            try:
                async with self._redis.pubsub() as pubsub:
                    await pubsub.subscribe(self._key("hints"))
                    await self._listen(pubsub)
            except (RedisError, OSError) as error:
                _LOG.warning("hints interrupted", error=str(error))
                await asyncio.sleep(HINT_INTERVAL_S)

    async def _listen(self, pubsub: PubSub) -> None:
        """Returns when the connection no longer answers."""
        asked = False
        while True:
            message = await pubsub.get_message(timeout=_QUIET_S)
            if message is not None:
                asked = False
                if message["type"] == "message":
                    self._wake(str(message["data"]))
            elif asked:
                _LOG.warning("hints interrupted", error="the connection has gone silent")
                return
            else:
                await pubsub.ping()
                asked = True

    def _wake(self, name: str) -> None:
        event = self._changed.get(name)
        if event is not None:
            event.set()

    async def wait_hint(self, name: str, *, timeout_s: float = HINT_INTERVAL_S) -> None:
        """Return when `name` was hinted at, or after the timeout: then read the state."""
        event = self._changed.setdefault(name, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), timeout_s)
        event.clear()

    @patient
    async def hint(self, name: str) -> None:
        """Hurry the readers of `name` up."""
        await self._redis.publish(self._key("hints"), name)

    async def _compare_and_set(self, change: Callable[[Pipeline], Awaitable[T]], *keys: str) -> T:
        """Run `change` (it reads, calls `multi`, queues writes) until nobody touched `keys` meanwhile."""
        async with self._redis.pipeline(transaction=True) as pipe:
            while True:
                try:
                    await pipe.watch(*keys)
                    result = await change(pipe)
                    await pipe.execute()
                    return result
                except WatchError:
                    # Also what redis-py makes of a connection lost in between.
                    await asyncio.sleep(0)
