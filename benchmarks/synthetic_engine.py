"""An engine that computes nothing and takes the time that a GPU would, for `rollart bench pd`.

Run by the generation service where GENERATION__ENGINE is `benchmarks.synthetic_engine:H800`, `:H20`, or
`:ByClass` (device class `compute` is an H800, `bandwidth` an H20). The speeds and what they assume are in
`benchmarks/gpu_speeds.py`. Torch-free.

Two things make a run of minutes one of seconds. Time: every duration is divided by `time_divisor`, and slept.
Tokens: one id on the wire stands for `tokens_per_id` tokens, so that a step, which gives every running
sequence one id, is that many passes of the GPU, and long enough to be slept exactly. Both are read from the
object `synthetic` in the model's `config.json`.

What is modelled: continuous batching; prompts in chunks of GENERATION__PREFILL_TOKENS, first come, first
served, in the same pass as the decodes of others, which wait for it; the KV of a session kept from turn to
turn while there is memory, the least recently used given up first; requests that wait for memory; hand-over
of KV from a prefill to a decode worker, of those tokens that the decode worker has not kept. What is not: any
loss of time between passes, kernels of different quality, and the memory that a handed-over prompt holds
until it is fetched.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from pydantic import JsonValue, ValidationError

from benchmarks import gpu_speeds
from benchmarks.gpu_speeds import QWEN3_8B, Gpu
from benchmarks.synthetic_parts import (
    KeptKv,
    Sequence,
    SyntheticModel,
    TransferParams,
    VersionOnly,
    read_model,
)
from services.generation.protocol import (
    EngineRequest,
    EngineResult,
    WeightLoad,
    append_version,
    check_prompt,
    duplicate,
)
from shared.errors import FieldProblem, Invalid
from shared.events import FinishReason
from shared.settings import GenerationSettings

_LOGPROB = -0.1234567
_MOST_BEHIND_S = 0.25
"""What an engine that was kept from running makes up for at most."""
_WAIT_S = 0.002
"""For KV on its way, before looking at commands again."""


class SyntheticEngine:
    """See `services.generation.protocol.Engine`. Ids are 1, 2, 3, …; every turn has `max_tokens` of them, but
    for stop tokens and the window."""

    def __init__(self, gpu: Gpu, config: SyntheticModel, *, settings: GenerationSettings) -> None:
        self._gpu = gpu
        self._config = config
        self._settings = settings
        self._per_id = config.synthetic.tokens_per_id
        self._divisor = config.synthetic.time_divisor
        self._capacity = gpu_speeds.kv_capacity(gpu) // self._per_id
        self._engine_id = secrets.token_hex(8)
        self._version = 0
        self._waiting: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}
        self._kept = KeptKv()
        self._leases: dict[str, float] = {}
        self.gpu_s = 0.0
        """Seconds of the GPU taken so far."""
        self._clock = 0.0
        self._link_free_at = 0.0

    @classmethod
    def create(cls, model_dir: Path, *, settings: GenerationSettings, seed: int) -> Self:
        """Raises Invalid for a `config.json` that is wrong. The seed plays no part: nothing is drawn."""
        return cls(cls.gpu_of(settings), read_model(model_dir), settings=settings)

    @classmethod
    def gpu_of(cls, settings: GenerationSettings) -> Gpu:
        """The GPU whose speed it has."""
        raise NotImplementedError

    @property
    def version(self) -> int:
        """Version of the last load; 0 before."""
        return self._version

    @property
    def has_work(self) -> bool:
        """Whether a request is live."""
        return bool(self._waiting or self._running)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for memory, a place, or their KV."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the memory for KV that live requests may come to need."""
        return min(1.0, self._promised() / self._capacity)

    @property
    def window(self) -> int:
        """Positions of the model, in ids."""
        return self._config.max_position_embeddings

    @property
    def kv_leases(self) -> int:
        """Prefilled prompts that were handed over of late."""
        return len(self._leases)

    def attach(self, wake: Callable[[], None]) -> None:
        """`step` itself waits for KV."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises Invalid and Conflict as the protocol says."""
        if request.request_id in self._waiting or request.request_id in self._running:
            raise duplicate(request.request_id)
        check_prompt(request, window=self.window, vocab_size=self._config.vocab_size)
        room = min(
            min(request.context_window, self.window) - len(request.prompt_ids), request.sampling.max_tokens
        )
        sequence = Sequence(request, time.perf_counter(), room)
        if sequence.most > self._capacity:
            raise Invalid(f"the turn needs {sequence.most} places for KV, the GPU has {self._capacity}")
        if request.prefilled is not None:
            self._fetch(sequence)
        self._waiting[request.request_id] = sequence

    def abort(self, request_id: str) -> bool:
        """End a request, or a lease."""
        live = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
        return self._leases.pop(request_id, None) is not None or live is not None

    def forget(self, session: str) -> None:
        """Drop what is kept of a session."""
        self._kept.forget(session)

    def tend(self) -> None:
        """End leases whose time is over."""
        now = time.time()
        self._leases = {name: until for name, until in self._leases.items() if until > now}

    def close(self) -> None:
        """Nothing is held outside this process's memory."""

    def peek(self, request_id: str, start: int) -> tuple[list[int], list[float]]:
        """What a live request has sampled."""
        live = self._running.get(request_id) or self._waiting.get(request_id)
        tokens = live.sampled[start:] if live is not None else []
        return tokens, [_LOGPROB] * len(tokens)

    def begin_load(self, version: int) -> WeightLoad:
        """An update that takes any weights."""
        return VersionOnly(version, self._swap_to)

    def step(self) -> list[EngineResult]:
        """Admit, take the time of `tokens_per_id` passes, and give every decoding sequence one id."""
        self._admit()
        if not self._running:
            # What waits, waits for its KV: the GPU is idle.
            ready = min((s.ready_at for s in self._waiting.values()), default=0.0)
            time.sleep(min(_WAIT_S, max(0.0, ready - time.perf_counter())))
            return []
        decoding = [s for s in self._running.values() if s.computed >= s.length]
        seconds, prefilled = self._pass(decoding)
        self.gpu_s += seconds
        self._sleep(seconds)
        now = time.perf_counter()
        results = [r for s in prefilled if (r := self._hand_over(s, now)) is not None]
        results += [r for s in decoding if (r := self._advance(s, now)) is not None]
        return results

    def _swap_to(self, version: int) -> None:
        self._version = version
        self._kept.clear()
        for sequence in self._running.values():
            sequence.computed = 0

    def _pass(self, decoding: list[Sequence]) -> tuple[float, list[Sequence]]:
        """Seconds of the GPU for one step, and the sequences whose prompt it completes.

        Where nothing decodes, one pass; else one for each token of an id, of which the first ones take
        prompts along.
        """
        read = sum(s.length for s in decoding) * self._per_id
        passes = self._per_id if decoding else 1
        seconds, done = 0.0, 0
        completed: list[Sequence] = []
        prompts = [s for s in self._running.values() if s.computed < s.length]
        while prompts and done < passes:
            budget = max(1, (self._settings.prefill_tokens - len(decoding)) // self._per_id)
            tokens = attended = 0
            while prompts and budget:
                sequence = prompts[0]
                taken = min(budget, sequence.length - sequence.computed)
                start = sequence.computed * self._per_id
                added = taken * self._per_id
                attended += start * added + added * added // 2
                tokens += added
                budget -= taken
                sequence.computed += taken
                if sequence.computed == sequence.length:
                    completed.append(prompts.pop(0))
            seconds += gpu_speeds.pass_s(
                self._gpu, tokens=tokens + len(decoding), attended=attended + read, kv_tokens=read
            )
            done += 1
        if decoding:
            one = gpu_speeds.pass_s(self._gpu, tokens=len(decoding), attended=read, kv_tokens=read)
            seconds += one * (passes - done)
        return seconds, completed

    def _sleep(self, seconds: float) -> None:
        """By an own clock, so that what a sleep takes too long is made up by the next."""
        now = time.perf_counter()
        start = self._clock if now - self._clock < _MOST_BEHIND_S else now
        self._clock = start + seconds / self._divisor
        time.sleep(max(0.0, self._clock - now))

    def _admit(self) -> None:
        """Place what there is room for, in the order of coming."""
        now = time.perf_counter()
        if not self._running:
            self._clock = now
        for request_id, sequence in list(self._waiting.items()):
            if sequence.ready_at > now:
                continue
            free = self._capacity - self._promised()
            if len(self._running) >= self._settings.max_batch or sequence.most > free:
                return
            del self._waiting[request_id]
            self._place(sequence, now)
            self._running[request_id] = sequence

    def _place(self, sequence: Sequence, now: float) -> None:
        prompt, prefilled = sequence.request.prompt_ids, sequence.request.prefilled
        kept = self._kept.common(sequence.request.session, prompt)
        self._kept.forget(sequence.request.session)
        self._kept.shrink(self._capacity - self._promised() - sequence.most)
        if prefilled is not None:
            if not sequence.recomputed and prefilled.version != self._version:
                sequence.recomputed = "version"
            # The first id, of which the prefill worker has sampled the first token.
            sequence.sampled = list(prefilled.token_ids)
            sequence.versions = list(prefilled.versions)
        if prefilled is not None and not sequence.recomputed:
            sequence.cached = len(prompt)
            sequence.computed = sequence.length
        else:
            sequence.transferred, sequence.transfer_s = 0, 0.0
            sequence.cached = sequence.computed = min(kept, len(prompt) - 1)
        sequence.placed_at = now

    def _fetch(self, sequence: Sequence) -> None:
        """Its KV comes over the link, after that of others."""
        prompt, prefilled = sequence.request.prompt_ids, sequence.request.prefilled
        assert prefilled is not None
        try:
            params = TransferParams.model_validate(prefilled.kv_transfer_params)
        except ValidationError:
            sequence.recomputed = "incompatible"
            return
        if params.remote_num_tokens != len(prompt):
            sequence.recomputed = "incompatible"
        elif params.expires_at <= time.time():
            sequence.recomputed = "gone"
        else:
            now = sequence.added_at
            sequence.transferred = len(prompt) - self._kept.common(sequence.request.session, prompt)
            seconds = gpu_speeds.transfer_s(sequence.transferred * self._per_id) / self._divisor
            self._link_free_at = max(self._link_free_at, now) + seconds
            sequence.ready_at = self._link_free_at
            sequence.transfer_s = sequence.ready_at - now

    def _hand_over(self, sequence: Sequence, now: float) -> EngineResult | None:
        """Of a prompt that is computed: what the decode worker needs, where one goes on with it."""
        request = sequence.request
        if not request.prefill_only or sequence.decoded or sequence.sampled:
            return None
        self._sample(sequence, now)
        del self._running[request.request_id]
        self._keep(sequence)
        expires_at = time.time() + self._settings.kv_lease_s
        self._leases[request.request_id] = expires_at
        params = TransferParams(
            remote_engine_id=self._engine_id,
            remote_request_id=request.request_id,
            remote_num_tokens=len(request.prompt_ids),
            expires_at=expires_at,
        )
        return self._result(sequence, now, reason=None, params=params.model_dump(mode="json"))

    def _advance(self, sequence: Sequence, now: float) -> EngineResult | None:
        """All tokens of one more id are decoded."""
        if sequence.decoded == len(sequence.sampled):
            self._sample(sequence, now)
        sequence.decoded += 1
        sequence.computed = sequence.length
        stopped = sequence.sampled[-1] in sequence.request.sampling.stop_token_ids
        if not stopped and sequence.decoded < sequence.room:
            return None
        full = sequence.room < sequence.request.sampling.max_tokens
        reason = FinishReason.CONTEXT if full else FinishReason.LENGTH
        del self._running[sequence.request.request_id]
        self._keep(sequence)
        return self._result(sequence, now, reason=FinishReason.STOP if stopped else reason)

    def _sample(self, sequence: Sequence, now: float) -> None:
        sequence.first_at = sequence.first_at or now
        sequence.sampled.append(1 + len(sequence.sampled) % (self._config.vocab_size - 1))
        append_version(sequence.versions, self._version)

    def _result(
        self,
        sequence: Sequence,
        now: float,
        *,
        reason: FinishReason | None,
        params: dict[str, JsonValue] | None = None,
    ) -> EngineResult:
        first_at = sequence.first_at or now
        return EngineResult(
            request_id=sequence.request.request_id,
            token_ids=sequence.sampled,
            logprobs=[_LOGPROB] * len(sequence.sampled),
            versions=sequence.versions,
            finish_reason=reason,
            cached_tokens=sequence.cached,
            queued_s=sequence.placed_at - sequence.added_at,
            prefill_s=first_at - sequence.placed_at,
            decode_s=now - first_at,
            kv_transfer_params=params,
            transferred_tokens=sequence.transferred,
            transferred_bytes=sequence.transferred * self._per_id * QWEN3_8B.kv_token_bytes,
            transfer_s=sequence.transfer_s,
            recomputed=sequence.recomputed,
        )

    def _keep(self, sequence: Sequence) -> None:
        ids = sequence.request.prompt_ids + sequence.sampled
        self._kept.keep(sequence.request.session, ids[: sequence.computed])

    def _promised(self) -> int:
        """Places that live requests may come to need."""
        return sum(sequence.most for sequence in self._running.values())


class H800(SyntheticEngine):
    """At the speed of an H800."""

    @classmethod
    def gpu_of(cls, settings: GenerationSettings) -> Gpu:
        """H800."""
        return gpu_speeds.H800


class H20(SyntheticEngine):
    """At the speed of an H20."""

    @classmethod
    def gpu_of(cls, settings: GenerationSettings) -> Gpu:
        """H20."""
        return gpu_speeds.H20


class ByClass(SyntheticEngine):
    """At the speed of its device class's GPU, in a stack of several classes."""

    @classmethod
    def gpu_of(cls, settings: GenerationSettings) -> Gpu:
        """Raises Invalid for a class that is neither `compute` nor `bandwidth`."""
        gpus = {"compute": gpu_speeds.H800, "bandwidth": gpu_speeds.H20}
        gpu = gpus.get(settings.device_class)
        if gpu is None:
            message = f"no GPU stands for {settings.device_class!r}; use {' or '.join(gpus)}"
            raise Invalid(message, fields=[FieldProblem(field="GENERATION__DEVICE_CLASS", message=message)])
        return gpu
