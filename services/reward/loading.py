"""Configured scorers by name and config, each made once. Used by `scoring.py`, and by `child.py` in the
process of an isolated scorer."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic_core import to_json

from services.reward.protocol import Scorer
from services.reward.verdict import Verdict, refuse
from shared import registry
from shared.errors import UnknownPlugin
from shared.events import RewardSpec

KEPT = 256
"""Configured scorers at once; the oldest makes room."""


@dataclass(frozen=True)
class Configured:
    """A scorer whose name and config are right."""

    isolated: bool
    scorer: Scorer | None
    """None where it is isolated and this is not its process."""


class Scorers:
    """The cache. `in_child`: this process is where isolated scorers run."""

    def __init__(self, *, in_child: bool) -> None:
        self._in_child = in_child
        self._known: dict[tuple[str, bytes], Configured] = {}

    def get(self, spec: RewardSpec) -> Configured | Verdict:
        """The scorer, or the refusal that stands for every trajectory that asks for it."""
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

    def _make(self, spec: RewardSpec) -> Configured:
        cls, config = registry.configure("reward", spec.scorer, spec.config)
        isolated = bool(cls.isolated)
        return Configured(isolated, cls(config) if self._in_child or not isolated else None)
