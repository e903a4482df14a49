"""`generation`: samples. One process is one worker of one GPU type and one role, following the policies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from services.generation.following import PolicyFollower
from services.generation.worker import Worker
from shared import registry, service
from shared.bus import Subscription
from shared.service import Context
from shared.settings import Settings
from shared.state import WorkerRecord
from shared.topics import worker_group, worker_topic

_HEARTBEAT_S = 1.0
_HEARTBEAT_TTL_S = 3.0
_MAX_UNACKED = 4096
_ABORTS_LOOK_BACK_S = 10.0


def create_app(settings: Settings) -> FastAPI:
    """The generation service as an app. Raises Invalid for an engine that it cannot serve."""
    # Imported before the loop runs: seconds in which the process would answer nothing, not even SIGTERM.
    registry.load("engine", settings.generation.engine, field="GENERATION__ENGINE")
    return service.build("generation", settings, lifespan=_lifespan)


@asynccontextmanager
async def _lifespan(context: Context) -> AsyncIterator[Worker]:
    settings = context.settings.generation
    follower = PolicyFollower(context.state, context.store, settings)
    worker = Worker(
        context.bus.publisher,
        worker_id=context.settings.process_id,
        role=settings.role,
        device_class=settings.device_class,
        max_policies=settings.max_policies,
        want=follower.want,
    )
    context.supervisor.start_thread("engine", worker.run, end=worker.stop)
    context.supervisor.start("follow policies", lambda: follower.follow(worker))
    subscription = context.bus.subscribe(
        [worker_topic(settings.role, settings.device_class)],
        group=worker_group(settings.role, settings.device_class),
        handler=worker.accept,
        max_unacked=_MAX_UNACKED,
    )
    context.busy_s = lambda: worker.busy_s
    context.status = lambda: {
        "role": settings.role,
        "device_class": settings.device_class,
        "policies": dict(worker.versions()),
        "load_failures": worker.load_failures,
        "turns_failed": dict(worker.failures),
        "kv_leases": worker.kv_leases,
        "kv_recomputed": dict(worker.recomputed),
    }
    context.supervisor.start("heartbeat", lambda: _heartbeat(context, worker, follower, subscription))
    context.supervisor.start("watch aborts", lambda: _watch_aborts(context, worker))
    yield worker
    await context.state.remove_worker(context.settings.process_id)


async def _heartbeat(
    context: Context, worker: Worker, follower: PolicyFollower, subscription: Subscription
) -> None:
    """Loop. Produces this worker's record in Redis; woken every second and by a new assignment."""
    settings = context.settings.generation
    announced: list[int] = []
    while True:
        running, waiting, kv_usage = worker.load_numbers()
        partitions = subscription.partitions
        record = WorkerRecord(
            worker_id=context.settings.process_id,
            role=settings.role,
            device_class=settings.device_class,
            gpu_model=settings.gpu_model or settings.device,
            url=f"http://{context.settings.http.host}:{context.settings.http.port}",
            partitions=partitions,
            running=running,
            waiting=waiting,
            kv_usage=kv_usage,
            policies=worker.versions(),
            tasks=dict(worker.profiles.snapshot()),
            kv_leases=worker.kv_leases,
            draining=context.supervisor.stopping.is_set(),
            updated_at=time.time(),
        )
        await context.state.report_worker(record, ttl_s=_HEARTBEAT_TTL_S)
        context.counters.update(
            pull_s=follower.pull_s,
            exposed_s=worker.exposed_s,
            tokens_sampled=float(worker.tokens_sampled),
            weight_load_failed=float(worker.load_failures),
            **{f"turns_failed_{code}": float(count) for code, count in worker.failures.items()},
            **{f"kv_recomputed_{reason}": float(count) for reason, count in worker.recomputed.items()},
        )
        if partitions != announced:
            announced = partitions
            await context.state.hint("workers")
        await asyncio.sleep(_HEARTBEAT_S if partitions else _HEARTBEAT_S / 5)


async def _watch_aborts(context: Context, worker: Worker) -> None:
    """Loop. Consumes aborts of runs and of single trajectories; produces engine aborts; woken by the hint
    `aborts` or every second."""
    read_to = time.time() - _ABORTS_LOOK_BACK_S
    while True:
        aborted = await context.state.aborted(sorted(worker.run_ids()))
        if aborted:
            worker.abort_runs(frozenset(aborted))
        attempts = await context.state.aborted_turns(read_to)
        if attempts:
            worker.abort_attempts(attempts)
            # Clocks of askers differ: what one writes a little late must not be missed.
            read_to = max(read_to, max(attempts.values()) - _ABORTS_LOOK_BACK_S)
        await context.state.wait_hint("aborts")
