"""Who is alive: heartbeats of workers and of all processes. Part of `shared.state`."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import cast

from redis.asyncio.client import Pipeline

from shared.state.link import Link, multi
from shared.state.records import ProcessRecord, WorkerRecord


class Processes(Link):
    """Heartbeats, which expire by themselves."""

    async def report_worker(self, worker: WorkerRecord, *, ttl_s: float) -> None:
        """A worker's heartbeat; it counts as gone after `ttl_s` without another."""
        key = self._key("worker", worker.worker_id)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(key, worker.model_dump_json(), px=int(ttl_s * 1000))
            pipe.sadd(self._key("workers"), worker.worker_id)
            await pipe.execute()

    async def remove_worker(self, worker_id: str) -> None:
        """A worker says good-bye."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._key("worker", worker_id))
            pipe.srem(self._key("workers"), worker_id)
            pipe.publish(self._key("hints"), "workers")
            await pipe.execute()

    async def workers(self) -> list[WorkerRecord]:
        """Every live worker, by id."""
        return [WorkerRecord.model_validate_json(item) for item in await self._live("workers", "worker")]

    async def report_process(self, process: ProcessRecord, *, ttl_s: float) -> None:
        """A process's heartbeat."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(
                self._key("process", process.process_id), process.model_dump_json(), px=int(ttl_s * 1000)
            )
            pipe.sadd(self._key("processes"), process.process_id)
            await pipe.execute()

    async def processes(self) -> list[ProcessRecord]:
        """Every live process."""
        found = await self._live("processes", "process")
        return [ProcessRecord.model_validate_json(item) for item in found]

    async def _live(self, names: str, name: str) -> list[str]:
        """The records behind a set of ids; ids whose record has expired leave the set."""
        ids = sorted(await cast(Awaitable[set[str]], self._redis.smembers(self._key(names))))
        if not ids:
            return []
        found = await self._redis.mget([self._key(name, i) for i in ids])
        gone = [i for i, item in zip(ids, found, strict=True) if item is None]
        if gone:
            await self._forget_gone(names, name, gone)
        return [str(item) for item in found if item is not None]

    async def _forget_gone(self, names: str, name: str, gone: list[str]) -> None:
        """Take ids out of a set, unless they have come back meanwhile."""
        keys = [self._key(name, i) for i in gone]

        async def change(pipe: Pipeline) -> None:
            found = await cast(Awaitable[list[str | None]], pipe.mget(keys))
            multi(pipe)
            still = [i for i, item in zip(gone, found, strict=True) if item is None]
            if still:
                pipe.srem(self._key(names), *still)

        await self._compare_and_set(change, *keys)

    async def record_start(self, service: str) -> None:
        """A process of a service has started."""
        await self._redis.hincrby(self._key("starts"), service, 1)

    async def starts(self) -> dict[str, int]:
        """Service → processes started so far; the growth during a run counts its restarts."""
        found = await cast(Awaitable[dict[str, str]], self._redis.hgetall(self._key("starts")))
        return {service: int(count) for service, count in found.items()}
