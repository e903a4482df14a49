"""Scorers for `test_scoring.py`, apart from it so that child processes import little."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from services.reward.protocol import Score, ScorerConfig
from shared.events import TrajectoryCompleted


class Emit:
    """Gives what its config says."""

    isolated = False
    bounds = (0.0, 1.0)

    class Config(ScorerConfig):
        value: str = "1.0"
        part: str = "0.0"

    def __init__(self, config: Config) -> None:
        self._config = config

    def score(self, trajectory: TrajectoryCompleted) -> Score | None:
        if self._config.value == "none":
            return None
        return Score(float(self._config.value), {"part": float(self._config.part)})


class EmitApart(Emit):
    isolated = True


class Misbehave:
    """Isolated; spins, dies, raises or prints, by the trajectory's seed."""

    isolated = True
    bounds = (0.0, 1.0)

    class Config(ScorerConfig):
        folder: str = ""

    def __init__(self, config: Config) -> None:
        self._folder = config.folder

    def score(self, trajectory: TrajectoryCompleted) -> Score | None:
        if trajectory.seed == 1:
            if self._folder:
                Path(self._folder, "pid").write_text(str(os.getpid()))
            while True:
                pass
        if trajectory.seed == 2:
            os._exit(3)
        if trajectory.seed == 3:
            raise ValueError("no verdict file")
        print("noise")
        return Score(0.5)


class Exits(Emit):
    def score(self, trajectory: TrajectoryCompleted) -> Score | None:
        sys.exit(1)
