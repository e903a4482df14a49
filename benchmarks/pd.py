"""`rollart bench pd`: split turns against turns that stay together, and tasks on their best-fit hardware.

Everything but the engine is real: a router and one generation service per GPU as processes of their own,
Kafka, and an asker that plays trajectories through the environment's turn client. Three parts:

- `tiny`: the torch engine on a small random model, real KV over sockets between processes. Two workers on a
  few CPU cores have nothing to gain from a split; this shows what it costs.
- `frozenlake`, `math`, `swe`: the synthetic engine at the speeds of one H800 and three H20, together and
  split. Together, the trajectories are shared by both kinds of GPU as they can take them.
- `affinity`: frozenlake and math at the same time, on GPUs of (nearly) equal cost: two H800 (5.7), six H20
  (6), and one H800 with three H20 (5.85), there with declared affinity, and with `auto` after it has had time
  to measure. `auto` looks for the least cost, not the least time on GPUs that are there anyway: hence both.

Seconds of the last two are those of the GPUs: what was measured here, times `time_divisor`. They include the
way through router and Kafka, times the same. What makes up the speeds is written in `gpu_speeds.py`, what is
modelled in `synthetic_engine.py`, the tasks in `pd_profiles.py`. Called by `rollart bench`.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import gpu_speeds
from benchmarks.pd_profiles import FROZENLAKE, MATH, SWE, Job, Lane, Outcome, Plan, Profile, Queue
from benchmarks.turn import environ_of, publish_policy, settings_for_bench, spawn
from services.launcher import Launcher
from shared.errors import Unavailable
from shared.events import AUTO
from shared.settings import LauncherSettings, Settings
from shared.weights import RawTensor

Figures = dict[str, object]
_SYNTHETIC = "benchmarks.synthetic_engine:ByClass"
_DIVISOR = 8.0
_TOKENS_PER_ID = 8
_VOCABULARY = 1000
_WINDOW = 65_536
_ON_GPUS = (FROZENLAKE, MATH, SWE)
_TINY = Profile(name="tiny", prompt=192, turns=6, answer=24, observation=48)
COMPUTE, BANDWIDTH = "compute", "bandwidth"


class Fleet:
    """Workers of one stack, and what runs on them."""

    def __init__(self, workers: str, *, count: int, folder: Path, engine: str = _SYNTHETIC) -> None:
        base = settings_for_bench(folder)
        changes = {
            "generation": base.generation.model_copy(update={"engine": engine}),
            "launcher": LauncherSettings(workers=workers),
        }
        self.settings: Settings = base.model_copy(update=changes)
        self.count = count

    async def play(
        self, jobs: Sequence[Job], *, config: str, tensors: Mapping[str, RawTensor] | None = None
    ) -> list[Outcome]:
        """Start the stack, play the jobs in turn, stop it."""
        async with Launcher(self.settings, services=["router", "generation"]) as stack:
            await publish_policy(stack.redis_url, stack.settings, config=config, tensors=tensors)
            asker = await spawn(
                ["benchmarks.pd_asker", self._plan(jobs).model_dump_json()], environ_of(stack)
            )
            assert asker.stdout is not None
            try:
                found = [Outcome.model_validate_json(line) async for line in asker.stdout]
                if await asker.wait():
                    raise Unavailable(f"the asking process of the benchmark ended with {asker.returncode}")
            finally:
                if asker.returncode is None:
                    asker.kill()
                    await asker.wait()
        return found

    def _plan(self, jobs: Sequence[Job]) -> Plan:
        synthetic = self.settings.generation.engine == _SYNTHETIC
        return Plan(
            workers=self.count,
            tokens_per_id=_TOKENS_PER_ID if synthetic else 1,
            vocab_size=_VOCABULARY if synthetic else 512,
            context_window=_WINDOW if synthetic else 2048,
            jobs=list(jobs),
        )


def _synthetic_config() -> str:
    synthetic = {"time_divisor": _DIVISOR, "tokens_per_id": _TOKENS_PER_ID}
    return json.dumps({"vocab_size": _VOCABULARY, "synthetic": synthetic})


def _job(name: str, *queues: tuple[Profile, int, list[Lane]]) -> Job:
    return Job(name=name, queues=[Queue(profile=p, trajectories=n, lanes=lanes) for p, n, lanes in queues])


def _split(players: int) -> Lane:
    return Lane(players=players, affinity=BANDWIDTH, prefill_affinity=COMPUTE, phases="split")


def _together(players: int, device_class: str) -> Lane:
    return Lane(players=players, affinity=device_class, phases="together")


def _mixed_jobs(count: int, players: int) -> list[Job]:
    """On one H800 and three H20 that do both phases."""
    together = [_together(players, COMPUTE), _together(players, BANDWIDTH)]
    jobs = [_job(one.name, (one, count, together)) for one in _ON_GPUS]
    declared = _affinity_job("declared", count, 2 * players, (COMPUTE, BANDWIDTH))
    # The first lets the router measure.
    return [*jobs, declared, *(_affinity_job(n, count, 2 * players, (AUTO, AUTO)) for n in ("first", AUTO))]


def _affinity_job(name: str, count: int, players: int, classes: tuple[str, str]) -> Job:
    """Both tasks at once, the classes for frozenlake and for math."""
    lanes = [[_together(players // 2, one)] for one in classes]
    return _job(name, (FROZENLAKE, count, lanes[0]), (MATH, count, lanes[1]))


@dataclass(frozen=True)
class Size:
    """How much is played."""

    trajectories: int
    players: int
    """Of each lane of GPUs; two lanes play a job."""


_FULL, _QUICK = Size(trajectories=48, players=8), Size(trajectories=12, players=6)
"""The KV of so many trajectories fits into one H800: beyond that a prefill worker drops prefixes before their
next turn, computes them anew, and a split loses more than it gains."""


async def _fleet(workers: str, count: int, jobs: Sequence[Job], *, tiny: bool = False) -> dict[str, Outcome]:
    with tempfile.TemporaryDirectory(prefix="rollart-bench-") as scratch:
        if tiny:
            # Torch stays out of the other parts, and out of `rollart bench` until it is needed.
            from benchmarks.random_model import random_weights, tiny_config

            config = tiny_config()
            fleet = Fleet(workers, count=count, folder=Path(scratch), engine="torch")
            found = await fleet.play(jobs, config=config.to_json_string(), tensors=random_weights(config))
        else:
            fleet = Fleet(workers, count=count, folder=Path(scratch))
            found = await fleet.play(jobs, config=_synthetic_config())
    return {outcome.name: outcome for outcome in found}


async def _tiny(size: Size) -> Figures:
    """Two workers of the torch engine."""
    count, players = 2 * size.trajectories, size.players
    lanes = [_together(players // 2, COMPUTE), _together(players // 2, BANDWIDTH)]
    together = await _fleet(
        "compute:both,bandwidth:both", 2, [_job("tiny", (_TINY, count, lanes))], tiny=True
    )
    split = await _fleet(
        "compute:prefill,bandwidth:decode", 2, [_job("tiny", (_TINY, count, [_split(players)]))], tiny=True
    )
    return {"tiny": _compared(together["tiny"], split["tiny"], scale=1.0)}


async def _synthetic(size: Size) -> tuple[Figures, Figures]:
    """Split against together, and the affinity of two tasks."""
    count, players = size.trajectories, size.players
    mixed = await _fleet("compute:both,bandwidth:both*3", 4, _mixed_jobs(count, players))
    jobs = [_job(one.name, (one, count, [_split(2 * players)])) for one in _ON_GPUS]
    split = await _fleet("compute:prefill,bandwidth:decode*3", 4, jobs)
    alone: dict[str, float] = {}
    for name, workers, number, one in (
        ("h800_s", "compute:both*2", 2, COMPUTE),
        ("h20_s", "bandwidth:both*6", 6, BANDWIDTH),
    ):
        found = await _fleet(workers, number, [_affinity_job(name, count, 2 * players, (one, one))])
        alone[name] = _seconds(found[name], _DIVISOR)
    declared, auto = (_seconds(mixed[name], _DIVISOR) for name in ("declared", AUTO))
    affinity: Figures = {
        **alone,
        "declared_s": declared,
        "auto_s": auto,
        "declared_cost": _cost(mixed["declared"]),
        "auto_cost": _cost(mixed[AUTO]),
        "declared_over_h800": round(alone["h800_s"] / declared, 3),
        "declared_over_h20": round(alone["h20_s"] / declared, 3),
        "auto_over_h800": round(alone["h800_s"] / auto, 3),
        "auto_over_h20": round(alone["h20_s"] / auto, 3),
    }
    compared = {one.name: _compared(mixed[one.name], split[one.name], scale=_DIVISOR) for one in _ON_GPUS}
    return dict(compared), affinity


def _seconds(outcome: Outcome, scale: float) -> float:
    return round(outcome.seconds * scale, 2)


def _cost(outcome: Outcome) -> float:
    """Seconds in which the GPUs were busy, times their prices."""
    counts = {"compute:both": (1, gpu_speeds.H800.cost), "bandwidth:both": (3, gpu_speeds.H20.cost)}
    shares = ((share, *counts[kind]) for kind, share in outcome.busy.items())
    return round(sum(share * n * price for share, n, price in shares) * outcome.seconds * _DIVISOR, 1)


def _compared(together: Outcome, split: Outcome, *, scale: float) -> Figures:
    return {
        "together_s": _seconds(together, scale),
        "split_s": _seconds(split, scale),
        "speedup": round(together.seconds / split.seconds, 3),
        "turns": split.turns,
        "handed_over": split.handed_over,
        "recomputed": sum(split.recomputed.values()),
    }


async def run(*, quick: bool) -> Figures:
    """The figures: `{"pd": {profile: …}, "affinity": …}`."""
    size = _QUICK if quick else _FULL
    on_gpus, affinity = await _synthetic(size)
    return {"pd": {**await _tiny(size), **on_gpus}, "affinity": {"frozenlake + math": affinity}}


def main(*, quick: bool = False) -> Figures:
    """Run and return the figures."""
    return asyncio.run(run(quick=quick))


if __name__ == "__main__":
    print(json.dumps(main(), indent=2))
