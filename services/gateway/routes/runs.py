"""`/v1/runs`: submit, list, cancel, watch."""

from __future__ import annotations

import time
import uuid
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import JsonValue

from services.gateway import run_events
from services.gateway.bodies import invalid, prefixed, read_body
from services.gateway.claims import create_once
from services.gateway.documentation import KEY, json_body, problems, stream
from services.gateway.service import Gateway, GatewayState
from shared import recipe as recipes
from shared.api import TERMINAL, RunDetail, RunList, RunRequest
from shared.errors import Conflict, Invalid, NotFound
from shared.recipe import Recipe
from shared.state import RunRecord
from shared.summary import Summary

ROUTER = APIRouter(tags=["runs"], dependencies=[KEY])
IdempotencyKey = Annotated[
    str | None, Header(description="Any text of yours, at most 256 characters: a repeat makes nothing twice")
]

_EXAMPLE_RECIPE: dict[str, JsonValue] = {
    "name": "lake",
    "tasks": {"frozenlake": {"environment": "frozenlake", "max_turns": 16, "skill": 0.5}},
    "training": {"steps": 40, "learning_rate": 0.001},
}


@ROUTER.post(
    "/v1/runs",
    status_code=201,
    summary="Submit a recipe",
    responses=problems(409, 422, 503, 507, repeat=RunDetail),
    openapi_extra=json_body(
        RunRequest, {"by name": {"recipe": "quickstart"}, "as an object": {"recipe": _EXAMPLE_RECIPE}}
    ),
)
async def submit_run(
    request: Request, response: Response, gateway: GatewayState, idempotency_key: IdempotencyKey = None
) -> RunDetail:
    """Checks the whole recipe and queues a run; one run trains at a time, oldest first.

    A wrong key is named as you wrote it, `recipe.training.learning_rate`, and nothing starts.
    """
    body, raw = await read_body(request, RunRequest)
    recipe = _validated(gateway, body)
    gateway.check_room()

    async def make(run_id: str) -> RunRecord:
        record = RunRecord(
            run_id=run_id,
            state="queued",
            recipe=recipe.model_dump_json(),
            created_at=time.time(),
            steps=recipe.training.steps,
        )
        await gateway.context.state.create_run(record)
        return record

    record, made = await create_once(
        gateway.context.state,
        route="POST /v1/runs",
        key=idempotency_key,
        body=raw,
        made_id=f"{recipe.name}-{uuid.uuid4().hex[:6]}",
        find=gateway.context.state.run,
        make=make,
    )
    response.status_code = 201 if made else 200
    response.headers["Location"] = f"/v1/runs/{record.run_id}"
    return gateway.detail(record)


@ROUTER.get("/v1/runs", summary="All runs, newest first", responses=problems(422, 503))
async def list_runs(gateway: GatewayState, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> RunList:
    """Without their recipes."""
    found = await gateway.context.state.runs(limit=limit)
    return RunList(runs=[gateway.view(record) for record in found])


@ROUTER.get("/v1/runs/{run_id}", summary="One run", responses=problems(404, 503))
async def show_run(run_id: str, gateway: GatewayState) -> RunDetail:
    """State, progress, recipe and the folder of its results."""
    return gateway.detail(await gateway.context.state.run(run_id))


@ROUTER.post("/v1/runs/{run_id}/cancel", summary="Cancel a run", responses=problems(404, 409, 503))
async def cancel_run(run_id: str, gateway: GatewayState) -> RunDetail:
    """A queued run ends at once; a running one stops its rollouts and ends within seconds.

    409 when it has ended already.
    """
    state = gateway.context.state
    record = await state.run(run_id)
    if record.state in TERMINAL:
        raise Conflict(f"run {run_id} is {record.state} already")
    # The mark comes first: a trainer that picks the run up at this moment finds it.
    await state.abort_run(run_id, "cancelled")
    if record.state == "queued":
        await state.update_run(run_id, state="cancelled", ended_at=time.time())
    return gateway.detail(await state.run(run_id))


@ROUTER.get(
    "/v1/runs/{run_id}/summary",
    summary="The outcome of a run",
    response_model=Summary,
    responses=problems(404, 503),
)
async def show_summary(run_id: str, gateway: GatewayState) -> Response:
    """What `summary.json` holds; 404 until the run has ended."""
    record = await gateway.context.state.run(run_id)
    if not record.summary:
        raise NotFound(f"run {run_id} is {record.state}: it has no summary")
    return Response(record.summary, media_type="application/json")


@ROUTER.get(
    "/v1/runs/{run_id}/events",
    summary="Follow a run (server-sent events)",
    response_class=StreamingResponse,
    responses=stream(run_events.EXAMPLE) | problems(404, 422, 503),
)
async def follow_run(
    run_id: str,
    request: Request,
    gateway: GatewayState,
    last_event_id: Annotated[str | None, Header(description="Resume after this event")] = None,
) -> StreamingResponse:
    """From the first event, those to come included; ends when the run has.

    `step`, `phase`, `warm_start` and `evaluation` are the lines of `metrics.jsonl` and carry an id; `run`
    says that the run's state, phase or step changed. A client that lost the connection goes on with
    `Last-Event-ID`.
    """
    await gateway.context.state.run(run_id)
    after = last_event_id or "0"
    if not run_events.ID.fullmatch(after):
        raise invalid("Last-Event-ID", "is no id of an event of this stream")
    stream = run_events.follow(gateway, run_id, after=after, request=request)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


def _validated(gateway: Gateway, body: RunRequest) -> Recipe:
    if isinstance(body.recipe, str):
        return gateway.named_recipe(body.recipe)
    try:
        return recipes.validate(body.recipe)
    except Invalid as error:
        raise prefixed(error, "recipe") from error
