"""Follows policies: finds newer versions, pulls their weights in the background, hands them to the worker.

Redis is the truth about versions; a hint only hurries. A version that fails its checks is not loaded: the old
one stays live and labelled so, and the next version is tried. Weights come bucket by bucket while the engine
decodes; only the swap at the end stalls it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator

import structlog

from services.generation.protocol import Engine, WeightLoad
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
    """Keeps the worker's engines at the newest versions, one update of a policy after the other."""

    def __init__(self, state: State, store: ObjectStore, settings: GenerationSettings) -> None:
        self._state = state
        self._store = store
        self._settings = settings
        self._engine_kind: type[Engine] = registry.load("engine", settings.engine, field="GENERATION__ENGINE")
        self._loop = asyncio.get_running_loop()
        self._wanted: set[str] = set()
        self._failed: dict[str, tuple[int, float]] = {}
        self._overtaken: set[str] = set()
        """Policies whose last pull was given up for a newer version: the next one is finished whatever
        comes."""
        self._working: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self.pull_s = 0.0
        """Getting, verifying and staging weights, accumulated, in the background."""

    def want(self, reference: str) -> None:
        """From the engine thread: a turn waits for this policy, or for a newer version of it."""
        self._loop.call_soon_threadsafe(self._want, reference)

    def _want(self, reference: str) -> None:
        self._wanted.add(reference)
        self._wake.set()

    async def follow(self, worker: Worker) -> None:
        """Loop. Consumes policy versions from Redis; produces loads; woken by the hint `policies`, by `want`,
        by the end of a load, or every second."""
        try:
            while True:
                self._wake.clear()
                self._clear_ended()
                live = worker.versions()
                for reference in sorted(self._wanted - live.keys()):
                    self._begin(reference, self._open(worker, reference))
                for reference, version in live.items():
                    if "@" not in reference and reference not in self._working:
                        newest = await self._state.policy(reference)
                        if newest is not None and newest[0].version > version:
                            self._begin(reference, self._update(worker, newest[0]))
                self._wanted -= live.keys()
                await self._something()
        finally:
            for task in self._working.values():
                task.cancel()

    def _begin(self, reference: str, work: Coroutine[object, object, None]) -> None:
        """One thing at a time for each policy; policies do not wait for one another."""
        if reference in self._working:
            work.close()
            return
        task = asyncio.create_task(work, name=f"load {reference}")
        task.add_done_callback(lambda _: self._wake.set())
        self._working[reference] = task

    def _clear_ended(self) -> None:
        for reference, task in list(self._working.items()):
            if task.done():
                del self._working[reference]
                task.result()

    async def _something(self) -> None:
        hint = asyncio.create_task(self._state.wait_hint("policies"))
        wake = asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait({hint, wake}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hint.cancel()
            wake.cancel()

    async def _open(self, worker: Worker, reference: str) -> None:
        """A new engine for a policy that is not hosted yet."""
        try:
            engine = await self._newest_that_loads(worker, reference)
        except RollArtError as error:
            _LOG.error("policy not hosted", policy=reference, error=error.message)
            self._wanted.discard(reference)
            worker.refuse(reference, error)
            return
        self._wanted.discard(reference)
        worker.host(reference, engine)
        await self._settled(worker)
        _LOG.info("policy hosted", policy=reference, version=engine.version)

    async def _newest_that_loads(self, worker: Worker, reference: str) -> Engine:
        """An engine with the version asked for; where that is the newest and it is damaged, with the newest
        before it that is whole. Raises the error of the first one where none is."""
        record, model_uri = await self._state.find_policy(reference)
        try:
            return await asyncio.to_thread(self._make, record, model_uri)
        except WeightsInvalid as error:
            self._refused(worker, record, error)
            if "@" in reference:
                raise
            older = [v for v in await self._state.policy_versions(reference) if v < record.version]
            for version in reversed(older):
                kept, model_uri = await self._state.policy_version(reference, version)
                try:
                    return await asyncio.to_thread(self._make, kept, model_uri)
                except WeightsInvalid as another:
                    self._refused(worker, kept, another)
            raise

    def _make(self, record: PolicyPublished, model_uri: str) -> Engine:
        folder = self._store.folder(model_uri)
        engine = self._engine_kind.create(folder, settings=self._settings, seed=record.version)
        try:
            update = engine.begin_load(record.version)
            buckets = weights.buckets(self._store, record.uri, digest=record.digest)
            while self._take_in(buckets, update):
                pass
            update.check()
            update.swap()
        except BaseException:
            engine.close()
            raise
        return engine

    async def _update(self, worker: Worker, record: PolicyPublished) -> None:
        failed_version, failed_at = self._failed.get(record.policy, (-1, 0.0))
        if failed_version == record.version and time.monotonic() - failed_at < _RETRY_FAILED_S:
            return
        update = worker.begin_load(record.policy, record.version)
        if update is None:
            return
        try:
            if not await self._pull(record, update):
                _LOG.info("pull given up for a newer version", policy=record.policy, version=record.version)
                return
            await self._swap(worker, record, update)
        except WeightsInvalid as error:
            self._refused(worker, record, error)

    async def _pull(self, record: PolicyPublished, update: WeightLoad) -> bool:
        """Fill an update; False where it was given up because a newer version exists already."""
        buckets = weights.buckets(self._store, record.uri, digest=record.digest)
        while await asyncio.to_thread(self._take_in, buckets, update):
            if await self._is_overtaken(record):
                return False
        await asyncio.to_thread(update.check)
        return not await self._is_overtaken(record)

    async def _is_overtaken(self, record: PolicyPublished) -> bool:
        """Whether a newer version makes this one not worth loading: once, then one is finished, so that a
        trainer faster than the store cannot starve its workers."""
        newest = await self._state.policy(record.policy)
        newer = newest is not None and newest[0].version > record.version
        if not newer or record.policy in self._overtaken:
            return False
        self._overtaken.add(record.policy)
        return True

    def _take_in(self, buckets: Iterator[dict[str, weights.RawTensor]], update: WeightLoad) -> bool:
        """One more bucket; False where there is none. Runs in a thread of its own."""
        began = time.perf_counter()
        try:
            bucket = next(buckets, None)
            if bucket is not None:
                update.add(bucket)
            return bucket is not None
        finally:
            took = time.perf_counter() - began
            self.pull_s += took
            metrics.WEIGHT_SECONDS.labels("pull").inc(took)

    def _refused(self, worker: Worker, record: PolicyPublished, error: WeightsInvalid) -> None:
        self._failed[record.policy] = (record.version, time.monotonic())
        worker.load_failures += 1
        metrics.WEIGHT_LOADS.labels("failed").inc()
        _LOG.error("weights refused", policy=record.policy, version=record.version, error=error.message)

    async def _swap(self, worker: Worker, record: PolicyPublished, update: WeightLoad) -> None:
        outcome: asyncio.Future[WeightsInvalid | None] = self._loop.create_future()
        worker.swap(record.policy, update, version=record.version, done=self._resolver(outcome))
        error = await outcome
        if error is not None:
            raise error
        self._overtaken.discard(record.policy)

    async def _settled(self, worker: Worker) -> None:
        """Wait until the engine thread has worked through what was posted before."""
        outcome: asyncio.Future[WeightsInvalid | None] = self._loop.create_future()
        resolve = self._resolver(outcome)
        worker.after_commands(lambda: resolve(None))
        await outcome

    def _resolver(
        self, outcome: asyncio.Future[WeightsInvalid | None]
    ) -> Callable[[WeightsInvalid | None], None]:
        """What resolves a future from the engine thread."""

        def resolve(error: WeightsInvalid | None) -> None:
            if not outcome.done():
                outcome.set_result(error)

        def heard(error: WeightsInvalid | None) -> None:
            self._loop.call_soon_threadsafe(resolve, error)

        return heard
