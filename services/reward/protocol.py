"""What a scorer is. Implemented in `scorers.py` and by users; called by `scoring.py` alone.

To add one: a class with this shape, and its name in the rewards table of `shared/registry.py`, or
`"package.module:Class"` in the recipe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

from shared.events import TrajectoryCompleted


class ScorerConfig(BaseModel):
    """Root of scorers' `Config`: strict and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Score:
    """A reward and, for people, what it is made of."""

    value: float
    components: dict[str, float] = field(default_factory=dict)


class Scorer(Protocol):
    """A pure function of a trajectory, with a config. Has a nested class `Config`, a pydantic model."""

    isolated: ClassVar[bool]
    """True where scoring may loop, crash or run code of the trajectory: it gets a child process that is
    killed at the time limit. False: it runs in the service's event loop and must be linear and quick."""

    bounds: tuple[float, float]
    """Smallest and largest value it may give; anything else is refused, never clipped."""

    def score(self, trajectory: TrajectoryCompleted) -> Score | None:
        """The score of a finished or truncated trajectory; None where this scorer does not apply to it."""
        ...
