"""Sessions of outside agents: which are open, their turns, how they ended. Part of `shared.state`.

session:{id}                    the record, JSON
session:{id}:{attempt}:turns    hash: turn number → JSON
session:{id}:{attempt}:count    turns asked so far
session:{id}:{attempt}:next     hash: turn → the turn that continues it
sessions                        set of sessions that are not ended
sessions:activity               sorted set: session → when it last did something
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterable
from typing import cast

from redis.asyncio.client import Pipeline

from shared.errors import CapacityReached, Conflict, NotFound
from shared.state.link import Link, multi
from shared.state.records import SessionOutcome, SessionRecord

_KEPT_S = 3600
"""What is over can still be read so long."""


class Sessions(Link):
    """Sessions and their turns."""

    async def open_session(self, record: SessionRecord, *, limit: int) -> SessionRecord:
        """Open one; one that is open already under this attempt is returned as it is.

        Raises CapacityReached where `limit` are open, Conflict where a later attempt has begun, an earlier
        one is still open, or this one has ended.
        """
        key, opened = self._key("session", record.session_id), self._key("sessions")

        async def change(pipe: Pipeline) -> SessionRecord:
            raw = await cast(Awaitable[str | None], pipe.get(key))
            known = SessionRecord.model_validate_json(raw) if raw is not None else None
            if known is not None:
                if known.attempt == record.attempt and known.state == "open":
                    multi(pipe)
                    return known
                if known.attempt > record.attempt:
                    raise _replaced(record.session_id, record.attempt, known.attempt)
                if known.state != "ended" or known.attempt == record.attempt:
                    raise _over(known)
            if await pipe.scard(opened) >= limit:
                raise CapacityReached(f"{limit} sessions are open, ROUTER__MAX_SESSIONS allows no more")
            multi(pipe)
            pipe.set(key, record.model_dump_json())
            pipe.sadd(opened, record.session_id)
            pipe.zadd(self._key("sessions", "activity"), {record.session_id: time.time()})
            return record

        return await self._compare_and_set(change, key, opened)

    async def session(self, session_id: str) -> SessionRecord | None:
        """What is known of a session."""
        raw = cast(str | None, await self._redis.get(self._key("session", session_id)))
        return SessionRecord.model_validate_json(raw) if raw is not None else None

    async def decide_session(
        self, session_id: str, attempt: int | None, outcome: SessionOutcome
    ) -> SessionRecord:
        """Say how a session ends: from here on it takes no turns. The same outcome again is fine.

        Raises NotFound, or Conflict where another outcome was decided or a later attempt has begun.
        """
        key = self._key("session", session_id)

        async def change(pipe: Pipeline) -> SessionRecord:
            record = _present(session_id, attempt, await cast(Awaitable[str | None], pipe.get(key)))
            if record.state != "open":
                if record.outcome != outcome:
                    raise _over(record)
                multi(pipe)
                return record
            decided = record.model_copy(update={"state": "ending", "outcome": outcome})
            multi(pipe)
            pipe.set(key, decided.model_dump_json())
            return decided

        return await self._compare_and_set(change, key)

    async def close_session(self, record: SessionRecord, trajectory_ids: list[str]) -> SessionRecord:
        """What it has become is published."""
        done = record.model_copy(update={"state": "ended", "trajectory_ids": trajectory_ids})
        key = self._key("session", record.session_id)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(key, done.model_dump_json(), ex=_KEPT_S)
            pipe.srem(self._key("sessions"), record.session_id)
            pipe.zrem(self._key("sessions", "activity"), record.session_id)
            for part in ("turns", "count", "next"):
                pipe.expire(f"{key}:{record.attempt}:{part}", _KEPT_S)
            await pipe.execute()
        return done

    async def count_sessions(self) -> int:
        """Sessions that are not ended."""
        return int(await self._redis.scard(self._key("sessions")))

    async def quiet_sessions(self, before: float) -> list[tuple[str, float]]:
        """Sessions that have done nothing since, and when they last did."""
        found = await self._redis.zrangebyscore(
            self._key("sessions", "activity"), "-inf", before, withscores=True
        )
        return [(str(name), float(at)) for name, at in cast(list[tuple[str, float]], found)]

    async def next_session_turn(self, record: SessionRecord, *, parent: int, alone: bool) -> tuple[int, bool]:
        """A number for a turn, and whether it is the first to continue `parent` (-1: the beginning).

        `alone`: it continues nothing, whatever the parent."""
        key = self._key("session", record.session_id, record.attempt)
        number = int(await self._redis.incr(f"{key}:count")) - 1
        activity = self._key("sessions", "activity")
        await self._redis.zadd(activity, {record.session_id: time.time()}, xx=True)
        if alone:
            return number, False
        first = await self._redis.hsetnx(f"{key}:next", str(parent), str(number))
        return number, bool(first)

    async def give_up_session_turn(self, record: SessionRecord, *, parent: int) -> None:
        """The turn that was to continue `parent` did not come about."""
        key = self._key("session", record.session_id, record.attempt)
        await self._redis.hdel(f"{key}:next", str(parent))

    async def add_session_turn(self, record: SessionRecord, number: int, turn: str) -> None:
        """Keep a turn. Raises Conflict where the session has ended meanwhile."""
        key = self._key("session", record.session_id)
        turns = f"{key}:{record.attempt}:turns"

        async def change(pipe: Pipeline) -> None:
            raw = await cast(Awaitable[str | None], pipe.get(key))
            known = _present(record.session_id, record.attempt, raw)
            if known.state != "open":
                raise _over(known)
            multi(pipe)
            pipe.hset(turns, str(number), turn)
            pipe.zadd(self._key("sessions", "activity"), {record.session_id: time.time()}, xx=True)

        await self._compare_and_set(change, key)

    async def session_turns(self, record: SessionRecord, known: Iterable[int] = ()) -> dict[int, str]:
        """Turns kept so far, those known already left out: number → JSON."""
        key = self._key("session", record.session_id, record.attempt, "turns")
        there = {int(name) for name in await cast(Awaitable[list[str]], self._redis.hkeys(key))}
        wanted = sorted(there - set(known))
        if not wanted:
            return {}
        found = await cast(Awaitable[list[str | None]], self._redis.hmget(key, [str(n) for n in wanted]))
        return {number: raw for number, raw in zip(wanted, found, strict=True) if raw is not None}


def _present(session_id: str, attempt: int | None, raw: str | None) -> SessionRecord:
    if raw is None:
        raise NotFound(f"no session {session_id!r}")
    record = SessionRecord.model_validate_json(raw)
    if attempt is not None and attempt < record.attempt:
        raise _replaced(session_id, attempt, record.attempt)
    if attempt is not None and attempt > record.attempt:
        raise NotFound(f"session {session_id!r} has no attempt {attempt} yet")
    return record


def _replaced(session_id: str, attempt: int, by: int) -> Conflict:
    return Conflict(f"attempt {attempt} of session {session_id!r} was replaced by attempt {by}")


def _over(record: SessionRecord) -> Conflict:
    name = f"session {record.session_id!r}, attempt {record.attempt},"
    if record.outcome is None:
        return Conflict(f"{name} is open still")
    reward = "" if record.outcome.reward is None else f" with reward {record.outcome.reward:g}"
    return Conflict(f"{name} has ended as {record.outcome.status.value}{reward}")
