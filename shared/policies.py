"""What a process that asks for turns knows of policies: newest version, tokenizer, window.
Used by environments, and by the router for outside sessions."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

from shared.state import State
from shared.store import ObjectStore
from shared.tokens import ChatTokenizer


@dataclass(slots=True)
class PolicyView:
    """One policy reference as seen now."""

    version: int
    pinned: bool
    tokenizer: ChatTokenizer
    window: int | None
    """Positions that the model has, where its config tells."""


class Policies:
    """Follows the policies that running episodes use."""

    def __init__(self, state: State, store: ObjectStore) -> None:
        self._state = state
        self._store = store
        self._views: dict[str, PolicyView] = {}
        self._loading: dict[str, asyncio.Task[PolicyView]] = {}

    async def view(self, reference: str) -> PolicyView:
        """A policy's newest version and tokenizer. Raises NotFound for an unknown policy or version."""
        found = self._views.get(reference)
        if found is not None:
            return found
        task = self._loading.get(reference)
        if task is None:
            task = self._loading[reference] = asyncio.create_task(self._load(reference))
            task.add_done_callback(lambda _: self._loading.pop(reference, None))
        return await asyncio.shield(task)

    async def _load(self, reference: str) -> PolicyView:
        record, model_uri = await self._state.find_policy(reference)
        folder = self._store.folder(model_uri)
        tokenizer = await asyncio.to_thread(ChatTokenizer.from_folder, folder)
        view = PolicyView(record.version, "@" in reference, tokenizer, _window(folder))
        self._views[reference] = view
        return view

    async def follow(self) -> None:
        """Loop. Consumes policy versions from Redis; woken by the hint `policies` or every second."""
        while True:
            for reference, view in list(self._views.items()):
                if view.pinned:
                    continue
                newest = await self._state.policy(reference)
                if newest is not None:
                    view.version = max(view.version, newest[0].version)
            await self._state.wait_hint("policies")


def _window(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        found = config.get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) and found > 0 else None
