"""Between the episode loop and an environment that may do anything. Used by `episode.py`.

Whatever an environment raises, down to SystemExit, ends its own episode and nothing else; what it returns
is text and finite numbers, or it is no answer at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from services.environment.protocol import Step
from shared.errors import Invalid

T = TypeVar("T")


class EnvironmentBroke(Exception):
    """An environment failed; `reason` is that of its trajectory, the cause is `__cause__`."""

    def __init__(self, message: str, *, reason: str = "environment_error") -> None:
        super().__init__(message)
        self.reason = reason


def guarded(function: Callable[[], T]) -> T:
    """What the environment's code returns. Raises nothing but EnvironmentBroke."""
    try:
        return function()
    except EnvironmentBroke:
        raise
    except BaseException as error:
        # Also what would be taken for our own: a cancellation, the end of the process, a timeout.
        raise EnvironmentBroke(f"{type(error).__name__}: {error}") from error


def opened(function: Callable[[], T]) -> T:
    """A new environment. Raises EnvironmentBroke that tells a wrong name or config from a fault in it."""
    try:
        return function()
    except Invalid as error:
        raise EnvironmentBroke(error.message, reason=f"environment_{error.code}") from error
    except BaseException as error:
        raise EnvironmentBroke(f"{type(error).__name__}: {error}") from error


def checked_text(value: object) -> str:
    """An observation. Raises EnvironmentBroke for what is no text, or none that UTF-8 can hold."""
    if not isinstance(value, str):
        raise EnvironmentBroke(f"an observation is {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentBroke(f"an observation cannot be encoded: {error}") from error
    return value


def checked_step(step: Step) -> Step:
    """The same with plain types, whatever number types the environment computes with.

    Raises EnvironmentBroke for a reward that is no finite number, or an observation that is no text where
    the episode goes on.
    """
    reward = float(step.reward)
    if not math.isfinite(reward):
        raise EnvironmentBroke(f"a reward is {reward}")
    terminated, truncated = bool(step.terminated), bool(step.truncated)
    observation = "" if terminated or truncated else checked_text(step.observation)
    return Step(observation, reward, terminated, truncated)
