"""Runs: the queue, progress, event stream and open groups. Part of `shared.state`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import cast

from shared.errors import NotFound
from shared.state.link import HINT_INTERVAL_S, Link
from shared.state.records import RunRecord

_EVENTS_KEPT = 10_000


class Runs(Link):
    """Runs, as everyone sees them."""

    async def create_run(self, run: RunRecord) -> None:
        """Put a run into the queue."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(self._key("run", run.run_id), mapping=run.flat())
            pipe.zadd(self._key("runs"), {run.run_id: run.created_at})
            pipe.publish(self._key("hints"), "runs")
            await pipe.execute()

    async def run(self, run_id: str) -> RunRecord:
        """Raises NotFound."""
        fields = await cast(Awaitable[dict[str, str]], self._redis.hgetall(self._key("run", run_id)))
        if not fields:
            raise NotFound(f"no run {run_id!r}")
        return RunRecord.model_validate(fields)

    async def runs(self, *, limit: int = 1000) -> list[RunRecord]:
        """Newest first."""
        return await self._run_records(await self._redis.zrevrange(self._key("runs"), 0, limit - 1))

    async def _run_records(self, run_ids: Sequence[object]) -> list[RunRecord]:
        """In one round trip: loops ask for them every second."""
        if not run_ids:
            return []
        async with self._redis.pipeline(transaction=False) as pipe:
            for run_id in run_ids:
                pipe.hgetall(self._key("run", run_id))
            found = cast(list[dict[str, str]], await pipe.execute())
        return [RunRecord.model_validate(fields) for fields in found if fields]

    async def oldest_run(self, states: frozenset[str]) -> RunRecord | None:
        """The run that waits longest in one of these states."""
        records = await self._run_records(await self._redis.zrange(self._key("runs"), 0, -1))
        return next((record for record in records if record.state in states), None)

    async def update_run(self, run_id: str, **fields: str | float) -> None:
        """Change fields of a run and wake who watches it."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(self._key("run", run_id), mapping={k: str(v) for k, v in fields.items()})
            pipe.publish(self._key("hints"), f"run:{run_id}")
            await pipe.execute()

    async def append_run_event(self, run_id: str, payload: str) -> None:
        """Add one JSON document to a run's event stream."""
        await self._redis.xadd(
            self._key("run", run_id, "events"), {"data": payload}, maxlen=_EVENTS_KEPT, approximate=True
        )

    async def run_events(self, run_id: str, *, after: str = "0") -> AsyncIterator[tuple[str, str]]:
        """Ids and JSON documents of a run's events, those to come included."""
        key = self._key("run", run_id, "events")
        last = after
        while True:
            entries = await self._read_stream(key, last)
            if not entries:
                yield last, ""
            for last, fields in entries:
                yield last, fields["data"]

    async def _read_stream(self, key: str, last: str) -> list[tuple[str, dict[str, str]]]:
        """Entries after `last`, waiting for them for a moment."""
        reply = await self._redis.xread({key: last}, count=100, block=int(HINT_INTERVAL_S * 1000))
        if not reply:
            return []
        batches = reply.values() if isinstance(reply, dict) else [items for _, items in reply]
        return [entry for batch in batches for entry in _entries(batch)]

    async def set_open_groups(
        self, run_id: str, *, added: Sequence[str] = (), removed: Sequence[str] = ()
    ) -> None:
        """Record the change of a run's open groups."""
        key = self._key("run", run_id, "groups")
        async with self._redis.pipeline(transaction=True) as pipe:
            if added:
                pipe.sadd(key, *added)
            if removed:
                pipe.srem(key, *removed)
            await pipe.execute()

    async def open_groups(self, run_id: str) -> set[str]:
        """Groups issued and not closed."""
        return await cast(Awaitable[set[str]], self._redis.smembers(self._key("run", run_id, "groups")))


def _entries(batch: object) -> list[tuple[str, dict[str, str]]]:
    """Stream entries, flattened: RESP3 answers one nesting deeper than RESP2."""
    items = cast(list[object], batch)
    if items and isinstance(items[0], list) and items[0] and isinstance(items[0][0], list | tuple):
        items = items[0]
    return [(cast(str, i[0]), cast(dict[str, str], i[1])) for i in cast(list[list[object]], items)]
