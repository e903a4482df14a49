"""The built-in scorers: what the environment itself gave, and whether that was enough."""

from __future__ import annotations

import math
from typing import ClassVar, Self

from pydantic import Field, model_validator

from services.reward.protocol import Score, ScorerConfig
from shared.events import TrajectoryCompleted


class EpisodeReturn:
    """The undiscounted sum of the turns' rewards, less a cost for each turn."""

    isolated: ClassVar[bool] = False

    class Config(ScorerConfig):
        """Keys of `reward_config`."""

        minimum: float = 0.0
        """Smallest return of the task, turn costs included."""
        maximum: float = 1.0
        """Largest return of the task."""
        turn_cost: float = Field(0.0, ge=0)
        """Subtracted for each turn played."""

        @model_validator(mode="after")
        def _ordered(self) -> Self:
            if self.minimum > self.maximum:
                raise ValueError("minimum must not be above maximum")
            return self

    def __init__(self, config: Config) -> None:
        self.bounds = (config.minimum, config.maximum)
        self._turn_cost = config.turn_cost

    def score(self, trajectory: TrajectoryCompleted) -> Score:
        """Always applies."""
        earned = math.fsum(turn.reward for turn in trajectory.turns)
        if not self._turn_cost:
            return Score(earned)
        cost = self._turn_cost * len(trajectory.turns)
        return Score(earned - cost, {"return": earned, "turn_cost": -cost})


class Success:
    """1 where the undiscounted return reaches a threshold, else 0."""

    isolated: ClassVar[bool] = False
    bounds = (0.0, 1.0)

    class Config(ScorerConfig):
        """Keys of `reward_config`."""

        threshold: float = 1.0

    def __init__(self, config: Config) -> None:
        self._threshold = config.threshold

    def score(self, trajectory: TrajectoryCompleted) -> Score:
        """Always applies. A return that is not a number stays one, so that it is refused."""
        earned = math.fsum(turn.reward for turn in trajectory.turns)
        if math.isnan(earned):
            return Score(earned)
        return Score(1.0 if earned >= self._threshold else 0.0, {"return": earned})


class Posted:
    """The reward that an outside agent has posted for its session."""

    isolated: ClassVar[bool] = False

    class Config(ScorerConfig):
        """What was posted."""

        reward: float | None = None
        """None: the session ended without one."""
        components: dict[str, float] = Field({})
        """What it is made of, for people."""

    def __init__(self, config: Config) -> None:
        self.bounds = (-math.inf, math.inf)
        self._config = config

    def score(self, trajectory: TrajectoryCompleted) -> Score | None:
        """Applies where a reward was posted."""
        if self._config.reward is None:
            return None
        return Score(self._config.reward, self._config.components)
