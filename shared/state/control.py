"""Leases, aborts, tasks and idempotency keys. Part of `shared.state`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable
from typing import cast

from redis.asyncio.client import Pipeline

from shared.errors import Conflict, NotFound
from shared.state.link import Link, multi
from shared.state.records import TaskRecord

_IDEMPOTENCY_S = 24 * 3600
_ABORTS_KEPT_S = 600.0
"""No try of a turn lives longer unseen: a worker reads what is new every second."""


class Control(Link):
    """What stops two from doing the same, and what stops all."""

    async def acquire_lease(self, name: str, owner: str, *, ttl_s: float) -> bool:
        """Whether `owner` holds the lease now (renews it where it already did)."""
        key = self._key("lease", name)
        ttl_ms = int(ttl_s * 1000)
        if await self._redis.set(key, owner, nx=True, px=ttl_ms):
            return True

        async def change(pipe: Pipeline) -> bool:
            holder = await cast(Awaitable[str | None], pipe.get(key))
            multi(pipe)
            if holder in (owner, None):
                pipe.set(key, owner, px=ttl_ms)
            return holder in (owner, None)

        return await self._compare_and_set(change, key)

    async def release_lease(self, name: str, owner: str) -> None:
        """Give a lease back; nothing happens where another holds it."""
        key = self._key("lease", name)

        async def change(pipe: Pipeline) -> None:
            holder = await cast(Awaitable[str | None], pipe.get(key))
            multi(pipe)
            if holder == owner:
                pipe.delete(key)

        await self._compare_and_set(change, key)

    async def lease_owner(self, name: str) -> str | None:
        """Who holds a lease."""
        return cast(str | None, await self._redis.get(self._key("lease", name)))

    async def abort_run(self, run_id: str, reason: str) -> None:
        """Ask everyone to drop a run's or a task's work."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(self._key("abort", run_id), reason, ex=_IDEMPOTENCY_S)
            pipe.publish(self._key("hints"), "aborts")
            pipe.publish(self._key("hints"), f"run:{run_id}")
            await pipe.execute()

    async def aborted(self, run_ids: list[str]) -> dict[str, str]:
        """Which of these are aborted, and why."""
        if not run_ids:
            return {}
        found = await self._redis.mget([self._key("abort", run_id) for run_id in run_ids])
        return {run: str(why) for run, why in zip(run_ids, found, strict=True) if why is not None}

    async def abort_turns(self, trajectory_id: str, attempt: int) -> None:
        """Ask workers to drop what they have in hand of one attempt at a trajectory."""
        now = time.time()
        key = self._key("aborts")
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zadd(key, {f"{trajectory_id}/{attempt}": now})
            pipe.zremrangebyscore(key, "-inf", now - _ABORTS_KEPT_S)
            pipe.expire(key, int(2 * _ABORTS_KEPT_S))
            pipe.publish(self._key("hints"), "aborts")
            await pipe.execute()

    async def aborted_turns(self, since: float) -> dict[str, float]:
        """`{trajectory_id}/{attempt}` → when its turns were aborted, of all that were since then."""
        found = await self._redis.zrangebyscore(self._key("aborts"), since, "+inf", withscores=True)
        pairs = cast(list[tuple[str, float]], found)
        return {name: float(score) for name, score in pairs}

    async def create_task(self, task: TaskRecord) -> None:
        """Remember a task that was asked for."""
        await self._redis.set(self._key("task", task.task_id), task.model_dump_json())

    async def task(self, task_id: str) -> tuple[TaskRecord, dict[str, str]]:
        """A task and its results so far: trajectory id → JSON. Raises NotFound."""
        raw = await self._redis.get(self._key("task", task_id))
        if raw is None:
            raise NotFound(f"no task {task_id!r}")
        key = self._key("task", task_id, "results")
        results = await cast(Awaitable[dict[str, str]], self._redis.hgetall(key))
        return TaskRecord.model_validate_json(raw), results

    async def add_task_result(self, task_id: str, trajectory_id: str, result: str) -> None:
        """Record one trajectory's result; the first one counts."""
        key = self._key("task", task_id, "results")
        await self._redis.hsetnx(key, trajectory_id, result)

    async def claim_idempotency(self, key: str, body: bytes, made: str) -> str:
        """The id that this key stands for: `made`, or what an earlier request with the same body made.

        Raises Conflict where the key was used with another body.
        """
        digest = hashlib.sha256(body).hexdigest()
        name = self._key("idempotency", hashlib.sha256(key.encode()).hexdigest())
        found: str | None = None
        while found is None:
            if await self._redis.set(name, f"{digest} {made}", nx=True, ex=_IDEMPOTENCY_S):
                return made
            found = cast(str | None, await self._redis.get(name))
        known, _, existing = found.partition(" ")
        if known != digest:
            raise Conflict(f"Idempotency-Key {key!r} was used with another body")
        return existing
