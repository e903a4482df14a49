"""One request in vLLM: how it is asked, what has come of it so far, and what is told at its end."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import Any

from services.generation.protocol import EngineRequest, EngineResult
from shared.errors import RollArtError
from shared.events import FinishReason, Prefilled

FETCH_BY = "rollart_fetch_by"
"""Among the parameters of a transfer: until when (Unix time) a decode worker may begin it."""
_NOT_FOR_VLLM = (FETCH_BY, "remote_prefill_cached_tokens")
"""The latter is counted by the prefill worker; here it would hide what this engine really computed."""
_SKEW_S = 1.0
"""By how much clocks of two machines may differ."""


@dataclass(slots=True, eq=False)
class Live:
    """A request on vLLM's loop."""

    request: EngineRequest
    internal_id: str
    version: int
    """Live when it began."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Any] = field(default_factory=list)
    """vLLM's own account of which weights drew which tokens."""
    cached: int | None = None
    params: dict[str, Any] | None = None
    """What vLLM says of how its KV is fetched."""
    stopped: bool = False
    recomputed: str = ""
    fetching: bool = False
    """Whether it waits for KV of a prefill worker."""
    added_at: float = field(default_factory=time.time)
    first_at: float = 0.0
    ended_at: float = 0.0
    metrics: Any = None
    aborted: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def hands_over(self) -> bool:
        """Whether it is to go on at a decode worker."""
        return self.request.prefill_only

    def take(self, output: Any) -> None:
        """New tokens, or the end."""
        completion = output.outputs[0]
        now = time.time()
        if completion.token_ids and not self.token_ids:
            self.first_at = now
            self.fetching = False
        self.ended_at = now
        self.token_ids += completion.token_ids
        for token, found in zip(completion.token_ids, completion.logprobs or [], strict=True):
            self.logprobs.append(found[token].logprob)
        if output.num_cached_tokens is not None and self.cached is None:
            self.cached = output.num_cached_tokens
        if output.finished:
            self.spans = completion.weight_versions or []
            self.stopped = completion.finish_reason == "stop"
            self.params = output.kv_transfer_params
            self.metrics = output.metrics

    def swapped(self) -> None:
        """New weights: what was cached of the prompt has been dropped and is computed again."""
        if self.cached is not None:
            self.cached = 0

    def restart(self, internal_id: str, *, version: int) -> None:
        """Nothing has come yet: asked anew, under other weights."""
        self.internal_id, self.version = internal_id, version
        self.task, self.fetching = None, False

    def versions(self) -> list[tuple[int, int]]:
        """Run-length: (policy version, tokens)."""
        if not self.spans:
            return [(self.version, len(self.token_ids))] if self.token_ids else []
        return [(int(span.version), span.end - span.start) for span in self.spans if span.end > span.start]


def leased_id(result: EngineResult) -> str:
    """By which id vLLM knows a result's KV that waits to be fetched; empty where there is none."""
    return str((result.kv_transfer_params or {}).get("remote_request_id") or "")


def room(live: Live, *, window: int) -> int:
    """Tokens that can still be sampled before the context is full."""
    return min(live.request.context_window, window) - len(live.request.prompt_ids)


def unusable(prefilled: Prefilled, *, version: int) -> str:
    """Why KV is not fetched; empty where it is."""
    if prefilled.version != version:
        return "version"
    until = prefilled.kv_transfer_params.get(FETCH_BY, math.inf)
    return "late" if not isinstance(until, int | float) or time.time() > until else ""


def sampling_params(live: Live, *, window: int) -> Any:
    """What vLLM is asked for. KV of another version than is live is not fetched, nor what may have been freed
    and be another's by now: vLLM would notice neither."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    request = live.request
    sampling = request.sampling
    most = min(sampling.max_tokens, room(live, window=window))
    extra: dict[str, Any] = {}
    if live.hands_over and most > 1:
        extra["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
        most = 1
    prefilled = request.prefilled
    if prefilled is not None:
        live.recomputed = unusable(prefilled, version=live.version)
        if not live.recomputed:
            live.fetching = True
            extra["kv_transfer_params"] = {
                name: value
                for name, value in prefilled.kv_transfer_params.items()
                if name not in _NOT_FOR_VLLM
            }
    return SamplingParams(
        max_tokens=most,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=extra or None,
    )


def outcome(live: Live, *, window: int, lease_s: float, error: RollArtError | None = None) -> EngineResult:
    """What is told about a request at its end; where it goes on, its KV can be fetched for `lease_s`."""
    request, count = live.request, len(live.token_ids)
    reason: FinishReason | None = FinishReason.LENGTH
    if live.stopped:
        reason = FinishReason.STOP
    elif count >= room(live, window=window):
        reason = FinishReason.CONTEXT
    most = min(request.sampling.max_tokens, room(live, window=window))
    goes_on = request.prefill_only and not live.stopped and most > 1 and error is None and count == 1
    cached, recomputed = live.cached or 0, live.recomputed
    if request.prefilled is not None and not recomputed and not cached and len(request.prompt_ids) > 1:
        recomputed = "gone"
    params = None
    if goes_on:
        params = (live.params or {}) | {FETCH_BY: time.time() + lease_s - _SKEW_S}
    queued_s, prefill_s, decode_s = _times(live)
    return EngineResult(
        request_id=request.request_id,
        token_ids=live.token_ids,
        logprobs=live.logprobs,
        versions=live.versions(),
        finish_reason=None if goes_on else reason,
        cached_tokens=cached,
        queued_s=queued_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        error=error,
        kv_transfer_params=params,
        transferred_tokens=cached if request.prefilled is not None and not recomputed else 0,
        recomputed=recomputed,
    )


def _times(live: Live) -> tuple[float, float, float]:
    """Queued, prefill and decode seconds; by vLLM's clocks where it tells them."""
    stats = live.metrics
    first = live.first_at or live.ended_at or live.added_at
    decode_s = max(live.ended_at - first, 0.0)
    if stats is not None and stats.scheduled_ts and stats.first_token_ts:
        prefill_s = max(stats.first_token_ts - stats.scheduled_ts, 0.0)
        return max(stats.scheduled_ts - stats.queued_ts, 0.0), prefill_s, decode_s
    return 0.0, max(first - live.added_at, 0.0), decode_s
