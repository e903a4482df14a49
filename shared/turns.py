"""Asks for turns and waits for their replies. Used by episodes, by outside sessions and by benchmarks.

One asker is one process. It leases a partition of `replies` and reads it from where it ends now, so no
reply can be missed. A try that is not answered by its deadline is asked again under the next number;
what arrives for an earlier try, or for nobody, is dropped and counted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from shared import errors, metrics
from shared.bus import Bus
from shared.errors import Conflict, DeadlineExceeded, Problem, ProblemDetail
from shared.events import Event, TurnFailed, TurnGenerated, TurnProgressed, TurnRequested
from shared.state import State
from shared.supervisor import Supervisor
from shared.topics import REPLIES, TURNS

_LOG = structlog.get_logger()
_LEASE_S = 15.0
_SWEEP_S = 0.25
_RETRY_PAUSE_S = 0.5
_Key = tuple[str, int, int]


@dataclass(slots=True)
class _Asked:
    """A turn that waits for its reply."""

    turn: TurnRequested
    traceparent: str
    answer: asyncio.Future[TurnGenerated]
    on_progress: Callable[[TurnProgressed], None] | None = None
    retry_at: float = 0.0
    """When a retryable failure is asked again; 0: a try is out."""


class TurnClient:
    """The asking side of the turn path."""

    def __init__(self, bus: Bus, state: State, *, asker: str, try_deadline_s: float) -> None:
        self._bus = bus
        self._state = state
        self.asker = asker
        self._try_deadline_s = try_deadline_s
        self._asked: dict[_Key, _Asked] = {}
        self.partition = -1
        self.retries = 0
        self.late_replies = 0

    async def start(self, supervisor: Supervisor) -> None:
        """Lease a partition, open it, start the loops."""
        self.partition = await self._lease_partition()
        await self._bus.read(REPLIES, partition=self.partition, handler=self._on_replies)
        supervisor.start("turn deadlines", self._sweep)
        supervisor.start("reply lease", self._keep_lease)

    async def stop(self) -> None:
        """Give the partition back."""
        await self._state.release_lease(self._lease_name(self.partition), self.asker)

    def _lease_name(self, partition: int) -> str:
        return f"reply:{partition}"

    async def _lease_partition(self) -> int:
        """A free partition; where all are taken, one to share."""
        numbers = list(range(self._bus.settings.reply_partitions))
        random.shuffle(numbers)
        for number in numbers:
            if await self._state.acquire_lease(self._lease_name(number), self.asker, ttl_s=_LEASE_S):
                return number
        _LOG.warning("every reply partition is leased; sharing one", partition=numbers[0])
        return numbers[0]

    async def _keep_lease(self) -> None:
        """Loop. Renews the lease; woken every third of its life. Losing it only means sharing."""
        while True:
            await asyncio.sleep(_LEASE_S / 3)
            await self._state.acquire_lease(self._lease_name(self.partition), self.asker, ttl_s=_LEASE_S)

    def try_deadline(self, deadline: float) -> float:
        """Of a try that begins now, in a turn with this deadline."""
        return min(deadline, time.time() + self._try_deadline_s)

    async def ask(
        self,
        turn: TurnRequested,
        *,
        traceparent: str = "",
        on_progress: Callable[[TurnProgressed], None] | None = None,
    ) -> TurnGenerated:
        """The sampled turn. `turn` is the first try, with our `asker` and `partition` in it; `on_progress` is
        told the tokens of one with `stream` as they come, of each try anew.

        Raises DeadlineExceeded after the turn's deadline, Conflict where the same turn is being asked, or the
        error that the worker answered with.
        """
        key = (turn.trajectory_id, turn.attempt, turn.turn)
        if key in self._asked:
            raise Conflict(f"turn {turn.turn} of {turn.trajectory_id} is being asked already")
        asked = _Asked(turn, traceparent, asyncio.get_running_loop().create_future(), on_progress)
        self._asked[key] = asked
        try:
            self._publish(asked)
            return await asked.answer
        finally:
            del self._asked[key]

    def _publish(self, asked: _Asked) -> None:
        turn = asked.turn
        self._bus.publish(
            TURNS, turn, key=turn.trajectory_id, run_id=turn.run_id, traceparent=asked.traceparent
        )

    def _on_replies(self, events: Sequence[Event]) -> None:
        for event in events:
            assert isinstance(event, TurnGenerated | TurnFailed | TurnProgressed)
            if event.asker != self.asker:
                continue
            asked = self._asked.get((event.trajectory_id, event.attempt, event.turn))
            if isinstance(event, TurnProgressed):
                if asked is not None and asked.on_progress and event.try_number == asked.turn.try_number:
                    asked.on_progress(event)
            elif asked is None or asked.answer.done() or event.try_number != asked.turn.try_number:
                self.late_replies += 1
                metrics.LATE_REPLIES.inc()
            elif isinstance(event, TurnGenerated):
                asked.answer.set_result(event)
            elif event.retryable:
                asked.retry_at = time.time() + _RETRY_PAUSE_S
            else:
                detail = ProblemDetail(code=event.code, message=event.message)
                asked.answer.set_exception(errors.from_problem(Problem(error=detail)))

    async def _sweep(self) -> None:
        """Loop. Asks overdue tries again and fails overdue turns; woken four times a second."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = time.time()
            for asked in list(self._asked.values()):
                if asked.answer.done():
                    continue
                if now >= asked.turn.deadline:
                    message = f"turn {asked.turn.turn} of {asked.turn.trajectory_id} was not answered in time"
                    asked.answer.set_exception(DeadlineExceeded(message))
                elif asked.retry_at and now >= asked.retry_at:
                    self._ask_again(asked, now, "failed")
                elif not asked.retry_at and now >= asked.turn.try_deadline:
                    self._ask_again(asked, now, "try_deadline")

    def _ask_again(self, asked: _Asked, now: float, reason: str) -> None:
        asked.turn = asked.turn.model_copy(
            update={
                "try_number": asked.turn.try_number + 1,
                "try_deadline": min(asked.turn.deadline, now + self._try_deadline_s),
                "last_worker": None,
            }
        )
        asked.retry_at = 0.0
        self.retries += 1
        metrics.TURN_RETRIES.labels(reason).inc()
        self._publish(asked)
