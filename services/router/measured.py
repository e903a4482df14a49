"""What turns of each task have needed on each kind of worker, out of the workers' heartbeats.

Workers report sums since they started; the differences count here, weighted by half for every minute since.
Rates are per token, so that classes which saw different turns compare. Used by `affinity.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.events import Role
from shared.state import WorkerRecord
from shared.state.records import TaskProfile

HALF_LIFE_S = 60.0
FORGET_S = 3600.0
_FIRST_TURNS = 64.0
"""A worker seen for the first time counts as so many turns at most, however long it has been running."""
_SUMS = tuple(TaskProfile.model_fields)


class Typical(NamedTuple):
    """A task's mean turn, over all workers."""

    prompt_tokens: float
    generated_tokens: float
    cached_share: float
    """Of the prompt's tokens."""


@dataclass(slots=True)
class Cell:
    """One task on the workers of one role and one class. Sums as in TaskProfile, weighted by age."""

    at: float
    """When the newest part was reported."""
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0.0))
    seen: float = 0.0
    """Turns ever, without a weight."""

    def add(self, grown: dict[str, float], at: float) -> None:
        """One more difference, reported at a time."""
        if at >= self.at:
            keep, weight = _weight(at - self.at), 1.0
            self.at = at
        else:
            keep, weight = 1.0, _weight(self.at - at)
        for name, value in grown.items():
            self.sums[name] = self.sums[name] * keep + value * weight
        self.seen += max(grown["prefills"], grown["decodes"])

    def turns(self, now: float) -> float:
        """Turns, weighted by their age."""
        return max(self.sums["prefills"], self.sums["decodes"]) * _weight(now - self.at)

    @property
    def computed_share(self) -> float:
        """Of the prompt's tokens, those that were computed."""
        prompt = self.sums["prompt_tokens"]
        return self._computed / prompt if prompt else 1.0

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds for each prompt token that was computed."""
        return self.sums["prefill_s"] / max(self._computed, 1e-9)

    @property
    def decode_s_per_token(self) -> float:
        """Seconds for each generated token."""
        return self.sums["decode_s"] / max(self.sums["generated_tokens"], 1e-9)

    @property
    def beside(self) -> float:
        """How many turns were decoded at a time; 0 where that is not known."""
        return self.sums["decode_wall_s"] / self.sums["decode_s"] if self.sums["decode_s"] else 0.0

    @property
    def transfer_s(self) -> float:
        """Seconds of a turn for fetching KV, and for computing prompts whose KV could not be fetched."""
        again = self.sums["prefill_s"] - self.sums["transfer_s"] if self.sums["prefills"] else 0.0
        return (self.sums["transfer_s"] + max(0.0, again)) / max(self.sums["decodes"], 1e-9)

    @property
    def _computed(self) -> float:
        # At least one token of every prompt is computed: the last one, whose output is sampled from.
        return max(self.sums["prompt_tokens"] - self.sums["cached_tokens"], self.sums["prefills"])


class Measured:
    """The figures of all tasks."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, Role, str], Cell] = {}
        self._last: dict[str, tuple[float, dict[str, TaskProfile]]] = {}

    def observe(self, workers: Sequence[WorkerRecord]) -> None:
        """Take in the newest heartbeats; one that is known already changes nothing."""
        for worker in workers:
            before = self._last.get(worker.worker_id)
            if before is not None and before[0] >= worker.updated_at:
                continue
            for task, profile in worker.tasks.items():
                known = before[1].get(task) if before is not None else None
                grown = _difference(profile, known or TaskProfile())
                if known is None:
                    _shrink(grown)
                if grown["prefills"] > 0 or grown["decodes"] > 0:
                    key = (task, worker.role, worker.device_class)
                    cell = self._cells.get(key)
                    if cell is None:
                        cell = self._cells[key] = Cell(worker.updated_at)
                    cell.add(grown, worker.updated_at)
            self._last[worker.worker_id] = (worker.updated_at, worker.tasks)
        alive = {worker.worker_id for worker in workers}
        for gone in [worker_id for worker_id in self._last if worker_id not in alive]:
            # One whose heartbeat comes late is no new worker: its sums are remembered for a while.
            newest = max((worker.updated_at for worker in workers), default=0.0)
            if newest - self._last[gone][0] > FORGET_S:
                del self._last[gone]

    def forget(self, now: float) -> None:
        """Drop what has not been measured for long."""
        for key in [key for key, cell in self._cells.items() if now - cell.at > FORGET_S]:
            del self._cells[key]

    def cell(self, task: str, role: Role, device_class: str) -> Cell | None:
        """One task on one kind of worker."""
        return self._cells.get((task, role, device_class))

    def typical(self, task: str, now: float) -> Typical | None:
        """The task's mean turn; None before anything was measured."""
        prefills = self._sum(task, ("both", "prefill"), ("prefills", "prompt_tokens", "cached_tokens"), now)
        decodes = self._sum(task, ("both", "decode"), ("decodes", "generated_tokens"), now)
        if not prefills[0] or not decodes[0]:
            return None
        return Typical(
            prompt_tokens=prefills[1] / prefills[0],
            generated_tokens=decodes[1] / decodes[0],
            cached_share=prefills[2] / prefills[1] if prefills[1] else 0.0,
        )

    def _sum(self, task: str, roles: Iterable[Role], names: Sequence[str], now: float) -> list[float]:
        cells = [cell for (t, role, _), cell in self._cells.items() if t == task and role in roles]
        return [sum(cell.sums[name] * _weight(now - cell.at) for cell in cells) for name in names]


def _weight(age_s: float) -> float:
    return float(0.5 ** (max(0.0, age_s) / HALF_LIFE_S))


def _difference(now: TaskProfile, before: TaskProfile) -> dict[str, float]:
    grown = {name: float(getattr(now, name) - getattr(before, name)) for name in _SUMS}
    if min(grown.values()) < 0:
        # It has started again under the same id.
        return {name: float(getattr(now, name)) for name in _SUMS}
    return grown


def _shrink(grown: dict[str, float]) -> None:
    share = min(1.0, _FIRST_TURNS / max(grown["prefills"], grown["decodes"], 1.0))
    for name in grown:
        grown[name] *= share
