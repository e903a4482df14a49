"""The lines of `metrics.jsonl`: one per step, phase, warm-start step and evaluation.

Written by the training service, read by the report, by clients of the gateway's event stream and by
scripts. `kind` says which one a line is. A measurement that was not finite is written as null: the line
stays valid JSON and the gap is visible.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter


def _null_unless_finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Measured = Annotated[float | None, BeforeValidator(_null_unless_finite)]
"""A number, or null where it was not finite or not measured."""


class Record(BaseModel):
    """Root of all lines. Frozen, tolerant of unknown fields."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class StepRecord(Record):
    """One optimiser step. Durations in seconds."""

    kind: Literal["step"] = "step"
    step: int
    """Counted from 1."""
    version: int
    """Policy version this step published."""
    time: float
    """End of the step, since the epoch."""
    elapsed_s: float
    """Since the run began."""
    reward: dict[str, Measured] = {}
    """Task → mean reward of the batch."""
    episodes: dict[str, int] = {}
    """Task → trajectories of the batch."""
    turns_mean: dict[str, Measured] = {}
    """Task → mean turns of these."""
    lag: dict[str, int] = {}
    """Lag in versions → trajectories of the batch."""
    tokens_sampled: int = 0
    """By the policy since the last step."""
    tokens_trained: int = 0
    """In the loss of this step."""
    tokens_per_s: Measured = None
    """Sampled since the last step, per second."""
    wait_s: float = 0.0
    """Waiting for the batch."""
    train_s: float = 0.0
    """Forward, backward and optimiser."""
    publish_s: float = 0.0
    """Publishing the version."""
    step_s: float = 0.0
    """Since the last step ended."""
    loss: Measured = None
    entropy: Measured = None
    """Mean over trained tokens, nats."""
    grad_norm: Measured = None
    """Global L2 norm before clipping."""
    mismatch_kl: Measured = None
    """KL of the sampling distribution from the trainer's at the same version, nats per token."""
    ess: Measured = None
    """Effective sample size of the importance weights, as a fraction of the batch."""
    clip_fraction: Measured = None
    """Trained tokens whose ratio was clipped."""
    ratio_max: Measured = None
    learning_rate: Measured = None
    zero_variance_groups: int = 0
    """Groups whose members all had the same reward."""
    dropped: dict[str, int] = {}
    """Reason → groups dropped since the last step."""
    open_groups: int = 0
    """Issued and not yet retired."""
    stages: dict[str, Measured] = {}
    """Service → share of the time since the last step in which it was busy, 0 to 1."""


class PhaseRecord(Record):
    """A phase of the run that has ended: `warm_start`, `evaluation_before`, `train`, …"""

    kind: Literal["phase"] = "phase"
    phase: str
    start: float
    """Since the epoch."""
    end: float
    detail: dict[str, Measured] = {}
    """Numbers that describe it, for people."""


class WarmStartRecord(Record):
    """One supervised step of the warm start."""

    kind: Literal["warm_start"] = "warm_start"
    step: int
    """Counted from 1."""
    time: float
    """Since the epoch."""
    loss: Measured
    """Mean cross-entropy over the tokens in the loss, nats."""


class EvaluationRecord(Record):
    """Held-out episodes of one version."""

    kind: Literal["evaluation"] = "evaluation"
    version: int
    step: int
    """Optimiser steps taken before it; 0 is before RL."""
    time: float
    """When it ended, since the epoch."""
    reward: dict[str, Measured]
    """Task → mean reward over the episodes that have one."""
    episodes: dict[str, int]
    """Task → episodes that have one."""


AnyRecord: TypeAlias = StepRecord | PhaseRecord | WarmStartRecord | EvaluationRecord
RECORD: TypeAdapter[AnyRecord] = TypeAdapter(Annotated[AnyRecord, Field(discriminator="kind")])
"""Parses one line."""
