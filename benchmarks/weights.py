"""`rollart bench weights`: what new weights cost a worker that decodes.

A router and one generation service as processes of their own, on a store as slow as a network: a model of 100
MB, so many turns in flight all the time, and one new version after the other. Push is the publisher's time,
pull what the worker spends on getting, verifying and staging, accumulated; exposed is the part of all that in
which it could not decode. KV of the old weights is computed again after each swap: that is part of neither,
but of the two rates of tokens. Called by `rollart bench`.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.random_model import random_weights, small_config
from benchmarks.slow_store import slow_uri
from benchmarks.turn import environ_of, publish_policy, settings_for_bench, spawn
from benchmarks.turn_asker import POLICY
from services.launcher import Launcher
from services.processes import serve_command
from shared.errors import Unavailable
from shared.settings import RedisSettings, Settings
from shared.state import State

Figures = dict[str, object]
_BUCKET_BYTES = 16 << 20
_PLAIN_S = 6.0
_LIMIT_S = 120.0


def _command(service: str) -> list[str]:
    return [*serve_command(service)[:2], "benchmarks.slow_store", service]


def _settings(folder: Path, megabits: float) -> Settings:
    base = settings_for_bench(folder)
    generation = base.generation.model_copy(update={"engine": "torch"})
    store = slow_uri(folder / "store", megabits=megabits)
    return base.model_copy(update={"generation": generation, "store": store})


@dataclass
class _Seen:
    """What the worker has counted since it started."""

    pull_s: float
    exposed_s: float
    version: int


class _Load:
    """The asking process, and what it has got so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._at = (0.0, 0)
        """Seconds, and tokens until then."""

    async def run(self) -> None:
        """Loop. Consumes the process's lines."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._at = tuple(json.loads(line))

    async def rate(self, work: asyncio.Task[None] | None = None) -> float:
        """Tokens per second while `work` lasts, or for a while."""
        began, tokens = self._at
        if work is None:
            await asyncio.sleep(_PLAIN_S)
        else:
            await work
        now, total = self._at
        if now <= began:
            raise Unavailable("the asking process of the benchmark has ended or hangs")
        return (total - tokens) / (now - began)


class _Bench:
    """Publishes versions and watches the worker."""

    def __init__(self, stack: Launcher, state: State, *, versions: int) -> None:
        self._stack = stack
        self._state = state
        self._versions = versions
        self.push_s = 0.0
        self.pushed = 0

    async def push(self, seed: int) -> int:
        """One more version; its number."""
        config = small_config()
        tensors = random_weights(config, seed=seed)
        began = time.perf_counter()
        version = await publish_policy(
            self._stack.redis_url,
            self._stack.settings,
            config=config.to_json_string(),
            tensors=tensors,
            bucket_bytes=_BUCKET_BYTES,
        )
        self.push_s += time.perf_counter() - began
        self.pushed += 1
        return version

    async def until(self, version: int) -> None:
        """Wait until it is live. Raises Unavailable where it never is."""
        limit = time.monotonic() + _LIMIT_S
        while not any(w.policies.get(POLICY, -1) >= version for w in await self._state.workers()):
            if time.monotonic() > limit:
                raise Unavailable(f"the benchmark's worker does not load version {version}")
            await asyncio.sleep(0.05)

    async def updates(self) -> None:
        """One version after the other, each when the one before is live."""
        for seed in range(1, self._versions + 1):
            version = await asyncio.create_task(self.push(seed))
            await self.until(version)

    async def seen(self) -> _Seen:
        """The worker's counters, reported after now."""
        now = time.time()
        while True:
            versions = {w.worker_id: w.policies.get(POLICY, -1) for w in await self._state.workers()}
            for process in await self._state.processes():
                # Its counters are renewed every second, and reported every second.
                if process.process_id in versions and process.updated_at > now + 2.5:
                    counters = process.counters
                    return _Seen(counters["pull_s"], counters["exposed_s"], versions[process.process_id])
            await asyncio.sleep(0.1)


async def run(*, megabits: float, versions: int) -> Figures:
    """The figures: `{"weights": {"push_s", "pull_s", "exposed_s", "hidden_share", …}}`, seconds of one
    version."""
    with tempfile.TemporaryDirectory(prefix="rollart-bench-") as scratch:
        settings = _settings(Path(scratch), megabits)
        async with Launcher(settings, services=["router", "generation"], command=_command) as stack:
            state = State(RedisSettings(url=stack.redis_url, prefix=settings.redis.prefix))
            await state.connect()
            bench = _Bench(stack, state, versions=versions)
            first = await bench.push(0)
            asker = await spawn(["benchmarks.weights_asker"], environ_of(stack))
            try:
                figures = await _measure(bench, _Load(asker), first=first)
            finally:
                if asker.returncode is None:
                    asker.kill()
                    await asker.wait()
            await state.close()
    return {"weights": {"megabits_per_s": megabits, **figures}}


async def _measure(bench: _Bench, load: _Load, *, first: int) -> Figures:
    lines = asyncio.create_task(load.run())
    try:
        await bench.until(first)
        before = await bench.seen()
        plain = await load.rate()
        bench.push_s, bench.pushed = 0.0, 0
        updated = await load.rate(asyncio.create_task(bench.updates()))
        after = await bench.seen()
    finally:
        lines.cancel()
    loads = after.version - before.version
    pull_s = (after.pull_s - before.pull_s) / loads
    exposed_s = (after.exposed_s - before.exposed_s) / loads
    return {
        "versions": loads,
        "push_s": round(bench.push_s / bench.pushed, 3),
        "pull_s": round(pull_s, 3),
        "exposed_s": round(exposed_s, 4),
        "hidden_share": round(1 - exposed_s / pull_s, 4),
        "tokens_per_s": round(plain, 1),
        "tokens_per_s_while_updating": round(updated, 1),
    }


def main(*, megabits: float = 400.0, versions: int = 5) -> Figures:
    """Run and return the figures."""
    return asyncio.run(run(megabits=megabits, versions=versions))


if __name__ == "__main__":
    print(json.dumps(main(), indent=2))
