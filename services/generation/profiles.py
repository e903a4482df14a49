"""What the turns of each task have needed on this worker: the router's measure of affinity. Used by
`worker.py`.

An engine works on many requests at once. What one of them needs is its share of the time, not how long it
took: a worker with twice the load would look half as good, though it does as much.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping

from services.generation.hosted import InHand
from services.generation.protocol import EngineResult
from shared.events import Role
from shared.state import TaskProfile

_MOST_TASKS = 256
_MOST_TICKS = 16_384


class Shares:
    """Divides time among the requests that an engine works on, evenly at every moment."""

    def __init__(self) -> None:
        self._times = [0.0]
        self._sums = [0.0]
        """What one request, had it been there all the time, would have been given until then."""
        self._running = 0

    def tick(self, now: float, running: int) -> None:
        """Since the last tick so many were worked on."""
        at = self._sums[-1] + (now - self._times[-1]) / max(running, 1)
        if running == self._running and len(self._times) > 1:
            self._times[-1], self._sums[-1] = now, at
        else:
            self._times.append(now)
            self._sums.append(at)
        self._running = running
        if len(self._times) > _MOST_TICKS:
            del self._times[: _MOST_TICKS // 2], self._sums[: _MOST_TICKS // 2]

    def between(self, start: float, end: float) -> float:
        """The share of a request that was there from start to end."""
        return max(0.0, self._sum(end) - self._sum(start))

    def _sum(self, when: float) -> float:
        after = min(max(bisect_right(self._times, when), 1), len(self._times) - 1)
        if after == 0:
            return 0.0
        (t0, t1), (s0, s1) = self._times[after - 1 : after + 1], self._sums[after - 1 : after + 1]
        done = min(max((when - t0) / (t1 - t0), 0.0), 1.0) if t1 > t0 else 1.0
        return s0 + done * (s1 - s0)


class Profiles:
    """Accumulated since the worker started. Written by the engine thread, read by any."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self.shares = Shares()
        self._tasks: OrderedDict[str, TaskProfile] = OrderedDict()

    def count(self, held: InHand, result: EngineResult, now: float) -> None:
        """Add a request that has finished now: its prefill where this worker did it, its decode likewise."""
        name = held.turn.task
        known = self._tasks.pop(name, None) or TaskProfile()
        changes: dict[str, float] = {}
        first = now - result.decode_s
        prefill_s = self.shares.between(first - result.prefill_s, first)
        decode_s, decode_wall_s = self.shares.between(first, now), result.decode_s
        if self._role != "decode":
            changes |= {
                "prefills": known.prefills + 1,
                "prompt_tokens": known.prompt_tokens + len(held.turn.prompt_ids),
                "cached_tokens": known.cached_tokens + result.cached_tokens,
                "prefill_s": known.prefill_s + prefill_s,
            }
        else:
            decode_s, decode_wall_s = decode_s + prefill_s, decode_wall_s + result.prefill_s
        if self._role != "prefill":
            changes |= {
                "decodes": known.decodes + 1,
                "generated_tokens": known.generated_tokens + len(result.token_ids),
                "decode_s": known.decode_s + decode_s,
                "decode_wall_s": known.decode_wall_s + decode_wall_s,
                "transfer_s": known.transfer_s + result.transfer_s,
            }
        self._tasks[name] = known.model_copy(update=changes)
        if len(self._tasks) > _MOST_TASKS:
            self._tasks.popitem(last=False)

    def snapshot(self) -> Mapping[str, TaskProfile]:
        """Task → what its turns have needed."""
        return self._tasks.copy()
