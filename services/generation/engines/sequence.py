"""One live request of the torch engine: its tokens, and how far their KV is computed."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass, field

from pydantic import JsonValue

from services.generation.kv.client import Fetch, Fetched
from services.generation.protocol import EngineRequest, EngineResult, append_version
from shared.errors import RollArtError
from shared.events import FinishReason


@dataclass(slots=True, eq=False)
class Arrival:
    """The KV of a prompt that another worker has computed."""

    start: int
    """It is asked for from this token on."""
    size: int
    """Bytes that are to come."""
    fetch: Fetch | None = None
    """None before it is begun, and where there is nothing to fetch."""
    limit: float = math.inf
    """By the monotonic clock: after that the prompt is computed here."""
    fetched: Fetched | None = None
    """None while it is on its way, and once it has been written into blocks."""
    buffered: int = 0
    """Bytes of memory beside the blocks that it takes, or will."""
    used: int = 0
    """Tokens whose KV came this way and is in the blocks."""
    nbytes: int = 0
    """Bytes of those."""
    seconds: float = 0.0
    recomputed: str = ""
    """Why the prompt was computed here after all."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and sampled tokens of one request; those from `computed` on still go through the model."""

    request: EngineRequest
    limit: int
    """Tokens at which the context is full."""
    seed: int
    tokens: list[int]
    stops: frozenset[int]
    computed: int = 0
    """Tokens whose KV is stored, from position 0."""
    blocks: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    cached: int = 0
    arrival: Arrival | None = None
    """Of a prefilled request: its KV, on its way or here."""
    keep: bool = True
    """Whether the KV stays for the session's next turn."""
    blocked_at: float | None = None
    """When it first found too few blocks, though it was its turn; by the monotonic clock."""
    added_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None
    first_at: float | None = None

    @property
    def pending(self) -> int:
        """Tokens that the model has not seen under the live weights."""
        return len(self.tokens) - self.computed

    def uniform(self) -> float:
        """The number in [0, 1) that decides the next token: of seed, request and position alone, so that a
        draw does not depend on what else is in the batch."""
        key = f"{self.seed}:{self.request.request_id}:{len(self.logprobs)}".encode()
        bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return float((bits >> 11) * 2.0**-53)

    def restart(self) -> None:
        """Forget all KV: it will be computed again."""
        self.computed = 0
        self.cached = 0
        if self.arrival is not None:
            self.arrival.used = self.arrival.nbytes = 0

    def may_be_passed(self, seconds: float) -> bool:
        """Whether it has been kept from its place by want of blocks for less than so many seconds."""
        now = time.monotonic()
        if self.blocked_at is None:
            self.blocked_at = now
        return now - self.blocked_at < seconds

    def sampled(self) -> list[int]:
        """Tokens of the turn so far."""
        return self.tokens[len(self.request.prompt_ids) :]

    def append(self, token: int, logprob: float, *, version: int, now: float) -> FinishReason | None:
        """Take a sampled token; why sampling is over, or None where it goes on."""
        if self.first_at is None:
            self.first_at = now
        self.tokens.append(token)
        self.logprobs.append(logprob)
        append_version(self.versions, version)
        return self.ending()

    def ending(self) -> FinishReason | None:
        """Why sampling is over, or None where it goes on."""
        if self.tokens[-1] in self.stops:
            return FinishReason.STOP
        if len(self.tokens) >= self.limit:
            return FinishReason.CONTEXT
        if len(self.logprobs) >= self.request.sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def result(
        self,
        reason: FinishReason | None,
        *,
        now: float,
        error: RollArtError | None = None,
        kv_transfer_params: dict[str, JsonValue] | None = None,
    ) -> EngineResult:
        """What is told about the request at its end."""
        arrival = self.arrival
        started = now if self.started_at is None else self.started_at
        first = now if self.first_at is None else self.first_at
        return EngineResult(
            request_id=self.request.request_id,
            token_ids=self.sampled(),
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=reason,
            cached_tokens=self.cached,
            queued_s=started - self.added_at,
            prefill_s=first - started,
            decode_s=now - first,
            error=error,
            kv_transfer_params=kv_transfer_params,
            transferred_tokens=arrival.used if arrival else 0,
            transferred_bytes=arrival.nbytes if arrival else 0,
            transfer_s=arrival.seconds if arrival else 0.0,
            recomputed=arrival.recomputed if arrival else "",
        )
