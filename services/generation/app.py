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
from shared.errors import FieldProblem, Invalid
from shared.service import Context
from shared.settings import Settings
from shared.state import WorkerRecord
from shared.topics import worker_group, worker_topic

_HEARTBEAT_S = 1.0
_HEARTBEAT_TTL_S = 3.0
_MAX_UNACKED = 4096


def create_app(settings: Settings) -> FastAPI:
    """The generation service as an app. Raises Invalid for a role or an engine that it cannot serve."""
    generation = settings.generation
    if generation.role != "both":
        message = f"role {generation.role!r} needs prefill/decode hand-over; set GENERATION__ROLE=both"
        raise Invalid(message, fields=[FieldProblem(field="GENERATION__ROLE", message=message)])
    # Imported before the loop runs: seconds in which the process would answer nothing, not even SIGTERM.
    registry.load("engine", generation.engine, field="GENERATION__ENGINE")
    return service.build("generation", settings, lifespan=_lifespan)


@asynccontextmanager
async def _lifespan(context: Context) -> AsyncIterator[Worker]:
    settings = context.settings.generation
    follower = PolicyFollower(context.state, context.store, settings)
    worker = Worker(
        context.bus.publisher,
        worker_id=context.settings.process_id,
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
        )
        if partitions != announced:
            announced = partitions
            await context.state.hint("workers")
        await asyncio.sleep(_HEARTBEAT_S if partitions else _HEARTBEAT_S / 5)


async def _watch_aborts(context: Context, worker: Worker) -> None:
    """Loop. Consumes aborts of runs; produces engine aborts; woken by the hint `aborts` or every second."""
    while True:
        aborted = await context.state.aborted(sorted(worker.run_ids()))
        if aborted:
            worker.abort_runs(frozenset(aborted))
        await context.state.wait_hint("aborts")
