"""What became of one grading: a finite reward within the scorer's bounds, or none and why.

Made by `judge`, in the service for quick scorers and in a child process for isolated ones.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict

from services.reward.protocol import Score, Scorer
from shared.events import FiniteFloat, TrajectoryCompleted

Refusal = Literal[
    "environment_failed",
    "aborted",
    "unknown_scorer",
    "scorer_failed",
    "timeout",
    "not_finite",
    "out_of_range",
    "not_applicable",
]

ROUNDING = 1e-9
"""Relative excess over a bound that is put down to the rounding of sums."""


class Verdict(BaseModel):
    """A reward, or None with a reason."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    reward: FiniteFloat | None = None
    reason: Refusal | None = None
    """None exactly where there is a reward."""
    detail: str = ""
    """For the log: the scorer's error, the value refused."""
    components: dict[str, FiniteFloat] = {}


def refuse(reason: Refusal, detail: str = "") -> Verdict:
    """No reward."""
    return Verdict(reason=reason, detail=detail[:500])


def judge(scorer: Scorer, trajectory: TrajectoryCompleted) -> Verdict:
    """Score and check. Whatever the scorer does short of looping, there is a verdict."""
    try:
        score = scorer.score(trajectory)
        return refuse("not_applicable") if score is None else _check(score, *scorer.bounds)
    except (Exception, SystemExit) as error:
        return refuse("scorer_failed", f"{type(error).__name__}: {error}")


def _check(score: Score, low: float, high: float) -> Verdict:
    value = float(score.value)
    components = {name: float(part) for name, part in score.components.items()}
    if not math.isfinite(value) or not all(map(math.isfinite, components.values())):
        return refuse("not_finite", f"{value} {components}")
    if not low - ROUNDING * max(1.0, abs(low)) <= value <= high + ROUNDING * max(1.0, abs(high)):
        return refuse("out_of_range", f"{value} is not in [{low}, {high}]")
    return Verdict(reward=min(max(value, low), high), components=components)
