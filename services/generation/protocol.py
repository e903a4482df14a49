"""What a generation engine is: the contract between a worker and the engines it can run.

`services/generation/worker.py` calls `add`, `abort`, `load` and `forget` between steps, all from the
one thread that owns the engine, and `step` for as long as there is work. This module is torch-free,
so that an engine without a model needs none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from shared.errors import Conflict, Invalid, RollArtError
from shared.events import FinishReason, Sampling
from shared.settings import GenerationSettings
from shared.weights import RawTensor


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One turn to sample."""

    request_id: str
    """Unique among the live requests of the engine. Draws depend on it and on the engine's seed alone."""
    session: str
    """Key under which KV is kept from turn to turn, for instance the trajectory."""
    prompt_ids: list[int]
    """All tokens so far. Shape (T,), T ≥ 1."""
    sampling: Sampling
    context_window: int
    """Prompt and new tokens together at most."""


@dataclass(frozen=True, slots=True)
class EngineResult:
    """How one request ended. `token_ids` and `logprobs` are aligned."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    """Log-probability under the distribution really drawn from (after temperature, top-k, top-p);
    for greedy decoding of the chosen token under softmax at temperature 1."""
    versions: list[tuple[int, int]]
    """Run-length: (policy version, number of tokens)."""
    finish_reason: FinishReason
    """Without meaning where `error` is set."""
    cached_tokens: int
    """Prompt tokens whose KV was reused."""
    queued_s: float
    """From `add` until a place in the batch was free."""
    prefill_s: float
    """From then until the first sampled token."""
    decode_s: float
    """From then until the last."""
    error: RollArtError | None = None
    """Why sampling failed; the tokens before the failure are kept."""


class Engine(Protocol):
    """Samples many requests together. Not thread-safe: one thread owns it."""

    @classmethod
    def create(cls, model_dir: Path, *, settings: GenerationSettings, seed: int) -> Self:
        """An engine for the model whose configuration lies in `model_dir` (no weights are read).

        Weights are random until `load`. Raises Invalid for a model that this engine cannot run.
        """
        ...

    @property
    def version(self) -> int:
        """Policy version of the weights that are live; 0 before the first load."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        ...

    @property
    def running(self) -> int:
        """Requests in the batch."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that wait for a place in the batch."""
        ...

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that live requests hold, 0 to 1."""
        ...

    @property
    def window(self) -> int:
        """Positions that the model has."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises Invalid where the prompt is empty, does not fit the context window or has ids outside
        the vocabulary, and Conflict where a live request has the same id.
        """
        ...

    def abort(self, request_id: str) -> bool:
        """End a request without a result and free what it holds. False where it is not live."""
        ...

    def step(self) -> list[EngineResult]:
        """Advance every request that has a place by at most one token; the results that this completed."""
        ...

    def load(self, weights: Mapping[str, RawTensor], *, version: int) -> None:
        """Replace the weights between two steps; live requests go on under the new ones.

        Raises WeightsInvalid for a missing or unknown name, a wrong shape or dtype, or a value that is
        not finite; then the old weights stay live, under their old version.
        """
        ...

    def forget(self, session: str) -> None:
        """Free the KV kept for a session that has ended."""
        ...


def check_prompt(request: EngineRequest, *, window: int, vocab_size: int) -> None:
    """Raises Invalid for a prompt that is empty, too long or outside the vocabulary."""
    prompt = request.prompt_ids
    if not prompt:
        raise Invalid("the prompt is empty")
    limit = min(request.context_window, window)
    if len(prompt) >= limit:
        raise Invalid(
            f"the prompt has {len(prompt)} tokens, the context window {limit}: no room for a new one"
        )
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise Invalid(f"token id {wrong} is outside the vocabulary of {vocab_size}")


def duplicate(request_id: str) -> Conflict:
    """The error for a request id that is live already."""
    return Conflict(f"request {request_id!r} is live already")


def append_version(versions: list[tuple[int, int]], version: int) -> None:
    """Count one more token of `version` in a run-length list, in place."""
    if versions and versions[-1][0] == version:
        versions[-1] = (version, versions[-1][1] + 1)
    else:
        versions.append((version, 1))
