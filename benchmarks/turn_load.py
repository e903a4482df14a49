"""The load of the turn benchmark, the same for the bare pipeline and for ours."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

PROMPT = list(range(100))
NEW_TOKENS = 20
_TOKENS = list(range(NEW_TOKENS))
_LOGPROBS = [-0.1234567 * (index + 1) for index in range(NEW_TOKENS)]


@dataclass(frozen=True)
class Level:
    """So many turns in flight for so many seconds, after a warm-up."""

    in_flight: int
    seconds: float
    warm_up_s: float


def reply_tokens() -> list[int]:
    """What an engine that answers at once samples."""
    return _TOKENS


def reply_logprobs() -> list[float]:
    """Their log-probabilities."""
    return _LOGPROBS


async def measure(turn: Callable[[str], Awaitable[None]], level: Level) -> dict[str, float]:
    """Keep `in_flight` turns going. Latencies in ms of turns that began inside the window, and the window's
    bounds (Unix time) so that the caller can charge CPU time to it."""
    latencies: list[float] = []
    begin = time.perf_counter() + level.warm_up_s
    end = begin + level.seconds
    begin_at = time.time() + level.warm_up_s
    finished = 0

    async def one(number: int) -> None:
        nonlocal finished
        count = 0
        while (started := time.perf_counter()) < end:
            await turn(f"bench/{level.in_flight}-{number}-{count}.0#0")
            count += 1
            now = time.perf_counter()
            if begin <= now < end:
                finished += 1
                if started >= begin:
                    latencies.append((now - started) * 1000)

    await asyncio.gather(*(one(number) for number in range(level.in_flight)))
    latencies.sort()
    return {
        "in_flight": level.in_flight,
        "p50_ms": round(statistics.median(latencies), 3),
        "p99_ms": round(latencies[int(0.99 * (len(latencies) - 1))], 3),
        "turns_per_s": round(finished / level.seconds, 1),
        "turns": finished,
        "begin": begin_at,
        "end": begin_at + level.seconds,
    }
