"""Environments of the runs in `test_training.py`: they fail, hang or wait where a test says so. Named in
recipes as `run_environments:Class`."""

from __future__ import annotations

import random
import threading
from typing import ClassVar

from services.environment.protocol import EnvironmentConfig, Split, Step

RELEASE = threading.Event()
"""Frees every episode that waits."""


class Chance:
    """Two turns whose rewards are drawn from the seed."""

    blocking: ClassVar[bool] = False

    class Config(EnvironmentConfig):
        fails: str = ""
        """Whose play raises: `scripted`, `eval` or `train`."""
        waits: str = ""
        """Whose play waits for RELEASE."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._random = random.Random(0)
        self._play = "train"
        self._turns = 0

    def reset(self, *, seed: int, split: Split) -> str:
        self._random = random.Random(f"{seed}/{split}")
        self._play = split
        return "say a or b"

    def step(self, action: str) -> Step:
        if self.config.fails == self._play:
            raise OSError("the simulator is gone")
        if self.config.waits == self._play:
            RELEASE.wait()
        self._turns += 1
        return Step("again", self._random.random() / 2, self._turns > 1, False)

    def scripted_action(self, rng: random.Random, *, skill: float) -> str:
        self._play = "scripted"
        return rng.choice(["a", "b"])

    def close(self) -> None:
        pass


class Waiting(Chance):
    """The same in threads, so that it may wait."""

    blocking = True
