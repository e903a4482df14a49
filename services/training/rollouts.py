"""Asks for rollouts, and gathers those that are no training groups: warm start and evaluation."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from services.training.admission import GRACE_S, Group
from shared import telemetry
from shared.bus import Bus
from shared.events import Purpose, RewardSpec, RolloutRequested, Sampling, TrajectoryScored
from shared.recipe import Recipe
from shared.topics import ROLLOUTS

_LOG = structlog.get_logger()
_SEEDS = 2**31 - 1
_MAX_ATTEMPTS = 3


class Issuer:
    """Publishes rollout requests of one run."""

    def __init__(self, bus: Bus, recipe: Recipe, *, run_id: str) -> None:
        self._bus = bus
        self._recipe = recipe
        self._run_id = run_id
        self.deadline_s = recipe.rollout.deadline_s

    def issue_group(self, group: Group) -> None:
        """Every member of a training group."""
        prompt = group.prompt
        rollout = self._recipe.rollout
        sampling = Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=self._recipe.tasks[prompt.task].max_tokens_per_turn,
        )
        for member in range(rollout.group_size):
            self.publish(
                self.request(
                    prompt.task,
                    group=f"{prompt.task}-{prompt.index}",
                    member=member,
                    attempt=prompt.attempt,
                    seed=train_seed(self._recipe.seed, prompt.task, prompt.index),
                    purpose="train",
                    policy=self._run_id,
                    sampling=sampling,
                    max_staleness=rollout.max_staleness,
                )
            )

    def request(
        self,
        task: str,
        *,
        group: str,
        seed: int,
        purpose: Purpose,
        policy: str,
        sampling: Sampling,
        member: int = 0,
        attempt: int = 0,
        max_staleness: int | None = None,
    ) -> RolloutRequested:
        """One rollout of a task of the recipe."""
        settings = self._recipe.tasks[task]
        placement = self._recipe.placement(task)
        group_id = f"{self._run_id}/{group}"
        return RolloutRequested(
            run_id=self._run_id,
            trajectory_id=f"{group_id}.{member}#{attempt}",
            group_id=group_id,
            member=member,
            attempt=attempt,
            task=task,
            environment=settings.environment,
            config=settings.config,
            seed=seed,
            split="eval" if purpose == "eval" else "train",
            purpose=purpose,
            actor="scripted" if purpose == "warm_start" else "policy",
            skill=settings.skill,
            policy=policy,
            sampling=sampling,
            max_turns=settings.max_turns,
            context_window=self._recipe.rollout.context_window,
            max_staleness=max_staleness,
            deadline=time.time() + self._recipe.rollout.deadline_s,
            affinity=placement.affinity,
            prefill_affinity=placement.prefill_affinity,
            phases=placement.phases,
            reward=RewardSpec(scorer=settings.reward, config=settings.reward_config),
        )

    def publish(self, rollout: RolloutRequested) -> None:
        """Hand it to the environments."""
        self._bus.publish(
            ROLLOUTS,
            rollout,
            key=rollout.trajectory_id,
            run_id=rollout.run_id,
            purpose=rollout.purpose,
            traceparent=telemetry.root_traceparent(rollout.trajectory_id),
        )


@dataclass
class Campaign:
    """A fixed set of rollouts outside training: issued a bounded number at a time, asked again when lost."""

    issuer: Issuer
    rollouts: Sequence[RolloutRequested]
    max_open: int = 512
    results: dict[str, TrajectoryScored] = field(default_factory=dict)
    """Group id → the first result that came."""
    lost: int = 0
    """Rollouts that never came back, all attempts together."""
    on_progress: Callable[[int, int], None] = lambda done, total: None

    def __post_init__(self) -> None:
        self._open: dict[str, RolloutRequested] = {}
        self._changed = asyncio.Event()

    def add(self, scored: TrajectoryScored) -> None:
        """A result; duplicates and unknown ones are left out."""
        group_id = scored.trajectory.group_id
        if self._open.pop(group_id, None) is not None:
            self.results[group_id] = scored
            self._changed.set()

    async def run(self) -> list[TrajectoryScored]:
        """Until every rollout has come back or was given up; in the order of the requests."""
        waiting = list(reversed(self.rollouts))
        while waiting or self._open:
            while waiting and len(self._open) < self.max_open:
                rollout = waiting.pop()
                # Its time runs from now: those before it may have taken long.
                rollout = rollout.model_copy(update={"deadline": time.time() + self.issuer.deadline_s})
                self._open[rollout.group_id] = rollout
                self.issuer.publish(rollout)
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), 1.0)
            except TimeoutError:
                self._ask_again()
            self.on_progress(len(self.results), len(self.rollouts))
        return [self.results[r.group_id] for r in self.rollouts if r.group_id in self.results]

    def _ask_again(self) -> None:
        now = time.time()
        for group_id, rollout in list(self._open.items()):
            if now < rollout.deadline + GRACE_S:
                continue
            del self._open[group_id]
            if rollout.attempt + 1 >= _MAX_ATTEMPTS:
                self.lost += 1
                _LOG.error("rollout lost", trajectory=rollout.trajectory_id)
                continue
            attempt = rollout.attempt + 1
            again = rollout.model_copy(
                update={
                    "attempt": attempt,
                    "trajectory_id": f"{group_id}.{rollout.member}#{attempt}",
                    "deadline": now + self.issuer.deadline_s,
                }
            )
            self._open[group_id] = again
            self.issuer.publish(again)


def train_seed(seed: int, task: str, index: int) -> int:
    """The environment seed of a training prompt: follows from the recipe's seed, the task and the index."""
    return zlib.crc32(f"{seed}/{task}/{index}".encode()) % _SEEDS
