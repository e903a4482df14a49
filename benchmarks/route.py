"""`rollart bench route`: what the router adds to a turn.

Three real processes: an asker with the environment's turn client, the router service, and the generation
service with an engine that answers at once. The same turns take two ways, in turn and several times, in one
run: through the router, and straight to the worker's partition, as if the asker had assigned them. What the
router adds is the difference; its CPU time is its own process's. Called by `rollart bench`.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.turn import CpuLog, environ_of, publish_policy, settings_for_bench, spawn
from services.launcher import Launcher

_ROUNDS = 2
_WARM_UP_S = 1.0


async def run(*, seconds: float, in_flight: Sequence[int]) -> dict[str, object]:
    """The figures: `{"route": {level: …}, "broker"}`."""
    with tempfile.TemporaryDirectory(prefix="rollart-bench-") as scratch:
        settings = settings_for_bench(Path(scratch))
        async with Launcher(settings, services=["router", "generation"]) as stack:
            environ = environ_of(stack)
            await publish_policy(stack.redis_url, stack.settings)
            route = await _measure(stack, environ, seconds=seconds, in_flight=in_flight)
    kind = settings.kafka.bootstrap
    return {"route": route, "broker": kind if kind in ("embedded", "local") else "external"}


async def _measure(
    stack: Launcher, environ: dict[str, str], *, seconds: float, in_flight: Sequence[int]
) -> dict[str, object]:
    cpu = CpuLog()
    cpu.watch("router", [stack.pids["router"]])
    levels = [[number, seconds / _ROUNDS, _WARM_UP_S] for number in in_flight for _ in range(_ROUNDS)]
    asker = await spawn(["benchmarks.route_asker", json.dumps(levels)], environ)
    assert asker.stdout is not None
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    async for line in asker.stdout:
        raw = json.loads(line)
        raw["router_cpu_ms"] = 1000 * cpu.between("router", raw["begin"], raw["end"]) / max(raw["turns"], 1)
        found.setdefault((int(raw["in_flight"]), raw["way"]), []).append(raw)
    if await asker.wait():
        raise SystemExit(f"the asking process of the benchmark ended with code {asker.returncode}")
    return {str(number): _compared(found, number) for number in in_flight}


def _compared(found: dict[tuple[int, str], list[dict[str, float]]], number: int) -> dict[str, float]:
    """The mean of the rounds, and what the router adds."""

    def mean(way: str, name: str) -> float:
        return statistics.mean(raw[name] for raw in found[number, way])

    return {
        "requests_per_s": round(mean("routed", "turns_per_s"), 1),
        "p50_ms": round(mean("routed", "p50_ms") - mean("direct", "p50_ms"), 3),
        "p99_ms": round(mean("routed", "p99_ms") - mean("direct", "p99_ms"), 3),
        "router_cpu_ms": round(mean("routed", "router_cpu_ms"), 4),
        "routed_p50_ms": round(mean("routed", "p50_ms"), 3),
        "routed_p99_ms": round(mean("routed", "p99_ms"), 3),
        "direct_p50_ms": round(mean("direct", "p50_ms"), 3),
        "direct_p99_ms": round(mean("direct", "p99_ms"), 3),
        "direct_requests_per_s": round(mean("direct", "turns_per_s"), 1),
        "retries": max(raw["retries"] for raws in found.values() for raw in raws),
    }


def main(*, seconds: float = 5.0, in_flight: Sequence[int] = (16, 256, 2000)) -> dict[str, object]:
    """Run and return the figures."""
    return asyncio.run(run(seconds=seconds, in_flight=in_flight))


if __name__ == "__main__":
    print(json.dumps(main(), indent=2))
