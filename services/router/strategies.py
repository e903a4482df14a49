"""How a turn finds its worker among those that could take it. Called by `dispatch.py`, once for each phase
that has a worker of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.events import Role, TurnRequested
from shared.state import WorkerRecord

_OVERLOAD = 2
_OVERLOAD_SLACK = 8
"""KV is worth waiting for behind so many turns more than twice the least loaded worker's."""


@dataclass(slots=True)
class Candidate:
    """A live worker and what the router has given it that its last report cannot count yet."""

    worker: WorkerRecord
    unreported: deque[float] = field(default_factory=deque)
    """When each of these turns was assigned, ascending."""
    held_at: float = float("-inf")
    """When a report last told of anything in hand."""

    @property
    def load(self) -> int:
        """Turns it has in hand, as far as is known."""
        return self.worker.running + self.worker.waiting + len(self.unreported)

    def answered(self, at: float) -> None:
        """A turn that was assigned then is done: where no report has counted it yet, none will."""
        if self.unreported and self.unreported[0] <= at:
            self.unreported.popleft()


class Strategy(Protocol):
    """A routing strategy. A plug-in needs this one method:

    class MostKvFree:
        def choose(self, turn, candidates):
            return min(candidates, key=lambda c: c.worker.kv_usage)
    """

    def choose(self, turn: TurnRequested, candidates: Sequence[Candidate]) -> Candidate:
        """One of the candidates; there is at least one, and all have the role `candidates[0].worker.role`:
        for a split turn it is asked twice, for `prefill` and for `decode`."""


class LeastLoaded:
    """The worker with the fewest turns in hand."""

    def choose(self, turn: TurnRequested, candidates: Sequence[Candidate]) -> Candidate:
        """Ties go to the first by id, so that the choice is repeatable."""
        if len(candidates) == 1:
            return candidates[0]
        return min(candidates, key=lambda c: (c.load, c.worker.worker_id))


class StickyLeastLoaded:
    """The worker that served the trajectory's last turn, which holds its KV; else, and where that one has far
    more in hand, the least loaded."""

    def __init__(self) -> None:
        self._otherwise = LeastLoaded()

    def choose(self, turn: TurnRequested, candidates: Sequence[Candidate]) -> Candidate:
        """Sticky while the worker lives and is not overloaded."""
        if len(candidates) == 1:
            return candidates[0]
        last = last_worker(turn, candidates[0].worker.role)
        for candidate in candidates:
            if candidate.worker.worker_id == last:
                least = self._otherwise.choose(turn, candidates)
                overloaded = candidate.load > _OVERLOAD * least.load + _OVERLOAD_SLACK
                return least if overloaded else candidate
        return self._otherwise.choose(turn, candidates)


def last_worker(turn: TurnRequested, role: Role) -> str | None:
    """The worker of a role that served the trajectory's previous turn."""
    return turn.last_prefill_worker if role == "prefill" else turn.last_worker
