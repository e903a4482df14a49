"""`summary.json`: the outcome of one run, stable for scripts and dashboards.

Written by the training service when a run ends, served by the gateway, read by the command line and
by the report. All durations are seconds, all numbers finite; shares are fractions of wall-clock time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.errors import ConservationViolated

RunState = Literal["queued", "running", "finished", "failed", "cancelled"]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Part(BaseModel):
    """Root of the summary's parts: strict and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Tokens(Part):
    """Tokens of training rollouts."""

    sampled: Count = 0
    """Sampled by the policy."""
    trained: Count = 0
    """Of these, in the loss of a step."""


class TaskSummary(Part):
    """One task."""

    reward_before: Finite | None = None
    """Mean reward on held-out seeds before the first step; null when not evaluated."""
    reward_after: Finite | None = None
    """The same after the last step."""
    episodes: Count = 0
    """Training episodes scored."""
    turns_mean: Seconds = 0.0
    """Mean number of turns of these."""


class Lag(Part):
    """Staleness of what was trained, in versions."""

    histogram: dict[Annotated[str, Field(pattern=r"^\d+$")], Count] = {}
    """Lag → trajectories trained with it."""
    max: Count = 0


class StageSummary(Part):
    """How long a stage was doing something, over all its processes."""

    busy_s: Seconds = 0.0
    share: Finite = Field(0.0, ge=0, le=1)
    """Of the run's wall time and the stage's processes."""


class StepTime(Part):
    """Means over all steps, seconds."""

    mean_s: Seconds = 0.0
    """A whole step, from batch to batch."""
    wait_s: Seconds = 0.0
    """Waiting for a batch."""
    train_s: Seconds = 0.0
    """Forward, backward and optimiser."""
    publish_s: Seconds = 0.0
    """Publishing the version."""


class WeightsTime(Part):
    """Moving weights, seconds accumulated over the run."""

    push_s: Seconds = 0.0
    """Trainer to store."""
    pull_s: Seconds = 0.0
    """Store to workers, in the background."""
    exposed_s: Seconds = 0.0
    """The part of it that stalled decoding."""


class Groups(Part):
    """Conservation: issued = trained + dropped + in flight."""

    issued: Count = 0
    trained: Count = 0
    dropped: dict[str, Count] = {}
    """Reason → groups."""
    in_flight: Count = 0


class Summary(Part):
    """The file."""

    run_id: str
    state: RunState
    wall_s: Seconds
    """From accepting the run to its end."""
    steps: Count
    """Optimiser steps taken."""
    versions: Count
    """Policy versions published by steps."""
    tokens: Tokens = Tokens()
    tokens_per_s: Seconds = 0.0
    """Sampled tokens per second of the RL phase."""
    tasks: dict[str, TaskSummary] = {}
    lag: Lag = Lag()
    stages: dict[str, StageSummary] = {}
    """Service → its activity."""
    step_time: StepTime = StepTime()
    weights: WeightsTime = WeightsTime()
    groups: Groups = Groups()
    errors: dict[str, Count] = {}
    """Kind → occurrences; `restart_<service>` counts processes that were started again."""


def check_conservation(groups: Groups) -> None:
    """Raises ConservationViolated with the numbers unless issued = trained + dropped + in flight."""
    dropped = sum(groups.dropped.values())
    accounted = groups.trained + dropped + groups.in_flight
    if groups.issued != accounted:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(groups.dropped.items()))
        raise ConservationViolated(
            f"{groups.issued} groups issued, but {accounted} accounted for: trained {groups.trained} + "
            f"dropped {dropped}{f' ({reasons})' if reasons else ''} + in flight {groups.in_flight}"
        )


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or none of it: a reader never sees half, a kill leaves the old one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_summary(path: Path, summary: Summary) -> None:
    """Write `summary.json`, atomically, indented for people."""
    write_atomically(path, summary.model_dump_json(indent=2) + "\n")


def read_summary(path: Path) -> Summary:
    """The summary in a file. Raises OSError or pydantic.ValidationError."""
    return Summary.model_validate(json.loads(path.read_bytes()))
