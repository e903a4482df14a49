"""Environments that do what no environment should. Named in rollouts as `odd_environments:Class`."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import ClassVar

import numpy as np

from services.environment.protocol import EnvironmentConfig, Split, Step
from shared.errors import Unavailable

RELEASE = threading.Event()
"""Frees what hangs."""
ERRORS: dict[str, BaseException] = {
    "value": ValueError("no"),
    "timeout": TimeoutError("not the episode's"),
    "ours": Unavailable("not generation's"),
    "cancelled": asyncio.CancelledError(),
    "stop": StopIteration(),
    "exit": SystemExit(3),
    "interrupt": KeyboardInterrupt(),
}


class Calm:
    """Plays on for ever; the base of the others. Also counts how often each instance was closed."""

    blocking: ClassVar[bool] = False
    closed: ClassVar[list[str]] = []

    class Config(EnvironmentConfig):
        where: str = ""
        error: str = "value"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.fail("init")

    def fail(self, where: str) -> None:
        if self.config.where == where:
            raise ERRORS[self.config.error]

    def reset(self, *, seed: int, split: Split) -> str:
        self.fail("reset")
        return f"seed {seed}"

    def step(self, action: str) -> Step:
        self.fail("step")
        return self.answer()

    def answer(self) -> Step:
        return Step("go on", 0.5, False, False)

    def scripted_action(self, rng: object, *, skill: float) -> str:
        self.fail("scripted")
        return "scripted"

    def close(self) -> None:
        Calm.closed.append(type(self).__name__)
        self.fail("close")


class CalmThread(Calm):
    blocking = True


class OneStep(Calm):
    """Ends with its first step."""

    def answer(self) -> Step:
        return Step("ignored", np.float32(0.5), np.bool_(True), False)  # type: ignore[arg-type]


class Value(Calm):
    """Gives whatever `where` names as reward or observation."""

    def reset(self, *, seed: int, split: Split) -> str:
        odd = {"none": None, "bytes": b"x", "surrogate": "a\ud800"}
        return odd.get(self.config.where, "ok")  # type: ignore[return-value]

    def answer(self) -> Step:
        match self.config.where:
            case "nan":
                return Step("", float("nan"), True, False)
            case "inf":
                return Step("", float("inf"), True, False)
            case "text_reward":
                return Step("", "much", True, False)  # type: ignore[arg-type]
            case "step_surrogate":
                return Step("a\udfff", 0.0, False, False)
            case "tuple":
                return ("", 0.0, True, False)  # type: ignore[return-value]
            case _:
                return Step(3, 0.0, False, False)  # type: ignore[arg-type]


class NoScript:
    """Has no scripted play, and no `blocking`."""

    class Config(EnvironmentConfig):
        pass

    def __init__(self, config: Config) -> None:
        pass

    def reset(self, *, seed: int, split: Split) -> str:
        return "x"

    def step(self, action: str) -> Step:
        return Step("x", 0.0, True, False)

    def close(self) -> None:
        sys.exit(4)


class NoScriptAtAll(NoScript):
    blocking: ClassVar[bool] = False


class Hangs(Calm):
    """A blocking environment that never returns, not even when it is closed."""

    blocking = True

    def step(self, action: str) -> Step:
        RELEASE.wait()
        return self.answer()

    def close(self) -> None:
        RELEASE.wait()


class Strict(Calm):
    """Understands "ok" alone."""

    def step(self, action: str) -> Step:
        if action != "ok":
            return Step(f"cannot read {action!r}", 0.0, False, False)
        return Step("", 1.0, True, False)
