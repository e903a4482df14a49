"""Which workers have let tries of turns pass their deadline. Used by `dispatch.py`.

A worker that takes requests and never answers looks alive: it reports, it owns partitions. What gives it
away is that a turn comes again under the next try number. Such a turn never goes back to a worker that had
it, while another lives; and a worker that has answered nobody since it got the turn is ejected for a while,
so that only one try's deadline is lost to it. Its answers are seen by turns that name it as the last worker.

Of a split turn either worker may be the silent one. Where one of the two has answered others since, or has
had nothing in hand since by its own reports, it is the other; where that does not tell them apart, both are
ejected, and the innocent one returns with its next answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from shared import metrics
from shared.events import TurnRequested

_LOG = structlog.get_logger()
_EJECTED_S = 15.0
"""The first time; twice as long each further time."""
_MOST_DOUBLINGS = 4
_CLOCKS_S = 1.0
"""By which the clocks of asker and router may differ."""
_NEVER = float("-inf")
_REMEMBERED = 32_768
"""Trajectories whose last assignment is known."""


class _Assignment(NamedTuple):
    """The turn of a trajectory that was assigned last."""

    attempt: int
    turn: int
    at: float
    try_deadline: float
    workers: tuple[str, ...]
    """Of the last try: one, or the prefill and the decode worker."""
    tried: tuple[str, ...]
    """Every worker that had a try of this turn, the last ones too."""


@dataclass(slots=True)
class _Ejection:
    """A worker out of the choice."""

    until: float
    times: int
    shared: bool = False
    """Another worker may have been the silent one in its place."""


class Standing:
    """What one router knows of the workers' answers."""

    def __init__(self, held_at: Callable[[str], float] = lambda _: _NEVER) -> None:
        """`held_at` tells when a worker last reported anything in hand."""
        self._held_at = held_at
        self._assigned: dict[str, _Assignment] = {}
        self._answered: dict[str, float] = {}
        self._ejections: dict[str, _Ejection] = {}

    def seen(self, turn: TurnRequested, now: float) -> tuple[str, ...]:
        """A turn has come in. The workers that had an earlier try of it."""
        if not turn.try_number:
            # A later try names who answered before the silence, and proves nothing.
            if turn.last_worker is not None:
                self._answers(turn.last_worker, now)
            if turn.last_prefill_worker is not None:
                self._answers(turn.last_prefill_worker, now)
            return ()
        last = self._assigned.get(turn.trajectory_id)
        if last is None or (last.attempt, last.turn) != (turn.attempt, turn.turn):
            return ()
        if now >= last.try_deadline - _CLOCKS_S:
            silent = [worker for worker in last.workers if self._answered.get(worker, _NEVER) < last.at]
            holding = [worker for worker in silent if self._held_at(worker) >= last.at]
            if len(holding) == 1:
                silent = holding
            for worker in silent:
                self._eject(worker, now, shared=len(silent) > 1)
        return last.tried

    def assigned(
        self, turn: TurnRequested, workers: tuple[str, ...], now: float, *, tried: tuple[str, ...]
    ) -> None:
        """A turn goes to a worker, or to two."""
        known = self._assigned
        trajectory = turn.trajectory_id
        known.pop(trajectory, None)
        known[trajectory] = _Assignment(
            turn.attempt, turn.turn, now, turn.try_deadline, workers, (*tried, *workers)
        )
        if len(known) > _REMEMBERED:
            del known[next(iter(known))]

    def assigned_at(self, trajectory_id: str) -> float | None:
        """When the last turn of a trajectory went to its workers."""
        last = self._assigned.get(trajectory_id)
        return last.at if last is not None else None

    def ejected(self, now: float) -> list[str]:
        """Workers that are out of the choice now."""
        if not self._ejections:
            return []
        return [worker for worker, ejection in self._ejections.items() if now < ejection.until]

    def forget_all_but(self, workers: Collection[str]) -> None:
        """Workers that are gone: a restarted one has another id."""
        for known in (self._answered, self._ejections):
            for worker in [worker for worker in known if worker not in workers]:
                del known[worker]

    def _answers(self, worker: str, now: float) -> None:
        self._answered[worker] = now
        if self._ejections:
            ejection = self._ejections.get(worker)
            if ejection is not None and ejection.shared and now < ejection.until:
                del self._ejections[worker]
                _LOG.info("worker returns: it was the other one that is silent", worker=worker)

    def _eject(self, worker: str, now: float, *, shared: bool) -> None:
        before = self._ejections.get(worker)
        if before is not None and now < before.until:
            before.shared = before.shared and shared
            return
        again = before is not None and self._answered.get(worker, _NEVER) < before.until
        times = before.times + 1 if before is not None and again else 0
        seconds = _EJECTED_S * 2 ** min(times, _MOST_DOUBLINGS)
        self._ejections[worker] = _Ejection(now + seconds, times, shared)
        metrics.WORKERS_EJECTED.inc()
        _LOG.warning("worker ejected: it does not answer", worker=worker, seconds=seconds, alone=not shared)
