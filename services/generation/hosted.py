"""What a worker holds: requests in hand, and engines with what they are doing. Used by `worker.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

from services.generation.protocol import Engine, EngineResult
from shared.bus import Delivery
from shared.errors import Internal, RollArtError
from shared.events import FinishReason, TurnRequested

UNHEALTHY_AFTER = 16
"""Faulty results of one engine, with no good one in between, after which its process ends."""


@dataclass(slots=True)
class InHand:
    """A request in an engine, or on its way to one."""

    delivery: Delivery
    turn: TurnRequested


@dataclass(slots=True)
class Hosted:
    """One policy, or pinned version of one, in its own engine."""

    reference: str
    engine: Engine
    live: dict[str, InHand] = field(default_factory=dict)
    """Request id → what asked."""
    held: list[InHand] = field(default_factory=list)
    """Turns that want a newer version than is live."""
    used_at: float = 0.0
    faults: int = 0
    """Faulty results since the last good one."""

    @property
    def idle(self) -> bool:
        """Nothing would be lost by unloading it."""
        return not self.live and not self.held

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
