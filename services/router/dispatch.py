"""Assigns turns: consumes `turns`, produces into the topics of GPU-typed consumer groups.

Phases and device classes come from the plan (`plans.py`, `affinity.py`); the worker from the strategy; the
partition is one that the worker owns. Workers are known from their heartbeats in Redis: one whose heartbeat
has expired is never chosen, nor one that takes turns and answers none while there are others. A turn that no
live worker can take waits here, visibly, and fails by its try's deadline.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

from prometheus_client import Counter
from pydantic import JsonValue

from services.router.affinity import Affinity
from services.router.fleet import Fleet
from services.router.measured import Measured
from services.router.plans import NOBODY, Avoid, Plan, Planner
from services.router.standing import Standing
from services.router.strategies import Candidate, Strategy, last_worker
from shared import metrics
from shared.bus import Bus, Delivery
from shared.errors import NoWorker
from shared.events import DecodeTarget, GenerateRequested, PrefillRequested, TurnFailed, TurnRequested
from shared.settings import RouterSettings
from shared.state import State, WorkerRecord
from shared.topics import REPLIES, worker_topic

_REFRESH_S = 1.0
_REFRESH_WAITING_S = 0.25
"""The same while turns wait."""
_GIVE_UP_BEFORE_S = 0.5
"""A waiting turn fails this long before its try's deadline, so that the asker hears why."""


class Dispatch:
    """The router's one job."""

    def __init__(self, bus: Bus, state: State, settings: RouterSettings, strategy: Strategy) -> None:
        self._bus = bus
        self._state = state
        self._strategy = strategy
        self._fleet = Fleet()
        self.planner = Planner(settings, self._fleet)
        self.affinity = Affinity(self.planner, self._fleet, Measured(), settings.class_costs)
        self._standing = Standing(self._fleet.held_at)
        self._waiting: list[Delivery] = []
        self._counts: dict[tuple[str, str, str, str, str], Counter] = {}
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
        tried = self._seen(turn, now)
        wish = self.planner.wish(turn)
        choice = self.affinity.choice(turn.task, wish, now)
        option = self.affinity.pick(turn, wish, choice)
        plan = self.planner.plan(wish, option, self._avoided(tried, now))
        if plan is None:
            self._waiting.append(delivery)
            return
        choice.assigned += 1
        if plan.fallbacks:
            self.fallbacks += 1
            for kind in plan.fallbacks:
                choice.fallbacks[kind] = choice.fallbacks.get(kind, 0) + 1
        chosen = self._strategy.choose(turn, plan.workers)
        if plan.phases == "together":
            self._generate(delivery, turn, chosen, plan, now)
            self._standing.assigned(turn, (chosen.worker.worker_id,), now, tried=tried)
        else:
            first = self._strategy.choose(turn, plan.prefill)
            self._split(delivery, turn, first, chosen, plan, now)
            both = (first.worker.worker_id, chosen.worker.worker_id)
            self._standing.assigned(turn, both, now, tried=tried)
        self.assigned += 1

    def _seen(self, turn: TurnRequested, now: float) -> tuple[str, ...]:
        """Learn what became of the turn before; the workers that had an earlier try of this one."""
        if not turn.try_number and turn.last_worker is not None:
            at = self._standing.assigned_at(turn.trajectory_id)
            for worker_id in (turn.last_worker, turn.last_prefill_worker):
                answering = self._fleet.find(worker_id)
                if answering is not None and at is not None:
                    answering.answered(at)
        return self._standing.seen(turn, now)

    def _avoided(self, tried: tuple[str, ...], now: float) -> Avoid:
        ejected = self._standing.ejected(now)
        if not tried and not ejected:
            return NOBODY
        return ({*tried, *ejected}, tried, ()) if tried else (ejected, ())

    def _generate(
        self, delivery: Delivery, turn: TurnRequested, chosen: Candidate, plan: Plan, now: float
    ) -> None:
        request = GenerateRequested(
            turn=turn,
            worker_id=chosen.worker.worker_id,
            device_class=chosen.worker.device_class,
            fallback=bool(plan.fallbacks),
            assigned_at=now,
        )
        self._send(delivery, request, chosen.worker)
        self._count(turn, chosen, plan, now)

    def _split(
        self,
        delivery: Delivery,
        turn: TurnRequested,
        first: Candidate,
        chosen: Candidate,
        plan: Plan,
        now: float,
    ) -> None:
        worker = chosen.worker
        request = PrefillRequested(
            turn=turn,
            worker_id=first.worker.worker_id,
            device_class=first.worker.device_class,
            decode=DecodeTarget(
                worker_id=worker.worker_id,
                device_class=worker.device_class,
                partition=_partition(turn, worker),
            ),
            fallback=bool(plan.fallbacks),
            assigned_at=now,
        )
        self._send(delivery, request, first.worker)
        self._count(turn, first, plan, now)
        self._count(turn, chosen, plan, now)

    def _send(
        self, delivery: Delivery, request: GenerateRequested | PrefillRequested, worker: WorkerRecord
    ) -> None:
        self._bus.publish(
            worker_topic(worker.role, worker.device_class),
            request,
            partition=_partition(request.turn, worker),
            run_id=request.turn.run_id,
            traceparent=delivery.traceparent,
            on_delivered=delivery.ack,
        )

    def _count(self, turn: TurnRequested, candidate: Candidate, plan: Plan, now: float) -> None:
        candidate.unreported.append(now)
        worker = candidate.worker
        sticky = worker.worker_id == last_worker(turn, worker.role)
        labels = (turn.task, worker.role, worker.device_class, "+".join(plan.fallbacks), str(sticky))
        count = self._counts.get(labels)
        if count is None:
            count = self._counts[labels] = metrics.ASSIGNMENTS.labels(*labels)
        count.inc()

    async def watch_workers(self) -> None:
        """Loop. Consumes worker reports, tries waiting turns again; woken by the hint `workers` or time."""
        while True:
            self._update(await self._state.workers(), time.time())
            await self._state.wait_hint(
                "workers", timeout_s=_REFRESH_WAITING_S if self._waiting else _REFRESH_S
            )

    def _update(self, workers: Sequence[WorkerRecord], now: float) -> None:
        self._fleet.update(workers, now)
        self.planner.fleet_changed()
        self.affinity.measured.observe(workers)
        self.affinity.look(now)
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
        wanted = self.planner.default(self.planner.wish(turn))
        error = NoWorker(f"no live worker for a turn {wanted}, nor for any other way to serve it")
        self._bus.publish(
            REPLIES,
            TurnFailed.of(turn, error),
            partition=turn.reply_partition,
            run_id=turn.run_id,
            on_delivered=delivery.ack,
        )

    def status(self) -> dict[str, JsonValue]:
        """For `/v1/status`."""
        classes: dict[str, JsonValue] = {name: list(ids) for name, ids in self._fleet.by_class().items()}
        return {
            "classes": classes,
            "load": dict(self._fleet.loads()),
            "waiting": len(self._waiting),
            "assigned": self.assigned,
            "fallbacks": self.fallbacks,
            "ejected": list(self._standing.ejected(time.time())),
        }


def _partition(turn: TurnRequested, worker: WorkerRecord) -> int:
    """The partition of the worker's on which a trajectory's turns reach it."""
    return worker.partitions[zlib.crc32(turn.trajectory_id.encode()) % len(worker.partitions)]
