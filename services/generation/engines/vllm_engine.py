"""vLLM behind the engine protocol, in process: token ids in, ids and true log-probabilities out.

`AsyncLLM` runs on an event loop in a thread of its own, its engine core in a child process that ends with
this one. Finished requests come back through a queue, and `wake` tells the worker's thread. Weights reach
vLLM as files that were checked before; prefill and decode are split by vLLM's own KV connectors, whose
parameters travel through our messages. Run by `services/generation/worker.py` where GENERATION__ENGINE is
`vllm`.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

import structlog
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.generation.engines.vllm_request import Live, leased_id, outcome, sampling_params
from services.generation.engines.vllm_settings import environment, lease_s, make_config
from services.generation.engines.vllm_weights import FileLoad
from services.generation.protocol import EngineRequest, EngineResult, check_prompt, duplicate
from shared.errors import Internal, Invalid, RollArtError
from shared.settings import GenerationSettings

log = structlog.get_logger()

_START_S = 1800.0
"""Starting vLLM compiles kernels and captures graphs on GPUs."""
_LOAD_S = 600.0
_CLOSE_S = 30.0
_LOOK_S = 0.5
_PAUSE_S = 60.0
_PAUSE_AGAIN_S = 0.05
_ABORTED_LEASE_S = 2.0
"""KV of an aborted request stays so long: the decode worker hears of the abort too, and must not read what
has become another's."""
T = TypeVar("T")


class VllmEngine:
    """See `services.generation.protocol.Engine`. Of a prefilled request it draws the first token anew, from
    the KV that was fetched."""

    def __init__(self, model_dir: Path, *, settings: GenerationSettings, shape: torch.nn.Module) -> None:
        self._settings = settings
        self._shape = shape
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm loop", daemon=True)
        self._thread.start()
        self._done: queue.SimpleQueue[EngineResult] = queue.SimpleQueue()
        self._live: dict[str, Live] = {}
        self._numbers = itertools.count()
        self._version = 0
        self._wake: Callable[[], None] = lambda: None
        self._failure: BaseException | None = None
        self._load = (0, 0, 0.0)
        self._lease_s = lease_s(settings)
        self._leases: dict[str, str] = {}
        """Request → vLLM's id of it, of prefilled prompts whose KV waits to be fetched."""
        self._looked_at = 0.0
        try:
            self._llm: Any = self._call(self._start(model_dir), _START_S)
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise
        self._window = int(self._llm.model_config.max_model_len)
        self._vocab_size = int(self._llm.model_config.get_vocab_size())

    @classmethod
    def create(cls, model_dir: Path, *, settings: GenerationSettings, seed: int) -> Self:
        """An engine for the configuration in `model_dir`, with random weights until a load.

        Raises Invalid for a model that vLLM cannot run, or arguments that it does not take.
        """
        environment(settings)
        try:
            config = AutoConfig.from_pretrained(model_dir)
            with torch.device("meta"):
                shape = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        except (OSError, ValueError, KeyError) as error:
            raise Invalid(f"no causal language model can be built from {model_dir}: {error}") from error
        return cls(model_dir, settings=settings, shape=shape)

    @property
    def version(self) -> int:
        """Policy version of the live weights; 0 before the first load."""
        return self._version

    @property
    def has_work(self) -> bool:
        """Whether a result waits to be taken, or the engine has died."""
        return self._failure is not None or not self._done.empty()

    @property
    def running(self) -> int:
        """Requests in vLLM's batch."""
        return self._load[0]

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""
        return max(len(self._live) - self._load[0], 0)

    @property
    def kv_usage(self) -> float:
        """Share of vLLM's KV cache in use."""
        return self._load[2]

    @property
    def window(self) -> int:
        """Positions that the model has."""
        return self._window

    @property
    def kv_leases(self) -> int:
        """Prefilled prompts whose KV waits to be fetched, as of a moment ago."""
        return len(self._leases)

    def attach(self, wake: Callable[[], None]) -> None:
        """`wake` is called when a request has ended."""
        self._wake = wake

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises Invalid or Conflict as the protocol says."""
        if request.request_id in self._live:
            raise duplicate(request.request_id)
        check_prompt(request, window=self._window, vocab_size=self._vocab_size)
        # vLLM takes an id twice and then aborts either: ours are never used again.
        live = Live(request, f"{request.request_id}#{next(self._numbers)}", version=self._version)
        self._live[request.request_id] = live
        params = sampling_params(live, window=self._window)
        self._loop.call_soon_threadsafe(self._begin, live, params)

    def abort(self, request_id: str) -> bool:
        """End a request without a result, or the lease of its KV; False where there is neither."""
        live = self._live.pop(request_id, None)
        if live is None:
            leased = self._leases.pop(request_id, None)
            if leased is not None:
                self._look({leased: _ABORTED_LEASE_S})
            return leased is not None
        live.aborted = True
        self._loop.call_soon_threadsafe(self._cancel, live)
        return True

    def peek(self, request_id: str, start: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of a live request from the `start`-th on."""
        live = self._live.get(request_id)
        return (live.token_ids[start:], live.logprobs[start:]) if live is not None else ([], [])

    def step(self) -> list[EngineResult]:
        """The requests that have ended. Raises Internal where vLLM has died."""
        if self._failure is not None:
            raise Internal(f"vLLM has died: {self._failure}") from self._failure
        results = []
        while not self._done.empty():
            result = self._done.get()
            if self._live.pop(result.request_id, None) is not None:
                if leased := leased_id(result):
                    self._leases[result.request_id] = leased
                results.append(result)
        return results

    def begin_load(self, version: int) -> FileLoad:
        """New weights on their way."""
        return FileLoad(self._shape, lambda paths: self._swap(paths, version))

    def forget(self, session: str) -> None:
        """vLLM's prefix cache is not kept by session; what is old is evicted."""

    def tend(self) -> None:
        """Ask vLLM, now and then, which KV still waits to be fetched: it keeps house itself."""
        if self._leases and time.monotonic() - self._looked_at > _LOOK_S:
            self._look({})

    def close(self) -> None:
        """End vLLM's process and our thread."""
        try:
            self._call(self._stop(), _CLOSE_S)
        except RollArtError as error:
            log.warning("vllm_not_stopped", error=error.message)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)

    def _look(self, ending: dict[str, float]) -> None:
        self._looked_at = time.monotonic()
        known = dict(self._leases)
        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._heed_leases(known, ending)))

    def _call(self, work: Coroutine[object, object, T], limit_s: float) -> T:
        """Run something on vLLM's loop and wait for it. Raises Internal where vLLM does not get it done."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(limit_s)
        except (TimeoutError, RuntimeError, ConnectionError) as error:
            future.cancel()
            raise Internal(f"vLLM does not answer: {type(error).__name__} {error}") from error

    # On vLLM's loop

    async def _start(self, model_dir: Path) -> Any:
        from vllm.v1.engine.async_llm import AsyncLLM

        from services.generation.engines.vllm_stats import LoadLogger

        config = make_config(model_dir, self._settings)

        def logger(config: object, index: int = 0) -> LoadLogger:
            return LoadLogger(self._heard)

        return AsyncLLM.from_vllm_config(config, stat_loggers=[logger])

    async def _stop(self) -> None:
        tasks = [live.task for live in self._live.values() if live.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._llm.shutdown)

    async def _heed_leases(self, known: dict[str, str], ending: dict[str, float]) -> None:
        """Forget the leases that have ended, of those that were known before."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            (left,) = await self._llm.collective_rpc("rollart_leases", args=(ending,)) or [[]]
        except EngineDeadError as error:
            self._failure = error
            self._wake()
            return
        for request_id, leased in known.items():
            if leased not in left:
                self._leases.pop(request_id, None)

    def _heard(self, running: int, waiting: int, kv_usage: float) -> None:
        self._load = (running, waiting, kv_usage)

    def _begin(self, live: Live, params: object) -> None:
        if not live.aborted:
            live.task = self._loop.create_task(self._run(live, params))

    def _cancel(self, live: Live) -> None:
        if live.task is not None:
            live.task.cancel()

    async def _run(self, live: Live, params: object) -> None:
        """One request from its start to its end; cancelled it is aborted in vLLM too."""
        from vllm import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = TokensPrompt(prompt_token_ids=live.request.prompt_ids)
        try:
            async for output in self._llm.generate(prompt, params, live.internal_id):
                live.take(output)
            self._done.put(outcome(live, window=self._window, lease_s=self._lease_s))
        except EngineDeadError as error:
            self._failure = error
        except (ValueError, RuntimeError) as error:
            self._done.put(
                outcome(
                    live, window=self._window, lease_s=self._lease_s, error=Internal(f"vLLM refused: {error}")
                )
            )
        self._wake()

    def _swap(self, paths: list[str], version: int) -> None:
        fetching = [live for live in self._live.values() if live.fetching]
        self._call(self._reload(paths, version, fetching), _LOAD_S)
        self._version = version
        for live in self._live.values():
            live.swapped()
        for live in fetching:
            # KV of the old weights: asked again it is refused, and the prompt computed here.
            live.restart(f"{live.request.request_id}#{next(self._numbers)}", version=version)
            params = sampling_params(live, window=self._window)
            self._loop.call_soon_threadsafe(self._begin, live, params)

    async def _reload(self, paths: list[str], version: int, fetching: list[Live]) -> None:
        """Requests in flight are kept, all KV is dropped: vLLM computes it again when it resumes."""
        tasks = [live.task for live in fetching if live.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pause()
        taken = await self._llm.collective_rpc("rollart_load", args=(paths,))
        if not all(taken):
            # Whatever it computes with now, it is not this version; a new process starts clean.
            raise RuntimeError(f"no tensor was taken: {taken}")
        await self._llm.update_weight_version(str(version))
        await self._llm.resume_generation()

    async def _pause(self) -> None:
        """Stop between two steps, without any KV. vLLM cannot drop blocks into which KV is still being
        written, so it may take more than one try."""
        limit = time.monotonic() + _PAUSE_S
        while True:
            try:
                await self._llm.pause_generation(mode="keep", clear_cache=True)
                return
            except RuntimeError:
                if time.monotonic() > limit:
                    raise
            await self._llm.resume_generation()
            await asyncio.sleep(_PAUSE_AGAIN_S)
