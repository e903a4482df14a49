"""The generation workers that can be reached now, by role and device class. Used by `dispatch.py` and
`plans.py`; fed from the heartbeats in Redis."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from services.router.strategies import Candidate
from shared.events import Role
from shared.state import WorkerRecord

_LOG = structlog.get_logger()
_REPORT_LAG_S = 0.5
"""A report is about this old when it is read: what was assigned since is not in it."""


class Fleet:
    """Live workers that own partitions and take new turns."""

    def __init__(self) -> None:
        self._by_id: dict[str, Candidate] = {}
        self._groups: dict[tuple[Role, str], list[Candidate]] = {}
        self._classes: dict[Role, list[str]] = {}

    def update(self, workers: Sequence[WorkerRecord], now: float) -> None:
        """Take in the newest heartbeats; a worker that is not among them is gone."""
        by_id: dict[str, Candidate] = {}
        groups: dict[tuple[Role, str], list[Candidate]] = {}
        for worker in workers:
            if worker.draining or not worker.partitions:
                continue
            candidate = self._by_id.get(worker.worker_id) or Candidate(worker)
            if candidate.worker.updated_at != worker.updated_at:
                candidate.worker = worker
                if worker.running or worker.waiting:
                    candidate.held_at = now
                while candidate.unreported and candidate.unreported[0] < now - _REPORT_LAG_S:
                    candidate.unreported.popleft()
            by_id[worker.worker_id] = candidate
            groups.setdefault((worker.role, worker.device_class), []).append(candidate)
        if groups.keys() != self._groups.keys():
            _LOG.info("live workers", groups=sorted(f"{name}:{role}" for role, name in groups))
        self._by_id, self._groups = by_id, groups
        self._classes = {}
        for role, name in sorted(groups):
            self._classes.setdefault(role, []).append(name)

    def of(self, role: Role, device_class: str) -> list[Candidate]:
        """Those of a role and a class."""
        return self._groups.get((role, device_class), [])

    def classes(self, role: Role) -> list[str]:
        """Device classes with a live worker of a role, sorted."""
        return self._classes.get(role, [])

    def find(self, worker_id: str | None) -> Candidate | None:
        """A live worker by its id."""
        return self._by_id.get(worker_id) if worker_id else None

    def held_at(self, worker_id: str) -> float:
        """When a worker last told of anything in hand; never, for one that is gone."""
        candidate = self._by_id.get(worker_id)
        return candidate.held_at if candidate is not None else float("-inf")

    def loads(self) -> dict[str, int]:
        """Worker → turns it has in hand, as far as is known."""
        return {worker_id: candidate.load for worker_id, candidate in self._by_id.items()}

    def by_class(self) -> dict[str, list[str]]:
        """Device class → ids of its workers, all roles together."""
        found: dict[str, list[str]] = {}
        for worker_id, candidate in self._by_id.items():
            found.setdefault(candidate.worker.device_class, []).append(worker_id)
        return found
