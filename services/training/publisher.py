"""Publishes policy versions: weights into the store, the version into Redis, the hint onto the bus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from shared import metrics, weights
from shared.bus import Bus
from shared.events import PolicyPublished
from shared.state import State
from shared.store import ObjectStore
from shared.topics import POLICIES

_KEPT_VERSIONS = 4
"""Newest versions whose weights stay in the store, besides the first: workers may still pull them."""


class PolicyPublisher:
    """Publishes one policy. Only the holder of the trainer's lease succeeds."""

    def __init__(
        self, state: State, store: ObjectStore, bus: Bus, *, policy: str, lease: str, owner: str
    ) -> None:
        self._state = state
        self._store = store
        self._bus = bus
        self._policy = policy
        self._lease = lease
        self._owner = owner
        self._model_uri = ""
        self.push_s = 0.0

    async def publish_model(self, folder: Path) -> None:
        """Config and tokenizer, once, before the first version."""
        self._model_uri = await asyncio.to_thread(
            weights.publish_model, self._store, policy=self._policy, folder=folder
        )

    async def publish(
        self, tensors: Mapping[str, weights.RawTensor], *, version: int, step: int
    ) -> PolicyPublished:
        """Make a version live. Raises LeaseLost when another trainer has taken over."""
        began = time.perf_counter()
        uri, digest = await asyncio.to_thread(
            weights.publish, self._store, tensors, policy=self._policy, version=version, step=step
        )
        record = PolicyPublished(
            policy=self._policy, version=version, step=step, uri=uri, digest=digest, published_at=time.time()
        )
        await self._state.publish_policy(
            record, model_uri=self._model_uri, lease=self._lease, owner=self._owner
        )
        took = time.perf_counter() - began
        self.push_s += took
        metrics.WEIGHT_SECONDS.labels("push").inc(took)
        self._bus.publish(POLICIES, record, key=self._policy)
        await self._forget_old(version)
        return record

    async def _forget_old(self, newest: int) -> None:
        """Version 0 stays for later comparison; of the others the newest few."""
        for version in await self._state.policy_versions(self._policy):
            if 0 < version <= newest - _KEPT_VERSIONS:
                await self._state.forget_policy_version(self._policy, version)
                uri = weights.version_uri(self._policy, version)
                await asyncio.to_thread(self._store.delete, uri)
