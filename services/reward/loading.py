"""Configured scorers by name and config, each made once. Used by `scoring.py`, and by `child.py` in the
process of an isolated scorer."""

from __future__ import annotations

from typing import Literal, cast

from pydantic_core import to_json

from services.reward.protocol import Scorer
from services.reward.verdict import Verdict, refuse
from shared import registry
from shared.errors import UnknownPlugin
from shared.events import RewardSpec

KEPT = 256
"""Configured scorers at once; the oldest makes room."""


ISOLATED: Literal["isolated"] = "isolated"
"""In place of a scorer that is right but belongs into a child process."""


class Scorers:
    """The cache."""

    def __init__(self, *, in_child: bool) -> None:
        """`in_child`: this process is where isolated scorers run."""
        self._in_child = in_child
        self._known: dict[tuple[str, bytes], Scorer | Literal["isolated"]] = {}

    def get(self, spec: RewardSpec) -> Scorer | Literal["isolated"] | Verdict:
        """The scorer, or a refusal that holds for every trajectory that asks for it."""
        key = (spec.scorer, to_json(spec.config) if spec.config else b"")
        known = self._known.get(key)
        if known is not None:
            return known
        try:
            made = self._make(spec)
        except UnknownPlugin as error:
            return refuse("unknown_scorer", error.message)
        except (Exception, SystemExit) as error:
            return refuse("scorer_failed", f"{type(error).__name__}: {error}")
        if len(self._known) >= KEPT:
            del self._known[next(iter(self._known))]
        self._known[key] = made
        return made

    def _make(self, spec: RewardSpec) -> Scorer | Literal["isolated"]:
        cls, config = registry.configure("reward", spec.scorer, spec.config)
        if cls.isolated and not self._in_child:
            return ISOLATED
        return cast(Scorer, cls(config))
