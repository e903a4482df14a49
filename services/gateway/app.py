"""The front door: REST for runs, tasks, trajectories and workers.

Run by `services.host`. Knows no other service: runs and tasks are written to Redis and Kafka, where
training and environment find them, and read back from there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

from services.gateway.routes import runs, tasks, trajectories, workers
from services.gateway.service import Gateway
from services.gateway.task_results import TaskResults
from shared import service
from shared.service import Context
from shared.settings import Settings


@asynccontextmanager
async def _lifespan(context: Context) -> AsyncIterator[Gateway]:
    gateway = Gateway(context)
    results = TaskResults(context.state, folder_of=gateway.task_folder)
    context.supervisor.start("task results", results.run)
    results.subscribe(context.bus)
    context.status = lambda: {"task_results_recorded": results.recorded}
    yield gateway


def create_app(settings: Settings) -> FastAPI:
    """The gateway."""
    app = service.build(
        "gateway",
        settings,
        lifespan=_lifespan,
        routers=[runs.ROUTER, tasks.ROUTER, trajectories.ROUTER, workers.ROUTER],
        title="RollArt",
        make=FastAPIOffline,
    )
    app.description = "Train language-model agents: submit recipes, watch runs, roll out tasks."
    return app
