"""`/v1/trajectories` and a run's listing of them."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from services.gateway import trajectories
from services.gateway.documentation import KEY, problems
from services.gateway.service import GatewayState
from shared.api import TrajectoryList
from shared.events import TrajectoryScored

ROUTER = APIRouter(tags=["trajectories"], dependencies=[KEY])


@ROUTER.get(
    "/v1/trajectories/{trajectory_id:path}",
    summary="One trajectory with its reward",
    responses=problems(404, 503),
)
async def show_trajectory(trajectory_id: str, gateway: GatewayState) -> TrajectoryScored:
    """Messages, turns, tokens, log-probabilities and versions. The id, as
    `lake-3f2a91/frozenlake-17.3#0`, needs its `#` sent as `%23`."""
    return await asyncio.to_thread(trajectories.find, gateway, trajectory_id)


@ROUTER.get(
    "/v1/runs/{run_id}/trajectories",
    summary="Newest trajectories of a run",
    responses=problems(404, 422, 503),
)
async def list_trajectories(
    run_id: str,
    gateway: GatewayState,
    task: Annotated[str | None, Query(max_length=128)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
) -> TrajectoryList:
    """Without their tokens."""
    await gateway.context.state.run(run_id)
    folder = gateway.run_folder(run_id) / "trajectories"
    found = await asyncio.to_thread(trajectories.newest, folder, task=task, limit=limit)
    return TrajectoryList(trajectories=found)
