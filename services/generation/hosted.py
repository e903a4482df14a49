"""What a worker holds: requests in hand, and engines with what they are doing. Used by `worker.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite

from services.generation.protocol import Engine, EngineResult
from shared.bus import Delivery
from shared.errors import Internal, RollArtError
from shared.events import (
    DecodeRequested,
    FinishReason,
    GenerateRequested,
    Prefilled,
    PrefillRequested,
    TurnRequested,
)

Assigned = GenerateRequested | PrefillRequested | DecodeRequested

UNHEALTHY_AFTER = 16
"""Faulty results of one engine, with no good one in between, after which its process ends."""


@dataclass(slots=True)
class InHand:
    """A request in an engine, or on its way to one."""

    delivery: Delivery
    request: Assigned
    streamed: int = 0
    """Tokens that the asker has been told of."""
    streamed_at: float = 0.0

    @property
    def turn(self) -> TurnRequested:
        """What was asked for."""
        return self.request.turn

    @property
    def prefilled(self) -> Prefilled | None:
        """What a prefill worker has done of it."""
        return self.request.prefilled if isinstance(self.request, DecodeRequested) else None

    @property
    def min_version(self) -> int:
        """Oldest policy version to go on with: KV is of no use to weights older than those that made it."""
        prefilled = self.prefilled
        oldest = self.turn.min_version
        return oldest if prefilled is None else max(oldest, prefilled.version)

    @property
    def attempt_key(self) -> str:
        """As aborts of single trajectories name it."""
        return f"{self.turn.trajectory_id}/{self.turn.attempt}"


@dataclass(slots=True)
class Hosted:
    """One policy, or pinned version of one, in its own engine."""

    reference: str
    engine: Engine
    live: dict[str, InHand] = field(default_factory=dict)
    """Request id → what asked."""
    held: list[InHand] = field(default_factory=list)
    """Turns that want a newer version than is live."""
    handed_over: dict[str, InHand] = field(default_factory=dict)
    """Request id → what was prefilled here and goes on elsewhere: its KV may still wait to be fetched."""
    used_at: float = 0.0
    faults: int = 0
    """Faulty results since the last good one."""

    @property
    def idle(self) -> bool:
        """Nothing would be lost by unloading it."""
        return not self.live and not self.held

    def end(self, request_id: str) -> InHand | None:
        """Abort a request, and free its KV where it goes on elsewhere; what was in hand of it here."""
        held = self.live.pop(request_id, None)
        if held is not None or self.handed_over.pop(request_id, None) is not None:
            self.engine.abort(request_id)
        return held

    def end_where(self, gone: Callable[[InHand], bool]) -> list[InHand]:
        """Abort every request that is `gone`; those that were in hand here."""
        ended = [self.end(i) for i, held in [*self.live.items(), *self.handed_over.items()] if gone(held)]
        ended += [held for held in self.held if gone(held)]
        self.held = [held for held in self.held if not gone(held)]
        return [held for held in ended if held is not None]

    def judge(self, error: RollArtError | None) -> None:
        """Count how a request ended. Raises Internal where the engine does nothing right any more."""
        if not isinstance(error, Internal):
            self.faults = 0
            return
        self.faults += 1
        if self.faults >= UNHEALTHY_AFTER:
            state = f"policy {self.reference!r} version {self.engine.version}"
            raise Internal(f"engine unhealthy: {self.faults} faulty results in a row, {state}") from error


def fault_of(result: EngineResult) -> RollArtError | None:
    """Why a result cannot be an answer: the engine's own error, or numbers that no reply may carry."""
    if result.error is not None:
        return result.error
    count = len(result.token_ids)
    if len(result.logprobs) != count or sum(tokens for _, tokens in result.versions) != count:
        return Internal("the engine's arrays differ in length")
    if not count and result.finish_reason is not FinishReason.CONTEXT:
        return Internal("the engine sampled no token")
    try:
        finite = isfinite(sum(result.logprobs))
    except TypeError:
        finite = False
    return None if finite else Internal("a log-probability is not finite")
