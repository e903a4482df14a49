"""What a generation engine is: the contract between a worker and the engines it can run.

`services/generation/worker.py` calls everything from the one thread that owns the engine, `step` for as long
as there is work; only a WeightLoad is filled by another thread, while the engine goes on. This module is
torch-free, so that an engine without a model needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from pydantic import JsonValue

from shared.errors import Conflict, Invalid, RollArtError
from shared.events import FinishReason, Prefilled, Sampling
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
    prefill_only: bool = False
    """Stop after the first token, where that does not end the turn anyway, and keep the prompt's KV under a
    lease until it is fetched, aborted, or `kv_lease_s` have passed."""
    prefilled: Prefilled | None = None
    """What a prefill worker has done already: fetch the prompt's KV from it instead of computing it. Where
    that does not succeed within `kv_fetch_timeout_s`, or the KV is of another version than is live, the
    prompt is computed here and the result says why. The result's tokens include those of the prefill worker,
    or, in an engine that draws the first token anew, one of its own in their place."""


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
    finish_reason: FinishReason | None
    """None where the turn goes on at a decode worker. Without meaning where `error` is set."""
    cached_tokens: int
    """Prompt tokens whose KV was reused or fetched, and not computed by this engine."""
    queued_s: float
    """From `add` until a place in the batch was free."""
    prefill_s: float
    """From then until the first sampled token."""
    decode_s: float
    """From then until the last."""
    error: RollArtError | None = None
    """Why sampling failed; the tokens before the failure are kept."""
    kv_transfer_params: dict[str, JsonValue] | None = None
    """Of a request that was prefilled only and goes on: how its KV is fetched, for `Prefilled`."""
    transferred_tokens: int = 0
    """Prompt tokens whose KV was fetched from a prefill worker."""
    transferred_bytes: int = 0
    transfer_s: float = 0.0
    recomputed: str = ""
    """Of a request with `prefilled`: why the prompt was computed here after all; empty where the KV was used.
    `gone` (freed, expired or its worker dead), `late`, `version`, `corrupt`, `incompatible`, or `evicted`
    (the prefix that was here already, when only the rest was asked for)."""


class WeightLoad(Protocol):
    """One new version on its way into an engine.

    `add` and `check` are called by the thread that pulls, while the engine goes on with the old weights, and
    touch nothing that the engine uses; `swap` by the engine's thread. What is not swapped in leaves nothing
    behind.
    """

    def add(self, tensors: Mapping[str, RawTensor]) -> None:
        """Take in one bucket.

        Raises WeightsInvalid for an unknown name, a wrong shape or dtype, or a value that is not finite.
        """
        ...

    def check(self) -> None:
        """Raises WeightsInvalid where tensors are still missing."""
        ...

    def swap(self) -> None:
        """Make it the live version, between two steps: live requests and their tokens stay, all KV of the old
        weights (kept sessions' too) is dropped and computed again, sampling goes on under the new weights.

        Raises WeightsInvalid where it was not checked; then, as after any fault, the old weights stay live
        under their old version.
        """
        ...


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
        """End a request without a result and free what it holds, the KV under its lease too. False where
        there is none of either."""
        ...

    def step(self) -> list[EngineResult]:
        """Advance every request that has a place by at most one token; the results that this completed."""
        ...

    def begin_load(self, version: int) -> WeightLoad:
        """An update to this version, empty so far. May be called by any thread."""
        ...

    def peek(self, request_id: str, start: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities that a live request has sampled so far, from the `start`-th on."""
        ...

    def attach(self, wake: Callable[[], None]) -> None:
        """`wake` is to be called, by any thread, when work has come that no call has brought: KV or a result
        has arrived. Called once, before the first `add`."""
        ...

    @property
    def kv_leases(self) -> int:
        """Prefilled prompts whose KV waits to be fetched."""
        ...

    def tend(self) -> None:
        """House-keeping, a few times a second: free what has expired."""
        ...

    def close(self) -> None:
        """Free everything, end threads and processes. Nothing is called afterwards."""
        ...

    def forget(self, session: str) -> None:
        """Free the KV kept for a session that has ended."""
        ...


def load_weights(engine: Engine, weights: Mapping[str, RawTensor], *, version: int) -> None:
    """A whole version at once, for an engine that has nothing else to do. Raises WeightsInvalid."""
    update = engine.begin_load(version)
    update.add(weights)
    update.check()
    update.swap()


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
