"""What the turns of each task have needed on this worker: the router's measure of affinity. Used by
`worker.py`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from services.generation.hosted import InHand
from services.generation.protocol import EngineResult
from shared.events import Role
from shared.state import TaskProfile

_MOST_TASKS = 256


class Profiles:
    """Accumulated since the worker started. Written by the engine thread, read by any."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._tasks: OrderedDict[str, TaskProfile] = OrderedDict()

    def count(self, held: InHand, result: EngineResult) -> None:
        """Add a finished request: its prefill where this worker did it, its decode likewise."""
        name = held.turn.task
        known = self._tasks.pop(name, None) or TaskProfile()
        changes: dict[str, float] = {}
        decode_s = result.decode_s
        if self._role != "decode":
            changes |= {
                "prefills": known.prefills + 1,
                "prompt_tokens": known.prompt_tokens + len(held.turn.prompt_ids),
                "cached_tokens": known.cached_tokens + result.cached_tokens,
                "prefill_s": known.prefill_s + result.prefill_s,
            }
        else:
            decode_s += result.prefill_s
        if self._role != "prefill":
            changes |= {
                "decodes": known.decodes + 1,
                "generated_tokens": known.generated_tokens + len(result.token_ids),
                "decode_s": known.decode_s + decode_s,
                "transfer_s": known.transfer_s + result.transfer_s,
            }
        self._tasks[name] = known.model_copy(update=changes)
        if len(self._tasks) > _MOST_TASKS:
            self._tasks.popitem(last=False)

    def snapshot(self) -> Mapping[str, TaskProfile]:
        """Task → what its turns have needed."""
        return self._tasks.copy()
