"""What a worker says of a turn: its answer, its hand-over, its progress. Used by `worker.py`."""

from __future__ import annotations

import time

from services.generation.hosted import Hosted, InHand
from services.generation.protocol import EngineResult
from shared.bus import Publisher
from shared.events import (
    DecodeRequested,
    FinishReason,
    Handover,
    Prefilled,
    PrefillRequested,
    TurnGenerated,
    TurnProgressed,
    TurnTimings,
)
from shared.topics import REPLIES

_STREAM_S = 0.05
"""Between two reports of a streamed turn."""


def answer(held: InHand, result: EngineResult, *, worker_id: str, device_class: str) -> TurnGenerated:
    """The whole turn, for its asker; of a split one, times of both workers added up."""
    turn, prefilled = held.turn, held.prefilled
    timings = TurnTimings(queued_s=result.queued_s, prefill_s=result.prefill_s, decode_s=result.decode_s)
    handover = None
    if prefilled is not None:
        timings = TurnTimings(
            queued_s=prefilled.queued_s + result.queued_s,
            prefill_s=prefilled.prefill_s,
            # Its first token here is its second.
            decode_s=result.prefill_s + result.decode_s,
        )
        handover = Handover(
            prefill_worker=prefilled.worker_id,
            prefill_class=prefilled.device_class,
            prefill_cached_tokens=prefilled.cached_tokens,
            transferred_tokens=result.transferred_tokens,
            transferred_bytes=result.transferred_bytes,
            transfer_s=result.transfer_s,
            recomputed=result.recomputed,
        )
    assert result.finish_reason is not None
    return TurnGenerated(
        run_id=turn.run_id,
        trajectory_id=turn.trajectory_id,
        attempt=turn.attempt,
        turn=turn.turn,
        try_number=turn.try_number,
        asker=turn.asker,
        worker_id=worker_id,
        device_class=device_class,
        token_ids=result.token_ids,
        logprobs=result.logprobs,
        versions=result.versions,
        finish_reason=result.finish_reason,
        cached_tokens=result.cached_tokens,
        timings=timings,
        handover=handover,
    )


def hand_over(
    request: PrefillRequested, result: EngineResult, *, worker_id: str, device_class: str, version: int
) -> DecodeRequested:
    """The rest of a split turn, for its decode worker."""
    assert result.kv_transfer_params is not None
    target = request.decode
    return DecodeRequested(
        turn=request.turn,
        worker_id=target.worker_id,
        device_class=target.device_class,
        prefilled=Prefilled(
            worker_id=worker_id,
            device_class=device_class,
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            versions=result.versions,
            version=version,
            cached_tokens=result.cached_tokens,
            queued_s=result.queued_s,
            prefill_s=result.prefill_s,
            kv_transfer_params=result.kv_transfer_params,
        ),
        fallback=request.fallback,
        assigned_at=request.assigned_at,
    )


def report_progress(hosted: Hosted, publisher: Publisher) -> bool:
    """Tell askers that stream what is new, now and then; whether there is still one."""
    now = time.monotonic()
    streams = [(request_id, held) for request_id, held in hosted.live.items() if held.turn.stream]
    for request_id, held in streams:
        if now - held.streamed_at < _STREAM_S:
            continue
        token_ids, logprobs = hosted.engine.peek(request_id, held.streamed)
        if token_ids:
            publisher.publish(
                REPLIES,
                _progress(held, token_ids, logprobs),
                partition=held.turn.reply_partition,
                run_id=held.turn.run_id,
                traceparent=held.delivery.traceparent,
            )
            held.streamed += len(token_ids)
            held.streamed_at = now
    return bool(streams)


def _progress(held: InHand, token_ids: list[int], logprobs: list[float]) -> TurnProgressed:
    turn = held.turn
    return TurnProgressed(
        run_id=turn.run_id,
        trajectory_id=turn.trajectory_id,
        attempt=turn.attempt,
        turn=turn.turn,
        try_number=turn.try_number,
        asker=turn.asker,
        start=held.streamed,
        token_ids=token_ids,
        logprobs=logprobs,
    )


def context_full(request_id: str) -> EngineResult:
    """A turn with no room for a token, in the rollout's window or in the model's own."""
    return EngineResult(
        request_id=request_id,
        token_ids=[],
        logprobs=[],
        versions=[],
        finish_reason=FinishReason.CONTEXT,
        cached_tokens=0,
        queued_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
    )
