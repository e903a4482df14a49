"""Looks trajectories up in the archives of runs and tasks. Called by `routes.trajectories`; blocking."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import structlog
from pydantic import ValidationError

from services.gateway.service import Gateway
from shared.api import TrajectoryBrief
from shared.archive import TrajectoryArchive, read_lines, safe_name
from shared.errors import NotFound
from shared.events import TrajectoryScored

log = structlog.get_logger()


def find(gateway: Gateway, trajectory_id: str) -> TrajectoryScored:
    """The trajectory with this id. Raises NotFound."""
    owner = trajectory_id.partition("/")[0]
    with contextlib.suppress(NotFound):
        for folder in (gateway.run_folder(owner) / "trajectories", gateway.task_folder(owner)):
            found = TrajectoryArchive(folder).find(trajectory_id)
            if found is not None:
                return found
    raise NotFound(f"no trajectory {trajectory_id[:200]!r}: unknown, or its episode has not ended")


def newest(folder: Path, *, task: str | None, limit: int) -> list[TrajectoryBrief]:
    """Up to `limit` trajectories of an archive, newest first, without their tokens."""
    found: list[TrajectoryBrief] = []
    for scored in _newest_lines(folder, f"{safe_name(task)}/*.jsonl" if task else "*/*.jsonl", limit):
        trajectory = scored.trajectory
        found.append(
            TrajectoryBrief(
                trajectory_id=trajectory.trajectory_id,
                task=trajectory.task,
                seed=trajectory.seed,
                purpose=trajectory.purpose,
                status=trajectory.status,
                reward=scored.reward,
                turns=len(trajectory.turns),
                tokens=len(trajectory.token_ids),
                start_version=trajectory.start_version,
                completed_at=trajectory.completed_at,
            )
        )
    found.sort(key=lambda brief: brief.completed_at, reverse=True)
    return found[:limit]


def _newest_lines(folder: Path, pattern: str, limit: int) -> Iterator[TrajectoryScored]:
    """Lines of the files written last, until there are enough of them."""
    files = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
    count = 0
    for path in files:
        for line in list(read_lines(path))[-limit:]:
            try:
                yield TrajectoryScored.model_validate_json(line)
                count += 1
            except ValidationError:
                log.warning("archive line unreadable", path=str(path))
        if count >= limit:
            return
