"""Continuous batching of any transformers causal LM with full attention, on one torch device.

A sequence is its tokens plus the number of them whose KV is computed. Each step runs one forward pass
over what is pending: one token of every sequence that decodes, and prompt tokens of newcomers up to
`prefill_tokens`, so that a long prompt never stalls the others. Requests join and leave between steps.
The KV of a finished turn stays for its session's next turn. Split turns hand their KV over in `handover.py`.
Run by `services/generation/worker.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

import structlog
import torch
from transformers import PreTrainedModel

from services.generation.engines.handover import KvHandover
from services.generation.engines.kv_cache import BLOCK_TOKENS, BlockPool, KvStore, blocks_for
from services.generation.engines.loading import StagedWeights, build_model
from services.generation.engines.paged_attention import IMPLEMENTATION, pack
from services.generation.engines.sampling import draw
from services.generation.engines.sequence import Sequence
from services.generation.protocol import EngineRequest, EngineResult, check_prompt, duplicate
from shared.errors import Internal, Invalid
from shared.events import FinishReason, Sampling
from shared.settings import GenerationSettings

log = structlog.get_logger()

_PASSING = 8
"""Waiting requests that are looked at where the first does not fit."""
_PROBE_TOKENS = 24
_PROBE_SAMPLING = Sampling()


class TorchEngine:
    """See `services.generation.protocol.Engine`."""

    def __init__(self, model: PreTrainedModel, *, settings: GenerationSettings, seed: int) -> None:
        self._model = model
        self._device, self._dtype = model.device, model.dtype
        self._seed = seed
        self._max_batch = settings.max_batch
        self._prefill_tokens = settings.prefill_tokens
        blocks = settings.cache_tokens // BLOCK_TOKENS
        self._pool = BlockPool(blocks)
        self._store = KvStore(blocks)
        self._handover = KvHandover(self._pool, self._store, dtype=self._dtype, settings=settings)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._live: dict[str, Sequence] = {}
        self._stuck = False
        """Nobody runs, and leases leave no room for who waits: only their end brings work."""
        self._pass_s = settings.kv_lease_s
        self._version = 0
        config = model.config.get_text_config()
        self._vocab_size = int(config.vocab_size)
        self._window = int(getattr(config, "max_position_embeddings", None) or settings.cache_tokens)

    @classmethod
    def create(cls, model_dir: Path, *, settings: GenerationSettings, seed: int) -> Self:
        """An engine for the configuration in `model_dir`, with random weights until `load`.

        Raises Invalid where the folder holds no causal language model or one whose attention this engine
        does not compute.
        """
        torch.set_num_threads(settings.threads)
        engine = cls(
            build_model(model_dir, device=torch.device(settings.device), seed=seed),
            settings=settings,
            seed=seed,
        )
        engine._probe()
        if settings.role == "prefill":
            engine._handover.serve()
        return engine

    @property
    def version(self) -> int:
        """Policy version of the live weights; 0 before the first load."""
        return self._version

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        waiting = self._waiting and not self._stuck
        return bool(self._running or waiting or self._handover.has_news)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place, or for their KV."""
        return len(self._waiting) + self._handover.arriving

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that live requests hold; what sessions keep between turns counts as free."""
        return 1.0 - (self._pool.free + self._pool.cached) / self._pool.capacity

    @property
    def window(self) -> int:
        """Positions that the model has."""
        return self._window

    @property
    def kv_leases(self) -> int:
        """Prefilled prompts whose KV waits to be fetched."""
        return len(self._handover.leases)

    def attach(self, wake: Callable[[], None]) -> None:
        """`wake` is called when KV has arrived, or was fetched, which gives its blocks back."""
        self._handover.wake = wake

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises Invalid or Conflict as the protocol says, and Invalid for one that could
        outgrow the whole KV cache."""
        if request.request_id in self._live:
            raise duplicate(request.request_id)
        check_prompt(request, window=self._window, vocab_size=self._vocab_size)
        limit = min(request.context_window, self._window)
        longest = min(limit, len(request.prompt_ids) + request.sampling.max_tokens)
        if blocks_for(longest) > self._pool.capacity:
            cache = self._pool.capacity * BLOCK_TOKENS
            raise Invalid(f"the request may reach {longest} tokens, GENERATION__CACHE_TOKENS holds {cache}")
        sequence = Sequence(
            request=request,
            limit=limit,
            seed=self._seed,
            tokens=list(request.prompt_ids),
            stops=frozenset(request.sampling.stop_token_ids),
        )
        self._live[request.request_id] = sequence
        if request.prefilled is None:
            self._waiting.append(sequence)
            self._stuck = False
            return
        prefilled = request.prefilled
        sequence.tokens += prefilled.token_ids
        sequence.logprobs += prefilled.logprobs
        sequence.versions += prefilled.versions
        self._handover.fetch(sequence, version=self._version)

    def abort(self, request_id: str) -> bool:
        """End a request without a result, or the lease of its KV; False where there is neither."""
        self._stuck = False
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            leased = self._handover.leases.abort(request_id)
            self._handover.reclaim(version=self._version)
            return leased
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._handover.forget(sequence)
        self._pool.release(sequence.blocks)
        return True

    def peek(self, request_id: str, start: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of a live request from the `start`-th on."""
        sequence = self._live.get(request_id)
        return (sequence.sampled()[start:], sequence.logprobs[start:]) if sequence is not None else ([], [])

    def tend(self) -> None:
        """Free the KV of leases whose time is over, and give up on KV that does not come."""
        arrived = list(self._handover.collect())
        self._waiting.extend(arrived)
        if self._handover.reclaim(version=self._version) or arrived:
            self._stuck = False

    def close(self) -> None:
        """End the threads that move KV."""
        self._handover.close()

    def forget(self, session: str) -> None:
        """Free the KV kept for a session; what its live requests compute is not kept either, nor what is
        leased."""
        self._pool.drop(session)
        self._handover.leases.forget(session)
        for sequence in self._live.values():
            if sequence.request.session == session:
                sequence.keep = False

    def begin_load(self, version: int) -> StagedWeights:
        """New weights on their way."""
        return StagedWeights(self._model, lambda: self._swapped(version))

    def _swapped(self, version: int) -> None:
        """All KV of the old weights is dropped; live requests compute theirs again and go on."""
        self._version = version
        self._pool.drop_all()
        for sequence in self._live.values():
            sequence.restart()

    @torch.inference_mode()
    def step(self) -> list[EngineResult]:
        """One forward pass over what is pending; each sequence that has nothing more pending gets a token."""
        self.tend()
        self._admit()
        rows, counts = self._plan()
        if not rows:
            return []
        complete = [i for i, row in enumerate(rows) if counts[i] == row.pending]
        logits_RV = self._forward(rows, counts, wanted=complete)
        for row, count in zip(rows, counts, strict=True):
            row.computed += count
        if not complete:
            return []
        sampled = [rows[i] for i in complete]
        drawn = draw(
            logits_RV,
            [row.request.sampling for row in sampled],
            uniforms=[row.uniform() for row in sampled],
        )
        now = time.perf_counter()
        results = []
        for row, token, logprob, finite in zip(
            sampled, drawn.token_ids, drawn.logprobs, drawn.finite, strict=True
        ):
            if not finite:
                results.append(self._fail(row, now=now))
            elif reason := row.append(token, logprob, version=self._version, now=now):
                results.append(self._finish(row, reason, now=now))
            elif row.request.prefill_only:
                results.append(self._hand_over(row, now=now))
        if results:
            self._running = [row for row in self._running if row.request.request_id in self._live]
        return results

    def _admit(self) -> None:
        """Give waiting requests a place, first come first served, as far as blocks for their tokens allow.

        Where leases hold the blocks that the first needs, the next few may pass it for as long as a lease
        lives: after that all those leases have ended, and it is its turn.
        """
        at = 0
        while at < min(len(self._waiting), _PASSING) and len(self._running) < self._max_batch:
            sequence = self._waiting[at]
            if self._place(sequence):
                del self._waiting[at]
            elif self.kv_leases and sequence.may_be_passed(self._pass_s):
                at += 1
            else:
                break
        self._stuck = bool(self._waiting) and not self._running

    def _place(self, sequence: Sequence) -> bool:
        """Put a sequence into the batch; False, and nothing changed, for want of blocks."""
        request = sequence.request
        reused, blocks = self._pool.take(request.session, sequence.tokens)
        more = self._pool.allocate(blocks_for(len(sequence.tokens)) - len(blocks))
        if more is None:
            self._pool.keep(request.session, sequence.tokens[:reused], blocks)
            return False
        sequence.blocks = blocks + more
        reused = self._handover.adopt(sequence, reused=reused, version=self._version)
        sequence.computed = reused
        sequence.cached = min(reused, len(request.prompt_ids))
        if sequence.started_at is None:
            sequence.started_at = time.perf_counter()
        self._running.append(sequence)
        return True

    def _plan(self) -> tuple[list[Sequence], list[int]]:
        """Which sequences go through this step, with how many tokens each; oldest first.

        Where blocks run out the newest sequence gives its own up and waits again, so the oldest always
        gets on.
        """
        rows: list[Sequence] = []
        counts: list[int] = []
        budget = self._prefill_tokens
        at = 0
        while at < len(self._running):
            sequence = self._running[at]
            at += 1
            count = sequence.pending
            if count > 1:
                count = min(count, budget)
                budget -= count
                if not count:
                    continue
            if self._reach(sequence, sequence.computed + count):
                rows.append(sequence)
                counts.append(count)
        return rows, counts

    def _reach(self, sequence: Sequence, tokens: int) -> bool:
        """Give a sequence blocks for so many tokens; False where it had to yield to older ones."""
        needed = blocks_for(tokens) - len(sequence.blocks)
        while needed > 0:
            more = self._pool.allocate(needed)
            if more is not None:
                sequence.blocks += more
                return True
            victim = self._running.pop()
            self._pool.release(victim.blocks)
            victim.blocks = []
            victim.restart()
            self._waiting.appendleft(victim)
            if victim is sequence:
                return False
        return True

    def _forward(self, rows: list[Sequence], counts: list[int], *, wanted: list[int]) -> torch.Tensor:
        """Logits after the last token of each `wanted` row, shape (wanted, V)."""
        batch = pack(
            rows,
            counts,
            store=self._store,
            window=self._window,
            dtype=self._dtype,
            device=self._device,
        )
        last = batch.last_R if len(wanted) == len(rows) else batch.last_R[wanted]
        output = self._model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=last,
            packed=batch,
        )
        logits_RV: torch.Tensor = output.logits[0]
        return logits_RV

    def _finish(self, sequence: Sequence, reason: FinishReason, *, now: float) -> EngineResult:
        """The result of a finished request, whose KV stays for its session."""
        request = sequence.request
        del self._live[request.request_id]
        if sequence.keep:
            # The last sampled token has not gone through the model.
            self._pool.keep(request.session, sequence.tokens[: sequence.computed], sequence.blocks)
        else:
            self._pool.release(sequence.blocks)
        return sequence.result(reason, now=now)

    def _hand_over(self, sequence: Sequence, *, now: float) -> EngineResult:
        """The result of a prefilled request, whose KV waits to be fetched."""
        del self._live[sequence.request.request_id]
        params = self._handover.lease(sequence, version=self._version)
        return sequence.result(None, now=now, kv_transfer_params=params.model_dump(mode="json"))

    def _fail(self, sequence: Sequence, *, now: float) -> EngineResult:
        """The result of a request whose logits are not finite. Its KV may hold NaN too."""
        request = sequence.request
        del self._live[request.request_id]
        self._store.clear(sequence.blocks)
        self._pool.release(sequence.blocks)
        log.error("logits_not_finite", request_id=request.request_id, version=self._version)
        error = Internal(f"logits of policy version {self._version} are not finite")
        return sequence.result(FinishReason.STOP, now=now, error=error)

    @torch.inference_mode()
    def _probe(self) -> None:
        """Compare a prompt computed in pieces with the model's own forward pass.

        Raises Invalid where they differ, for instance because the model computes attention in its own way.
        """
        length = min(_PROBE_TOKENS, self._window)
        ids = torch.randint(self._vocab_size, (length,), generator=torch.Generator().manual_seed(self._seed))
        self._model.set_attn_implementation("eager")
        expected_V = self._model(ids.to(self._device)[None], use_cache=False).logits[0, -1].float()
        self._model.set_attn_implementation(IMPLEMENTATION)
        tokens = ids.tolist()
        probe = Sequence(
            request=EngineRequest("probe", "probe", tokens, _PROBE_SAMPLING, length),
            limit=length,
            seed=0,
            tokens=tokens,
            stops=frozenset(),
            blocks=self._pool.allocate(blocks_for(length)) or [],
        )
        logits_RV = expected_V[None]
        while probe.pending:
            count = min(probe.pending, max(1, length // 3))
            logits_RV = self._forward([probe], [count], wanted=[0])
            probe.computed += count
        self._pool.release(probe.blocks)
        exact = self._dtype in (torch.float32, torch.float64)
        error = (logits_RV[0].float() - expected_V).abs().max() / expected_V.abs().max().clamp_min(1e-9)
        layers = self._model.config.get_text_config().num_hidden_layers
        if len(self._store.layers) != layers or not error < (1e-3 if exact else 5e-2):
            kind = self._model.config.model_type
            raise Invalid(
                f"the torch engine cannot run {kind!r} models: full attention in all layers is needed"
            )
