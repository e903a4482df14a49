"""What the gateway's handlers share: its context and the finding of recipes and folders.

Made by `services.gateway.app`, found by handlers as `request.state.service`.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import structlog
from fastapi import Depends, Request

from services.gateway.bodies import invalid
from shared import recipe
from shared.api import Run, RunDetail
from shared.errors import NotFound, StorageFull
from shared.recipe import Recipe
from shared.service import Context
from shared.state import RunRecord

log = structlog.get_logger()
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True)
class Gateway:
    """One gateway process."""

    context: Context
    min_free_bytes: int = 256 * 2**20
    """Below this much room for results no run or task is accepted."""

    @property
    def runs_dir(self) -> Path:
        """Where runs and tasks leave their results."""
        return self.context.settings.runs_dir

    def run_folder(self, run_id: str) -> Path:
        """A run's own folder. Raises NotFound for what is no run id."""
        if not _ID.fullmatch(run_id):
            raise NotFound(f"no run {run_id!r}")
        return self.runs_dir / run_id

    def task_folder(self, task_id: str) -> Path:
        """Where a task's trajectories are archived. Raises NotFound for what is no task id."""
        if not _ID.fullmatch(task_id):
            raise NotFound(f"no task {task_id!r}")
        return self.runs_dir / "tasks" / task_id

    def check_room(self) -> None:
        """Raises StorageFull when results would not fit on the disk."""
        folder = self.runs_dir.absolute()
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        if free < self.min_free_bytes:
            raise StorageFull(
                f"{folder} has {free // 2**20} MiB free, {self.min_free_bytes // 2**20} are needed: "
                "make room, or set ROLLART_RUNS_DIR"
            )

    def named_recipe(self, name: str) -> Recipe:
        """A recipe that ships with the project. Raises Invalid naming those that exist."""
        found = {path.stem: path for folder in _recipe_folders() for path in sorted(folder.glob("*.toml"))}
        if name not in found:
            known = ", ".join(sorted(found)) or "none here"
            raise invalid("recipe", f"no recipe is named {name[:80]!r}; known: {known}")
        return recipe.load(found[name])

    def view(self, record: RunRecord) -> Run:
        """A run as the API shows it."""
        return Run(
            run_id=record.run_id,
            state=record.state,
            phase=record.phase,
            name=record.run_id.rpartition("-")[0],
            created_at=record.created_at,
            started_at=record.started_at or None,
            ended_at=record.ended_at or None,
            step=record.step,
            steps=record.steps,
            version=record.version,
            error=record.error,
        )

    def detail(self, record: RunRecord) -> RunDetail:
        """A run with its recipe."""
        parsed = Recipe.model_validate_json(record.recipe)
        return RunDetail(
            **self.view(record).model_dump(),
            recipe=parsed.model_dump(mode="json"),
            folder=str(self.run_folder(record.run_id).absolute()),
        )


def _recipe_folders() -> list[Path]:
    """Later ones win: the project's own, then those of the working directory."""
    return [Path(__file__).resolve().parents[2] / "recipes", Path.cwd() / "recipes"]


def _gateway(request: Request) -> Gateway:
    gateway = request.state.service
    assert isinstance(gateway, Gateway)
    return gateway


GatewayState = Annotated[Gateway, Depends(_gateway)]
"""Parameter type of a handler that needs the gateway."""
