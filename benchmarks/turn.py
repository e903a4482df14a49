"""`rollart bench turn`: what a turn costs on its way through environment, router, worker and back.

The engine answers at once, so that only the way is measured. Ours (three real processes: the environment's
turn client, the router service, the generation service) and the bare pipeline of the same three messages run
in turn, on the same broker, in one call. CPU is that of the three processes, the broker's is left out.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks import turn_bare
from benchmarks.turn_asker import POLICY
from services.launcher import Launcher
from shared import weights
from shared.events import PolicyPublished
from shared.settings import RedisSettings, Settings, load_settings
from shared.state import State
from shared.store import open_store

Figures = dict[str, float]


class CpuLog:
    """CPU seconds of processes over time, sampled by a thread."""

    def __init__(self) -> None:
        self._processes: dict[str, list[psutil.Process]] = {}
        self._samples: dict[str, list[tuple[float, float]]] = {}
        threading.Thread(target=self._run, daemon=True).start()

    def watch(self, name: str, pids: Sequence[int]) -> None:
        """Sum these processes under a name."""
        self._samples[name] = []
        self._processes[name] = [psutil.Process(pid) for pid in pids]

    def _run(self) -> None:
        while True:
            for name, processes in list(self._processes.items()):
                try:
                    total = sum(sum(p.cpu_times()[:2]) for p in processes)
                except psutil.NoSuchProcess:
                    continue
                self._samples[name].append((time.time(), total))
            time.sleep(0.05)

    def between(self, name: str, begin: float, end: float) -> float:
        """Seconds used in a window, by the samples nearest to its bounds."""
        samples = self._samples[name]

        def at(when: float) -> float:
            return min(samples, key=lambda sample: abs(sample[0] - when))[1]

        return at(end) - at(begin)


def settings_for_bench(folder: Path) -> Settings:
    """The user's broker and Redis, our own scratch folder and an engine that answers at once."""
    base = load_settings()
    generation = base.generation.model_copy(update={"engine": "instant"})
    return base.model_copy(
        update={"state_dir": folder, "runs_dir": folder / "runs", "generation": generation, "store": ""}
    )


async def publish_policy(
    redis_url: str,
    settings: Settings,
    *,
    config: str = "{}",
    tensors: Mapping[str, weights.RawTensor] | None = None,
    bucket_bytes: int = weights.BUCKET_BYTES,
) -> int:
    """Publish the next version of the policy; its number. Without `tensors` it has no model: the instant
    engine reads none."""
    store = open_store(settings.store_uri)
    state = State(RedisSettings(url=redis_url, prefix=settings.redis.prefix))
    await state.connect()
    await state.acquire_lease("trainer:bench", "bench", ttl_s=600)
    version = (await state.policy(POLICY) or [None])[0]
    number = version.version + 1 if version else 0
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(config)
        uri = weights.publish_model(store, policy=POLICY, folder=Path(model))
    tensors = tensors or {"none": weights.RawTensor("F32", (1,), b"\0\0\0\0")}
    prefix, digest = weights.publish(
        store, tensors, policy=POLICY, version=number, step=0, bucket_bytes=bucket_bytes
    )
    record = PolicyPublished(
        policy=POLICY, version=number, step=0, uri=prefix, digest=digest, published_at=time.time()
    )
    await state.publish_policy(record, model_uri=uri, lease="trainer:bench", owner="bench")
    await state.close()
    return number


def environ_of(stack: Launcher) -> dict[str, str]:
    """What a process of the benchmark needs to join a stack."""
    settings = stack.settings
    environ = {
        "KAFKA__BOOTSTRAP": stack.bootstrap,
        "REDIS__URL": stack.redis_url,
        "KAFKA__PREFIX": settings.kafka.prefix,
        "ROLLART_STATE_DIR": str(settings.state_dir),
        "OMP_NUM_THREADS": "1",
    }
    if settings.kafka.bootstrap == "embedded":
        environ["KAFKA__FETCH_WAIT_MS"] = str(settings.kafka.fetch_wait_ms or 5)
    return environ


async def spawn(arguments: Sequence[str], environ: dict[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, env=os.environ | environ, stdout=asyncio.subprocess.PIPE
    )


async def _line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    if not line:
        raise SystemExit(f"a process of the benchmark ended early with code {await process.wait()}")
    return line


async def run(*, seconds: float, in_flight: Sequence[int]) -> dict[str, object]:
    """The figures: `{"broker", "in_flight": {level: …}, "bare": {level: …}}`."""
    with tempfile.TemporaryDirectory(prefix="rollart-bench-") as scratch:
        settings = settings_for_bench(Path(scratch))
        async with Launcher(settings, services=["router", "generation"]) as stack:
            environ = environ_of(stack)
            await publish_policy(stack.redis_url, stack.settings)
            stack.create_topics(turn_bare.TOPICS)
            return await _compare(stack, environ, seconds=seconds, in_flight=in_flight)


async def _compare(
    stack: Launcher, environ: dict[str, str], *, seconds: float, in_flight: Sequence[int]
) -> dict[str, object]:
    cpu = CpuLog()
    bare = [
        await spawn(["benchmarks.turn_bare", *stage], environ)
        for stage in (("turns", "generate"), ("generate", "replies"))
    ]
    ours: dict[str, Figures] = {}
    plain: dict[str, Figures] = {}
    try:
        for stage in bare:
            await _line(stage)
        for number in in_flight:
            level = json.dumps([[number, seconds, 1.5]])
            asker = await spawn(["benchmarks.turn_bare", "ask", level], environ)
            plain[str(number)] = await _figures(cpu, asker, [p.pid for p in bare])
            asker = await spawn(["benchmarks.turn_asker", level], environ)
            ours[str(number)] = await _figures(cpu, asker, list(_services(stack)))
    finally:
        for stage in bare:
            stage.kill()
            await stage.wait()
    kind = stack.settings.kafka.bootstrap
    return {"broker": kind if kind in ("embedded", "local") else "external", "in_flight": ours, "bare": plain}


def _services(stack: Launcher) -> list[int]:
    return [stack.pids[name] for name in ("router", "generation")]


async def _figures(cpu: CpuLog, asker: asyncio.subprocess.Process, others: Sequence[int]) -> Figures:
    cpu.watch("turn", [asker.pid, *others])
    raw = json.loads(await _line(asker))
    used = cpu.between("turn", raw["begin"], raw["end"])
    await asker.wait()
    return {
        "p50_ms": raw["p50_ms"],
        "p99_ms": raw["p99_ms"],
        "turns_per_s": raw["turns_per_s"],
        "cpu_ms_per_turn": round(1000 * used / max(raw["turns"], 1), 4),
    }


def main(*, seconds: float = 6.0, in_flight: Sequence[int] = (1, 16, 256)) -> dict[str, object]:
    """Run and return the figures."""
    return asyncio.run(run(seconds=seconds, in_flight=in_flight))


if __name__ == "__main__":
    print(json.dumps(main(), indent=2))
