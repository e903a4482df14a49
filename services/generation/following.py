"""Follows policies: finds newer versions, pulls their weights in the background, hands them to the worker.

Redis is the truth about versions; a hint only hurries. A version that fails its checks is not loaded:
the old one stays live and labelled so, and the next version is tried.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from services.generation.protocol import Engine
from services.generation.worker import Worker
from shared import metrics, registry, weights
from shared.errors import RollArtError, WeightsInvalid
from shared.events import PolicyPublished
from shared.settings import GenerationSettings
from shared.state import State
from shared.store import ObjectStore

_LOG = structlog.get_logger()
_RETRY_FAILED_S = 5.0


class PolicyFollower:
    """Keeps the worker's engines at the newest versions."""

    def __init__(self, state: State, store: ObjectStore, settings: GenerationSettings) -> None:
        self._state = state
        self._store = store
        self._settings = settings
        self._engine_kind: type[Engine] = registry.load("engine", settings.engine, field="GENERATION__ENGINE")
        self._loop = asyncio.get_running_loop()
        self._wanted: set[str] = set()
        self._failed: dict[str, tuple[int, float]] = {}
        self._loading: set[str] = set()
        self._wake = asyncio.Event()
        self.pull_s = 0.0

    def want(self, reference: str) -> None:
        """From the engine thread: a turn waits for this policy, or for a newer version of it."""
        self._loop.call_soon_threadsafe(self._want, reference)

    def _want(self, reference: str) -> None:
        self._wanted.add(reference)
        self._wake.set()

    async def follow(self, worker: Worker) -> None:
        """Loop. Consumes policy versions from Redis; produces loads; woken by the hint `policies`, by `want`,
        or every second."""
        while True:
            live = worker.versions()
            for reference in sorted(self._wanted - live.keys()):
                await self._open(worker, reference)
            for reference, version in live.items():
                if "@" not in reference:
                    await self._update(worker, reference, version)
            self._wanted -= live.keys()
            hint = asyncio.create_task(self._state.wait_hint("policies"))
            wake = asyncio.create_task(self._wake.wait())
            try:
                await asyncio.wait({hint, wake}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                hint.cancel()
                wake.cancel()
            self._wake.clear()

    async def _open(self, worker: Worker, reference: str) -> None:
        """A new engine for a policy that is not hosted yet."""
        try:
            record, model_uri = await self._state.find_policy(reference)
            engine = await asyncio.to_thread(self._make, record, model_uri)
        except RollArtError as error:
            _LOG.error("policy not hosted", policy=reference, error=error.message)
            self._wanted.discard(reference)
            worker.refuse(reference, error)
            return
        self._wanted.discard(reference)
        worker.host(reference, engine)
        await self._settled(worker)
        _LOG.info("policy hosted", policy=reference, version=record.version)

    def _make(self, record: PolicyPublished, model_uri: str) -> Engine:
        folder = self._store.folder(model_uri)
        engine = self._engine_kind.create(folder, settings=self._settings, seed=record.version)
        began = time.perf_counter()
        _, tensors = weights.pull(self._store, record.uri, digest=record.digest)
        self._count_pull(time.perf_counter() - began)
        engine.load(tensors, version=record.version)
        return engine

    async def _update(self, worker: Worker, reference: str, version: int) -> None:
        newest = await self._state.policy(reference)
        if newest is None or newest[0].version <= version:
            return
        record = newest[0]
        failed_version, failed_at = self._failed.get(reference, (-1, 0.0))
        if failed_version == record.version and time.monotonic() - failed_at < _RETRY_FAILED_S:
            return
        try:
            began = time.perf_counter()
            _, tensors = await asyncio.to_thread(weights.pull, self._store, record.uri, digest=record.digest)
            self._count_pull(time.perf_counter() - began)
            await self._swap(worker, reference, tensors, record.version)
        except WeightsInvalid as error:
            self._failed[reference] = (record.version, time.monotonic())
            worker.load_failures += 1
            metrics.WEIGHT_LOADS.labels("failed").inc()
            _LOG.error("weights refused", policy=reference, version=record.version, error=error.message)

    async def _swap(
        self, worker: Worker, reference: str, tensors: dict[str, weights.RawTensor], version: int
    ) -> None:
        outcome, done = self._listener()
        worker.load(reference, tensors, version=version, done=done)
        error = await outcome
        if error is not None:
            raise error

    async def _settled(self, worker: Worker) -> None:
        """Wait until the engine thread has worked through what was posted before."""
        outcome, done = self._listener()
        worker.load("", {}, version=0, done=done)
        await outcome

    def _listener(
        self,
    ) -> tuple[asyncio.Future[WeightsInvalid | None], Callable[[WeightsInvalid | None], None]]:
        """A future, and what resolves it from the engine thread."""
        outcome: asyncio.Future[WeightsInvalid | None] = self._loop.create_future()

        def resolve(error: WeightsInvalid | None) -> None:
            if not outcome.done():
                outcome.set_result(error)

        def done(error: WeightsInvalid | None) -> None:
            self._loop.call_soon_threadsafe(resolve, error)

        return outcome, done

    def _count_pull(self, seconds: float) -> None:
        self.pull_s += seconds
        metrics.WEIGHT_SECONDS.labels("pull").inc(seconds)
