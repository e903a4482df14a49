"""`/v1/workers`: who samples."""

from __future__ import annotations

from fastapi import APIRouter

from services.gateway.documentation import KEY, problems
from services.gateway.service import GatewayState
from shared.api import Worker, WorkerList

ROUTER = APIRouter(tags=["workers"], dependencies=[KEY])


@ROUTER.get("/v1/workers", summary="Live generation workers", responses=problems(503))
async def list_workers(gateway: GatewayState) -> WorkerList:
    """Every worker whose heartbeat has not expired, by id, as it last reported itself."""
    found = await gateway.context.state.workers()
    return WorkerList(workers=[Worker.model_validate(worker.model_dump()) for worker in found])
