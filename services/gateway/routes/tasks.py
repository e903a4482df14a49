"""`/v1/tasks`: roll out given seeds, for evaluation or collection; never trained."""

from __future__ import annotations

import time
import uuid
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from services.gateway import tasks
from services.gateway.bodies import read_body
from services.gateway.claims import create_once
from services.gateway.documentation import KEY, json_body, problems
from services.gateway.routes.runs import IdempotencyKey
from services.gateway.service import GatewayState
from shared.api import Task, TaskRequest

ROUTER = APIRouter(tags=["tasks"], dependencies=[KEY])


@ROUTER.post(
    "/v1/tasks",
    status_code=201,
    summary="Roll out given seeds",
    responses=problems(404, 409, 422, 503, 507, repeat=Task),
    openapi_extra=json_body(
        TaskRequest,
        {
            "a run's task, greedy": {"task": "frozenlake", "seeds": [1, 2, 3], "temperature": 0.0},
            "a pinned version": {
                "task": "frozenlake",
                "policy": "lake-3f2a91@40",
                "seeds": [7],
                "members": 8,
            },
            "scripted play": {
                "environment": "frozenlake",
                "actor": "scripted",
                "skill": 0.9,
                "seeds": [1, 2],
            },
        },
    ),
)
async def submit_task(
    request: Request, response: Response, gateway: GatewayState, idempotency_key: IdempotencyKey = None
) -> Task:
    """Plays every seed with a policy (default: the newest run's) or by script.

    404 for an unknown run or policy, 422 for an unknown task, environment or number out of range.
    """
    context = gateway.context
    body, raw = await read_body(request, TaskRequest)
    resolved = await tasks.resolve(context.state, body)
    gateway.check_room()

    async def find(task_id: str) -> Task:
        return tasks.view(*await context.state.task(task_id), now=time.time())

    async def make(task_id: str) -> Task:
        record = await tasks.start(context.state, context.bus, task_id, resolved)
        return tasks.view(record, {}, now=time.time())

    task, made = await create_once(
        context.state,
        route="POST /v1/tasks",
        key=idempotency_key,
        body=raw,
        made_id=f"task-{uuid.uuid4().hex[:8]}",
        find=find,
        make=make,
    )
    response.status_code = 201 if made else 200
    response.headers["Location"] = f"/v1/tasks/{task.task_id}"
    return task


@ROUTER.get("/v1/tasks/{task_id}", summary="How far a task is", responses=problems(404, 422, 503))
async def show_task(
    task_id: str, gateway: GatewayState, wait_s: Annotated[float, Query(ge=0, le=30, allow_inf_nan=False)] = 0
) -> Task:
    """Rewards per seed, their mean, failures by reason.

    `wait_s` holds the answer back until the task is finished, at most so long.
    """
    state, stopping = gateway.context.state, gateway.context.supervisor.stopping
    until = time.monotonic() + wait_s
    while True:
        task = tasks.view(*await state.task(task_id), now=time.time())
        left = until - time.monotonic()
        if task.state == "finished" or left <= 0 or stopping.is_set():
            return task
        await state.wait_hint(f"task:{task_id}", timeout_s=min(1.0, left))
