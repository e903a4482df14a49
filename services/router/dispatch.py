"""Assigns turns: consumes `turns`, produces into the topics of GPU-typed consumer groups.

The device class comes from the task's affinity; the worker from the strategy; the partition is one that
the worker owns. Workers are known from their heartbeats in Redis: one whose heartbeat has expired is
never chosen, nor one that takes turns and answers none while there are others. A turn that no live worker
can take waits here, visibly, and fails by its try's deadline.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

import structlog
from prometheus_client import Counter
from pydantic import JsonValue

from services.router.standing import Standing
from services.router.strategies import Candidate, Strategy
from shared import metrics
from shared.bus import Bus, Delivery
from shared.errors import NoWorker
from shared.events import GenerateRequested, TurnFailed, TurnRequested
from shared.settings import RouterSettings
from shared.state import State, WorkerRecord
from shared.topics import REPLIES, worker_topic

_LOG = structlog.get_logger()
_REFRESH_S = 1.0
_REFRESH_WAITING_S = 0.25
"""The same while turns wait."""
_REPORT_LAG_S = 0.5
"""A report is about this old when it is read: what was assigned since is not in it."""
_GIVE_UP_BEFORE_S = 0.5
"""A waiting turn fails this long before its try's deadline, so that the asker hears why."""


class Dispatch:
    """The router's one job."""

    def __init__(self, bus: Bus, state: State, settings: RouterSettings, strategy: Strategy) -> None:
        self._bus = bus
        self._state = state
        self._settings = settings
        self._strategy = strategy
        self._classes: dict[str, list[Candidate]] = {}
        self._standing = Standing()
        self._waiting: list[Delivery] = []
        self._counts: dict[tuple[str, str, str, str], Counter] = {}
        self.assigned = 0
        self.fallbacks = 0

    def handle(self, deliveries: Sequence[Delivery]) -> None:
        """A batch from `turns`. Acknowledged when the assignment is in the broker."""
        for delivery in deliveries:
            self._assign(delivery, time.time())

    def _assign(self, delivery: Delivery, now: float) -> None:
        turn = delivery.event
        assert isinstance(turn, TurnRequested)
        if now >= turn.try_deadline:
            metrics.TURNS_EXPIRED.labels("router").inc()
            delivery.ack()
            return
        tried = self._standing.seen(turn, now)
        candidates, fallback = self._candidates(turn, tried, now)
        if not candidates:
            self._waiting.append(delivery)
            return
        candidate = self._strategy.choose(turn, candidates)
        self._standing.assigned(turn, candidate.worker.worker_id, now, tried=tried)
        self._send(delivery, turn, candidate.worker, now, fallback)
        candidate.unreported.append(now)

    def _candidates(
        self, turn: TurnRequested, tried: tuple[str, ...], now: float
    ) -> tuple[list[Candidate], bool]:
        """Workers that may take the turn, and whether they are of the default class for want of its own."""
        default = self._settings.default_class
        wanted = turn.affinity or default
        classes = (wanted,) if wanted == default else (wanted, default)
        ejected = self._standing.ejected(now)
        unwelcome = [{*tried, *ejected}, {*tried}] if tried or ejected else []
        for avoid in unwelcome:
            for name in classes:
                found = [c for c in self._classes.get(name, ()) if c.worker.worker_id not in avoid]
                if found:
                    return found, name != wanted
        for name in classes:
            if name in self._classes:
                return self._classes[name], name != wanted
        return [], False

    def _send(
        self, delivery: Delivery, turn: TurnRequested, worker: WorkerRecord, now: float, fallback: bool
    ) -> None:
        request = GenerateRequested(
            turn=turn,
            worker_id=worker.worker_id,
            device_class=worker.device_class,
            fallback=fallback,
            assigned_at=now,
        )
        partition = worker.partitions[zlib.crc32(turn.trajectory_id.encode()) % len(worker.partitions)]
        self._bus.publish(
            worker_topic(worker.role, worker.device_class),
            request,
            partition=partition,
            run_id=turn.run_id,
            traceparent=delivery.traceparent,
            on_delivered=delivery.ack,
        )
        self.assigned += 1
        self.fallbacks += fallback
        sticky = worker.worker_id == turn.last_worker
        labels = (turn.task, worker.device_class, str(fallback), str(sticky))
        count = self._counts.get(labels)
        if count is None:
            count = self._counts[labels] = metrics.ASSIGNMENTS.labels(*labels)
        count.inc()

    async def watch_workers(self) -> None:
        """Loop. Consumes worker reports, tries waiting turns again; woken by the hint `workers` or time."""
        while True:
            self._update(await self._state.workers())
            await self._state.wait_hint(
                "workers", timeout_s=_REFRESH_WAITING_S if self._waiting else _REFRESH_S
            )

    def _update(self, workers: Sequence[WorkerRecord]) -> None:
        now = time.time()
        known = {c.worker.worker_id: c for group in self._classes.values() for c in group}
        classes: dict[str, list[Candidate]] = {}
        for worker in workers:
            if worker.draining or not worker.partitions:
                continue
            candidate = known.get(worker.worker_id) or Candidate(worker)
            if candidate.worker.updated_at != worker.updated_at:
                candidate.worker = worker
                while candidate.unreported and candidate.unreported[0] < now - _REPORT_LAG_S:
                    candidate.unreported.popleft()
            classes.setdefault(worker.device_class, []).append(candidate)
        if sorted(classes) != sorted(self._classes):
            _LOG.info("device classes with live workers", classes=sorted(classes))
        self._classes = classes
        self._standing.forget_all_but({worker.worker_id for worker in workers})
        self._retry_waiting(now)

    def _retry_waiting(self, now: float) -> None:
        waiting, self._waiting = self._waiting, []
        for delivery in waiting:
            turn = delivery.event
            assert isinstance(turn, TurnRequested)
            if now >= turn.try_deadline - _GIVE_UP_BEFORE_S:
                self._fail(delivery, turn)
            else:
                self._assign(delivery, now)
        metrics.TURNS_WAITING.set(len(self._waiting))

    def _fail(self, delivery: Delivery, turn: TurnRequested) -> None:
        wanted = turn.affinity or self._settings.default_class
        error = NoWorker(f"no live worker of class {wanted!r} nor {self._settings.default_class!r}")
        self._bus.publish(
            REPLIES,
            TurnFailed.of(turn, error),
            partition=turn.reply_partition,
            run_id=turn.run_id,
            on_delivered=delivery.ack,
        )

    def status(self) -> dict[str, JsonValue]:
        """For `/v1/status`."""
        classes: dict[str, JsonValue] = {
            name: [c.worker.worker_id for c in group] for name, group in self._classes.items()
        }
        return {
            "classes": classes,
            "waiting": len(self._waiting),
            "assigned": self.assigned,
            "fallbacks": self.fallbacks,
            "ejected": list(self._standing.ejected(time.time())),
        }
