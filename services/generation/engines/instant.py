"""An engine without a model: answers at once, to measure everything around it (`rollart bench turn`).

Torch-free. Run by `services/generation/worker.py` where GENERATION__ENGINE is `instant`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from services.generation.protocol import EngineRequest, EngineResult, WeightLoad, check_prompt, duplicate
from shared.errors import Invalid
from shared.events import FinishReason
from shared.settings import GenerationSettings
from shared.weights import RawTensor

_ANY_WINDOW = 1 << 20
_ANY_VOCABULARY = 1 << 31


class InstantEngine:
    """See `services.generation.protocol.Engine`.

    Every request is answered by the next step with `max_tokens` tokens: ids 1, 2, 3, … (below the
    vocabulary's size) and log-probabilities that are -0.1234567 times the token's number, floats of
    realistic length. Stop tokens end it as in any engine. There is no KV to move: of a split turn the prefill
    gives the first token and the decode all of them, as if the KV had come.
    """

    def __init__(self, *, window: int, vocab_size: int, max_batch: int) -> None:
        self._window = window
        self._vocab_size = vocab_size
        self._max_batch = max_batch
        self._version = 0
        self._scripts: dict[int, tuple[list[int], list[float]]] = {}
        self._waiting: dict[str, tuple[EngineRequest, float]] = {}

    @classmethod
    def create(cls, model_dir: Path, *, settings: GenerationSettings, seed: int) -> Self:
        """Reads the window and the vocabulary from `config.json`, where there is one.

        Raises Invalid for one that is not JSON. The seed plays no part: nothing is drawn.
        """
        path = model_dir / "config.json"
        window, vocab_size = _ANY_WINDOW, _ANY_VOCABULARY
        if path.is_file():
            try:
                config = json.loads(path.read_bytes())
                window = int(config.get("max_position_embeddings") or window)
                vocab_size = int(config.get("vocab_size") or vocab_size)
            except (ValueError, AttributeError, TypeError) as error:
                raise Invalid(f"{path} is no model configuration: {error}") from error
        return cls(window=window, vocab_size=vocab_size, max_batch=settings.max_batch)

    @property
    def version(self) -> int:
        """Version of the last load; 0 before."""
        return self._version

    @property
    def has_work(self) -> bool:
        """Whether a request waits."""
        return bool(self._waiting)

    @property
    def running(self) -> int:
        """0: a request lives for one step."""
        return 0

    @property
    def waiting(self) -> int:
        """Requests that the next steps answer."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """0: there is no KV."""
        return 0.0

    @property
    def window(self) -> int:
        """Positions of the model described by `config.json`, or 2²⁰."""
        return self._window

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises Invalid and Conflict as the protocol says."""
        if request.request_id in self._waiting:
            raise duplicate(request.request_id)
        check_prompt(request, window=self._window, vocab_size=self._vocab_size)
        self._waiting[request.request_id] = (request, time.perf_counter())

    def abort(self, request_id: str) -> bool:
        """Drop a request; False where it is not live."""
        return self._waiting.pop(request_id, None) is not None

    def step(self) -> list[EngineResult]:
        """Answer the oldest `max_batch` requests."""
        now = time.perf_counter()
        chosen = list(self._waiting)[: self._max_batch]
        return [self._answer(*self._waiting.pop(request_id), now=now) for request_id in chosen]

    def begin_load(self, version: int) -> WeightLoad:
        """An update that takes any weights."""
        return _VersionOnly(self, version)

    def peek(self, request_id: str, start: int) -> tuple[list[int], list[float]]:
        """Nothing: a request has no token before it has all."""
        return [], []

    def attach(self, wake: Callable[[], None]) -> None:
        """Work comes by `add` alone."""

    @property
    def kv_leases(self) -> int:
        """0: there is no KV."""
        return 0

    def tend(self) -> None:
        """Nothing expires."""

    def close(self) -> None:
        """Nothing is held."""

    def forget(self, session: str) -> None:
        """Nothing is kept."""

    def _script(self, count: int) -> tuple[list[int], list[float]]:
        """Ids and log-probabilities of a reply of so many tokens; made once for each length."""
        known = self._scripts.get(count)
        if known is None:
            last = self._vocab_size - 1
            token_ids = [min(1 + i % max(1, last), last) for i in range(count)]
            known = self._scripts[count] = (token_ids, [-0.1234567 * (i + 1) for i in range(count)])
        return known

    def _answer(self, request: EngineRequest, added_at: float, *, now: float) -> EngineResult:
        sampling = request.sampling
        room = min(request.context_window, self._window) - len(request.prompt_ids)
        count = min(sampling.max_tokens, room)
        token_ids, logprobs = self._script(count)
        reason = FinishReason.CONTEXT if count == room else FinishReason.LENGTH
        if sampling.stop_token_ids:
            stops = sampling.stop_token_ids
            stop = next((i for i, token in enumerate(token_ids) if token in stops), None)
            if stop is not None:
                token_ids, logprobs, reason = token_ids[: stop + 1], logprobs[: stop + 1], FinishReason.STOP
        goes_on = request.prefill_only and len(token_ids) > 1
        if goes_on:
            token_ids, logprobs = token_ids[:1], logprobs[:1]
        prefilled = len(request.prompt_ids) if request.prefilled is not None else 0
        return EngineResult(
            request_id=request.request_id,
            token_ids=token_ids,
            logprobs=logprobs,
            versions=[(self._version, len(token_ids))],
            finish_reason=None if goes_on else reason,
            cached_tokens=prefilled,
            queued_s=now - added_at,
            prefill_s=0.0,
            decode_s=0.0,
            kv_transfer_params={"remote_request_id": request.request_id} if goes_on else None,
            transferred_tokens=prefilled,
        )


class _VersionOnly:
    """See `services.generation.protocol.WeightLoad`."""

    def __init__(self, engine: InstantEngine, version: int) -> None:
        self._engine = engine
        self._version = version

    def add(self, tensors: Mapping[str, RawTensor]) -> None:
        """They are of no use here."""

    def check(self) -> None:
        """Nothing can be missing."""

    def swap(self) -> None:
        """Take the version."""
        self._engine._version = self._version
