"""What an environment is. Implemented in `envs/` and by users; called by the episode loop alone.

To add one: a class with this shape, and its name in the environments table of `shared/registry.py`, or
`"package.module:Class"` in the recipe. Its module is also imported where recipes are checked (gateway,
command line), so import heavy libraries inside `reset`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

Split = Literal["train", "eval"]


class EnvironmentConfig(BaseModel):
    """Root of environments' `Config`: unknown keys, NaN and values of the wrong type are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Step:
    """What an action led to."""

    observation: str
    """The next user message; not used where the episode is over."""
    reward: float
    terminated: bool
    """The episode is over by the environment's own rules."""
    truncated: bool
    """The episode was cut off by a limit of the environment."""


class Environment(Protocol):
    """One episode of text in and text out. Has a nested class `Config`, an `EnvironmentConfig`, which its
    constructor takes (`type(self)(config)`).

    An instance plays one episode and shares nothing with others: the same seed and split give the same
    episode whatever else runs in the process. An action that cannot be understood is not executed: the
    observation says so, and the turn is spent.
    """

    blocking: ClassVar[bool]
    """True where `reset` or `step` may wait or compute for more than a millisecond: they run in a thread."""

    def reset(self, *, seed: int, split: Split) -> str:
        """The first user message, instructions included.

        Episodes of split `eval` never occur in split `train`, where the task has enough of them.
        """
        ...

    def step(self, action: str) -> Step:
        """Apply the assistant's message. Only after `reset`, and never after the end of the episode."""
        ...

    def close(self) -> None:
        """Release what the episode holds. Called once, whatever happened before."""
        ...


@runtime_checkable
class Demonstrator(Protocol):
    """An environment that can play itself, for warm starts."""

    def scripted_action(self, rng: random.Random, *, skill: float) -> str:
        """The best action it knows with probability `skill`, otherwise a uniformly random valid one."""
        ...
