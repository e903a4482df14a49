"""What every service is: a FastAPI app with health, metrics, status, keys, and loops under a supervisor.

`create_app(settings)` of each service calls `build` with its own lifespan, an async context manager that
starts named loops on the context and yields a typed state. Handlers find it as `request.state.service`.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, TypedDict, TypeVar

import structlog
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, JsonValue
from starlette.exceptions import HTTPException

from shared import telemetry
from shared.bus import Bus
from shared.errors import FieldProblem, Invalid, NotFound, Problem, ProblemDetail, RollArtError, Unauthorized
from shared.settings import Settings
from shared.state import ProcessRecord, State
from shared.store import ObjectStore, open_store
from shared.supervisor import Supervisor

_LOG = structlog.get_logger()
_MAX_BODY_BYTES = 4_000_000
S = TypeVar("S")


@dataclass
class Context:
    """What a service's lifespan is given."""

    name: str
    settings: Settings
    supervisor: Supervisor
    state: State
    bus: Bus
    store: ObjectStore
    started_at: float = field(default_factory=time.time)
    busy_s: Callable[[], float] = time.process_time
    """Seconds of the stage's own work so far; CPU time of the process unless the lifespan says otherwise."""
    counters: dict[str, float] = field(default_factory=dict)
    """Accumulated numbers that a run's summary adds up over processes."""
    status: Callable[[], dict[str, JsonValue]] = dict
    """What `/v1/status` adds, for people; a lifespan may replace it."""

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0.0) + amount

    async def report(self) -> None:
        """Loop. Produces this process's heartbeat in Redis; woken every second."""
        while True:
            counters = dict(self.counters)
            if self.bus.events_lost:
                counters["events_lost"] = float(self.bus.events_lost)
            record = ProcessRecord(
                process_id=self.settings.process_id,
                service=self.name,
                busy_s=self.busy_s(),
                counters=counters,
                started_at=self.started_at,
                updated_at=time.time(),
            )
            await self.state.report_process(record, ttl_s=5.0)
            await asyncio.sleep(1.0)


class ServiceState(TypedDict):
    """The lifespan state of every app."""

    context: Context
    service: object


class Status(BaseModel):
    """`GET /v1/status`."""

    service: str
    process: str
    ready: bool
    uptime_s: float
    loops: dict[str, str]
    detail: dict[str, JsonValue]


Lifespan = Callable[[Context], AbstractAsyncContextManager[object]]


def build(
    name: str,
    settings: Settings,
    *,
    lifespan: Lifespan,
    routers: Sequence[APIRouter] = (),
    title: str = "",
    make: Callable[..., FastAPI] = FastAPI,
) -> FastAPI:
    """The app of a service; `make` builds it, where it is not a plain FastAPI."""
    supervisor = Supervisor(stop_s=settings.http.grace_s / 2)

    @asynccontextmanager
    async def run(app: FastAPI) -> AsyncIterator[ServiceState]:
        telemetry.configure_logs(settings.telemetry, service=name)
        store = open_store(settings.store_uri)
        state = State(settings.redis)
        await state.connect()
        await state.record_start(name)
        bus = Bus(settings.kafka, client_id=settings.process_id, store=store, supervisor=supervisor)
        context = Context(name, settings, supervisor, state, bus, store)
        supervisor.start("hints", state.follow_hints)
        supervisor.start("report", context.report)
        app.state.context = context
        try:
            async with lifespan(context) as service:
                app.state.started = True
                _LOG.info("service started", process=settings.process_id)
                yield {"context": context, "service": service}
                app.state.started = False
                await supervisor.stop()
        finally:
            await supervisor.stop()
            await state.close()
            _LOG.info("service stopped", process=settings.process_id)

    app = make(title=title or f"RollArt {name}", version="0.1.0", lifespan=run)
    app.state.supervisor = supervisor
    app.state.started = False
    app.include_router(_HEALTH)
    app.include_router(_INTERNALS, dependencies=[Depends(require_key)])
    for router in routers:
        app.include_router(router, dependencies=[Depends(require_key)])
    app.state.keys = settings.keys
    _install_error_handlers(app)
    return app


_HEALTH = APIRouter(tags=["health"])
_INTERNALS = APIRouter(tags=["service"])


@_HEALTH.get("/healthz", summary="Alive")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "alive"}


@_HEALTH.get("/readyz", summary="Ready: loops run and dependencies answer")
async def readyz(request: Request, response: Response) -> dict[str, JsonValue]:
    """503 while starting, when a loop has died, while stopping, or when Redis does not answer."""
    app = request.app
    supervisor: Supervisor = app.state.supervisor
    redis = app.state.started and await app.state.context.state.ping()
    ready = bool(app.state.started and supervisor.ready and redis)
    response.status_code = 200 if ready else 503
    loops: dict[str, JsonValue] = {name: str(status) for name, status in supervisor.loops.items()}
    return {"ready": ready, "redis": bool(redis), "loops": loops}


@_INTERNALS.get("/metrics", summary="Prometheus metrics")
async def metrics() -> Response:
    """Every metric of this process."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


@_INTERNALS.get("/v1/status", summary="What this process is doing, for people")
async def status(request: Request) -> Status:
    """Loops, uptime, and what the service itself says."""
    context: Context = request.state.context
    return Status(
        service=context.name,
        process=context.settings.process_id,
        ready=context.supervisor.ready,
        uptime_s=time.time() - context.started_at,
        loops={name: str(status) for name, status in context.supervisor.loops.items()},
        detail=context.status() | {"busy_s": round(context.busy_s(), 3)},
    )


_BEARER = HTTPBearer(auto_error=False, description="One of `ROLLART_API_KEYS`.")


async def require_key(
    request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]
) -> None:
    """Dependency: a bearer key of ours, or Unauthorized."""
    keys: frozenset[str] = request.app.state.keys
    if given is not None and any(
        hmac.compare_digest(key.encode(), given.credentials.strip().encode()) for key in keys
    ):
        return
    raise Unauthorized("send Authorization: Bearer <key> with one of ROLLART_API_KEYS")


async def read_json_body(request: Request) -> bytes:
    """The body, bounded. Raises Invalid naming the limit."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise Invalid(f"the body is larger than {_MAX_BODY_BYTES} bytes")
    return body


def problem_response(error: RollArtError) -> JSONResponse:
    """An error as a response; the JSON is valid whatever the text holds."""
    body = error.to_problem().model_dump()
    headers = {"Retry-After": "1"} if error.retryable else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(_encodable(body), status_code=error.status, headers=headers)


def _encodable(value: JsonValue) -> JsonValue:
    """Lone surrogates cannot be encoded; show them escaped."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {str(_encodable(k)): _encodable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    return value


def _install_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RollArtError)
    async def ours(request: Request, error: RollArtError) -> JSONResponse:
        return problem_response(error)

    @app.exception_handler(RequestValidationError)
    async def validation(request: Request, error: RequestValidationError) -> JSONResponse:
        fields = [
            FieldProblem(field=".".join(str(p) for p in item["loc"]), message=str(item["msg"]))
            for item in error.errors()
        ]
        return problem_response(Invalid("; ".join(f"{f.field}: {f.message}" for f in fields), fields=fields))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404:
            return problem_response(NotFound(f"no route {request.method} {request.url.path}"))
        detail = ProblemDetail(code=f"http_{error.status_code}", message=str(error.detail))
        return JSONResponse(
            Problem(error=detail).model_dump(), status_code=error.status_code, headers=error.headers
        )

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        _LOG.error("unexpected error", path=request.url.path, exc_info=error)
        return problem_response(RollArtError("internal error; the service's log has the details"))
