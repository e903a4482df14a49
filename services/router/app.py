"""`router`: assigns one turn's prefill and decode to a GPU-typed consumer group; lets outside agents in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from services.router import report
from services.router.dispatch import Dispatch
from services.router.serving import Serving
from services.router.sessions import routes
from services.router.sessions.talk import Sessions
from shared import registry, service
from shared.service import Context
from shared.settings import Settings
from shared.topics import TURNS


def create_app(settings: Settings) -> FastAPI:
    """The router as an app."""
    registry.load("routing", settings.router.strategy, field="ROUTER__STRATEGY")
    return service.build("router", settings, lifespan=_lifespan, routers=[report.router, routes.ROUTER])


@asynccontextmanager
async def _lifespan(context: Context) -> AsyncIterator[Serving]:
    settings = context.settings.router
    strategy = registry.load("routing", settings.strategy, field="ROUTER__STRATEGY")()
    dispatch = Dispatch(context.bus, context.state, settings, strategy)
    context.status = dispatch.status
    context.supervisor.start("watch workers", dispatch.watch_workers)
    context.bus.subscribe([TURNS], group="router", handler=dispatch.handle, max_unacked=8192)
    sessions = Sessions(context, settings)
    context.supervisor.start("follow policies", sessions.follow)
    context.supervisor.start("end sessions", sessions.sweep)
    yield Serving(dispatch, sessions)
    await sessions.stop()
