"""What the environment knows of policies: the newest version of each, and its tokenizer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from shared.errors import NotFound
from shared.state import State
from shared.store import ObjectStore
from shared.tokens import ChatTokenizer


@dataclass(slots=True)
class PolicyView:
    """One policy reference as seen now."""

    version: int
    pinned: bool
    tokenizer: ChatTokenizer


def split_reference(reference: str) -> tuple[str, int | None]:
    """`name@12` → name and 12; `name` → name and None. Raises NotFound for a version that is no number."""
    name, at, version = reference.partition("@")
    if at and not (version.isascii() and version.isdigit()):
        raise NotFound(f"policy {reference!r}: a version is a number")
    return name, int(version) if at else None


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
        name, version = split_reference(reference)
        if version is not None:
            record, model_uri = await self._state.policy_version(name, version)
        else:
            newest = await self._state.policy(name)
            if newest is None:
                raise NotFound(f"no policy {name!r}")
            record, model_uri = newest
        folder = self._store.folder(model_uri)
        tokenizer = await asyncio.to_thread(ChatTokenizer.from_folder, folder)
        view = PolicyView(record.version, version is not None, tokenizer)
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
