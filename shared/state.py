"""Every Redis key, and nothing else touches Redis.

    policy:{name}            HASH    version, step, uri, digest, model_uri, published_at
    policy:{name}:versions   ZSET    version → score version; member is the published record
    worker:{id}              STRING  a worker's own report, with expiry;   workers    SET of ids
    process:{id}             STRING  any process's report, with expiry;    processes  SET of ids
    run:{id}                 HASH    state, recipe, progress, summary;     runs     ZSET by creation
    run:{id}:groups          SET     open groups, the admission budget
    run:{id}:events          STREAM  what `GET /v1/runs/{id}/events` sends
    task:{id}                HASH    a roll-out of given seeds outside any run
    task:{id}:results        HASH    trajectory id → result
    lease:{name}             STRING  owner, with expiry
    abort:{run}              STRING  reason
    idempotency:{key}        STRING  digest of the body and the id it made
    starts                   HASH    service → processes started

No Lua: single commands, or WATCH/MULTI. Pub/sub messages on the channel `hints` only hurry a reader up;
every loop reads the state at least once a second and acts on the difference.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Literal, cast

import redis.asyncio as redis
import structlog
from pydantic import BaseModel, ConfigDict
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, WatchError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.errors import Conflict, LeaseLost, NotFound, Unavailable
from shared.events import PolicyPublished, Role
from shared.settings import RedisSettings

_LOG = structlog.get_logger()
HINT_INTERVAL_S = 1.0
_EVENTS_KEPT = 10_000
_IDEMPOTENCY_S = 24 * 3600

RunState = Literal["queued", "running", "finished", "failed", "cancelled"]
TERMINAL: frozenset[str] = frozenset({"finished", "failed", "cancelled"})


class Record(BaseModel):
    """Root of what is kept in Redis; tolerant, as events are."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class WorkerRecord(Record):
    """What a generation worker says of itself, every second."""

    worker_id: str
    role: Role
    device_class: str
    gpu_model: str
    url: str
    partitions: list[int]
    """Of its topic, assigned to it now: where the router can reach it."""
    running: int
    waiting: int
    kv_usage: float
    policies: dict[str, int]
    """Policy reference → version live."""
    draining: bool = False
    updated_at: float


class ProcessRecord(Record):
    """What every process of every service says of itself, every second."""

    process_id: str
    service: str
    busy_s: float
    """Seconds of its stage's own work since it started."""
    counters: dict[str, float] = {}
    """Accumulated since it started; a reader adds up differences."""
    started_at: float
    updated_at: float


class RunRecord(Record):
    """One run as everyone sees it."""

    run_id: str
    state: RunState
    phase: str = ""
    recipe: str
    """JSON."""
    created_at: float
    started_at: float = 0.0
    ended_at: float = 0.0
    step: int = 0
    steps: int = 0
    version: int = 0
    error: str = ""
    summary: str = ""
    """JSON of `shared.summary.Summary`, once there is one."""


class TaskRecord(Record):
    """A roll-out of given seeds, asked for over REST."""

    task_id: str
    request: str
    """JSON."""
    trajectory_ids: list[str]
    created_at: float


class State:
    """One process's door to Redis. Methods raise Unavailable when Redis stays away."""

    def __init__(self, settings: RedisSettings) -> None:
        self._prefix = settings.prefix
        self._redis: redis.Redis = redis.Redis.from_url(
            settings.url,
            decode_responses=True,
            retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), 20),
            retry_on_error=[RedisConnectionError, RedisTimeoutError],
            socket_connect_timeout=2.0,
            health_check_interval=15,
        )
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
            return bool(await cast(Awaitable[bool], self._redis.ping()))
        except (RedisError, OSError):
            return False

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    # Hints

    async def follow_hints(self) -> None:
        """Loop. Consumes the channel `hints`; wakes `wait_hint`; woken by Redis. Survives its restart."""
        while True:
            try:
                async with self._redis.pubsub() as pubsub:
                    await pubsub.subscribe(self._key("hints"))
                    async for message in pubsub.listen():
                        if message["type"] == "message":
                            self._wake(str(message["data"]))
            except (RedisError, OSError) as error:
                _LOG.warning("hints interrupted", error=str(error))
                await asyncio.sleep(HINT_INTERVAL_S)

    def _wake(self, name: str) -> None:
        event = self._changed.get(name)
        if event is not None:
            event.set()

    async def wait_hint(self, name: str, *, timeout_s: float = HINT_INTERVAL_S) -> None:
        """Return when `name` was hinted at, or after the timeout: then read the state."""
        event = self._changed.setdefault(name, asyncio.Event())
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            pass
        event.clear()

    async def hint(self, name: str) -> None:
        """Hurry the readers of `name` up."""
        await self._redis.publish(self._key("hints"), name)

    # Policies

    async def publish_policy(
        self, record: PolicyPublished, *, model_uri: str, lease: str, owner: str
    ) -> None:
        """Make a version the newest, by compare-and-set.

        Raises LeaseLost when `owner` no longer holds `lease`, Conflict when the version does not grow.
        """
        key = self._key("policy", record.policy)
        lease_key = self._key("lease", lease)
        async with self._redis.pipeline(transaction=True) as pipe:
            while True:
                try:
                    await pipe.watch(key, lease_key)
                    holder = await cast(Awaitable[str | None], pipe.get(lease_key))
                    if holder != owner:
                        raise LeaseLost(f"{lease} is held by {holder or 'nobody'}, not by {owner}")
                    current = await cast(Awaitable[str | None], pipe.hget(key, "version"))
                    if current is not None and int(current) >= record.version:
                        raise Conflict(f"{record.policy}: version {record.version} is not above {current}")
                    pipe.multi()
                    fields = record.model_dump(mode="json") | {"model_uri": model_uri}
                    pipe.hset(key, mapping={k: str(v) for k, v in fields.items()})
                    pipe.zadd(f"{key}:versions", {record.model_dump_json(): record.version})
                    pipe.publish(self._key("hints"), "policies")
                    await pipe.execute()
                    return
                except WatchError:
                    continue

    async def policy(self, name: str) -> tuple[PolicyPublished, str] | None:
        """The newest version of a policy and its model's place in the store."""
        fields = await cast(Awaitable[dict[str, str]], self._redis.hgetall(self._key("policy", name)))
        if not fields:
            return None
        return PolicyPublished.model_validate(fields), fields.get("model_uri", "")

    async def policy_version(self, name: str, version: int) -> tuple[PolicyPublished, str]:
        """One kept version. Raises NotFound."""
        key = self._key("policy", name)
        found = await self._redis.zrangebyscore(f"{key}:versions", version, version)
        model_uri = await cast(Awaitable[str | None], self._redis.hget(key, "model_uri"))
        if not found or model_uri is None:
            raise NotFound(f"policy {name} has no version {version}")
        return PolicyPublished.model_validate_json(found[0]), model_uri

    async def policy_versions(self, name: str) -> list[int]:
        """Versions kept, ascending."""
        found = await self._redis.zrange(self._key("policy", name, "versions"), 0, -1)
        return [PolicyPublished.model_validate_json(item).version for item in found]

    async def forget_policy_version(self, name: str, version: int) -> None:
        """A version's weights are no longer in the store."""
        await self._redis.zremrangebyscore(self._key("policy", name, "versions"), version, version)

    # Workers

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
            await cast(Awaitable[int], self._redis.srem(self._key(names), *gone))
        return [item for item in found if item is not None]

    async def record_start(self, service: str) -> None:
        """A process of a service has started."""
        await cast(Awaitable[int], self._redis.hincrby(self._key("starts"), service, 1))

    async def starts(self) -> dict[str, int]:
        """Service → processes started so far; the growth during a run counts its restarts."""
        found = await cast(Awaitable[dict[str, str]], self._redis.hgetall(self._key("starts")))
        return {service: int(count) for service, count in found.items()}

    # Runs

    async def create_run(self, run: RunRecord) -> None:
        """Put a run into the queue."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(self._key("run", run.run_id), mapping=_flat(run))
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
        ids = await self._redis.zrevrange(self._key("runs"), 0, limit - 1)
        return [await self.run(run_id) for run_id in ids]

    async def oldest_run(self, states: frozenset[str]) -> RunRecord | None:
        """The run that waits longest in one of these states."""
        for run_id in await self._redis.zrange(self._key("runs"), 0, -1):
            record = await self.run(run_id)
            if record.state in states:
                return record
        return None

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
            reply = await self._redis.xread({key: last}, count=100, block=int(HINT_INTERVAL_S * 1000))
            if not reply:
                yield last, ""
                continue
            batches = reply.values() if isinstance(reply, dict) else [items for _, items in reply]
            for batch in batches:
                for last, fields in _entries(batch):
                    yield last, fields["data"]

    async def set_open_groups(self, run_id: str, *, added: list[str] = [], removed: list[str] = []) -> None:  # noqa: B006
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

    # Leases and aborts

    async def acquire_lease(self, name: str, owner: str, *, ttl_s: float) -> bool:
        """Whether `owner` holds the lease now (renews it where it already did)."""
        key = self._key("lease", name)
        if await self._redis.set(key, owner, nx=True, px=int(ttl_s * 1000)):
            return True
        async with self._redis.pipeline(transaction=True) as pipe:
            try:
                await pipe.watch(key)
                if await cast(Awaitable[str | None], pipe.get(key)) != owner:
                    return False
                pipe.multi()
                pipe.pexpire(key, int(ttl_s * 1000))
                await pipe.execute()
                return True
            except WatchError:
                return False

    async def release_lease(self, name: str, owner: str) -> None:
        """Give a lease back; nothing happens where another holds it."""
        key = self._key("lease", name)
        async with self._redis.pipeline(transaction=True) as pipe:
            try:
                await pipe.watch(key)
                if await cast(Awaitable[str | None], pipe.get(key)) == owner:
                    pipe.multi()
                    pipe.delete(key)
                    await pipe.execute()
            except WatchError:
                pass

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
        return {run_id: reason for run_id, reason in zip(run_ids, found, strict=True) if reason is not None}

    # Tasks and idempotency

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
        await cast(Awaitable[int], self._redis.hsetnx(key, trajectory_id, result))

    async def claim_idempotency(self, key: str, body: bytes, made: str) -> str:
        """The id that this key stands for: `made`, or what an earlier request with the same body made.

        Raises Conflict where the key was used with another body.
        """
        digest = hashlib.sha256(body).hexdigest()
        name = self._key("idempotency", hashlib.sha256(key.encode()).hexdigest())
        if await self._redis.set(name, f"{digest} {made}", nx=True, ex=_IDEMPOTENCY_S):
            return made
        known, _, existing = str(await self._redis.get(name)).partition(" ")
        if known != digest:
            raise Conflict(f"Idempotency-Key {key!r} was used with another body")
        return existing


def _flat(record: Record) -> dict[str, str]:
    return {key: str(value) for key, value in record.model_dump(mode="json").items()}


def _entries(batch: object) -> list[tuple[str, dict[str, str]]]:
    """Stream entries, flattened: RESP3 answers one nesting deeper than RESP2."""
    items = cast(list[object], batch)
    if items and isinstance(items[0], list) and items[0] and isinstance(items[0][0], list | tuple):
        items = items[0]
    return [(cast(str, i[0]), cast(dict[str, str], i[1])) for i in cast(list[list[object]], items)]
