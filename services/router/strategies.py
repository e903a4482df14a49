"""How a turn finds its worker among those that could take it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.events import TurnRequested
from shared.state import WorkerRecord


@dataclass(slots=True)
class Candidate:
    """A live worker and what the router has given it that its last report cannot count yet."""

    worker: WorkerRecord
    unreported: deque[float] = field(default_factory=deque)
    """When each of these turns was assigned, ascending."""

    @property
    def load(self) -> int:
        """Turns it has in hand, as far as is known."""
        return self.worker.running + self.worker.waiting + len(self.unreported)


class Strategy(Protocol):
    """A routing strategy."""

    def choose(self, turn: TurnRequested, candidates: Sequence[Candidate]) -> Candidate:
        """One of the candidates; there is at least one."""


class LeastLoaded:
    """The worker with the fewest turns in hand."""

    def choose(self, turn: TurnRequested, candidates: Sequence[Candidate]) -> Candidate:
        """Ties go to the first by id, so that the choice is repeatable."""
        if len(candidates) == 1:
            return candidates[0]
        return min(candidates, key=lambda c: (c.load, c.worker.worker_id))


class StickyLeastLoaded:
    """The worker that served the trajectory's last turn, which holds its KV; else the least loaded."""

    def __init__(self) -> None:
        self._otherwise = LeastLoaded()

    def choose(self, turn: TurnRequested, candidates: Sequence[Candidate]) -> Candidate:
        """Sticky while the worker lives."""
        for candidate in candidates:
            if candidate.worker.worker_id == turn.last_worker:
                return candidate
        return self._otherwise.choose(turn, candidates)
