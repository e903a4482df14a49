"""The RL loop of a run: issue groups, wait for a batch, take a step, publish a version.

    admission.issue → rollouts … samples → admission.add → batch → trainer.step → publisher.publish
                 ↑                                                                        │
                 └───────────────── groups close, the budget is free again ───────────────┘

Rollouts go on while a step is taken: with α ≥ 1 the next batch grows during forward and backward.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path

import structlog

from services.training import checkpoint
from services.training.admission import Admission, Dropped
from services.training.journal import Journal
from services.training.mismatch import mismatch
from services.training.publisher import PolicyPublisher
from services.training.rollouts import Issuer
from services.training.trainer import StepStats, Trainer
from shared import metrics
from shared.errors import Internal, RollArtError
from shared.events import TrajectoryScored
from shared.recipe import Recipe
from shared.records import StepRecord
from shared.state import State

_LOG = structlog.get_logger()
_LOOK_S = 0.5
_HOPELESS_FACTOR = 3
"""So many budgets of groups failing in a row, with none trained between, end the run."""


class TrainingLoop:
    """Drives the RL phase of one run."""

    def __init__(
        self,
        *,
        run_id: str,
        recipe: Recipe,
        folder: Path,
        state: State,
        trainer: Trainer,
        publisher: PolicyPublisher,
        issuer: Issuer,
        journal: Journal,
    ) -> None:
        self._run_id = run_id
        self._recipe = recipe
        self._folder = folder
        self._state = state
        self._trainer = trainer
        self._publisher = publisher
        self._issuer = issuer
        self._journal = journal
        self.admission = Admission(recipe, run_id=run_id)
        self.version = 0
        self.busy_s = 0.0
        self._arrived = asyncio.Event()
        self._owed: list[Callable[[], None]] = []
        self._sampled_before = 0
        self._dropped_since: Counter[str] = Counter()
        self._fields: dict[str, float] = {}

    def add(self, scored: TrajectoryScored, ack: Callable[[], None]) -> None:
        """A training trajectory from `samples`; acknowledged when its group is retired and checkpointed."""
        before = self.admission.late + self.admission.duplicates
        completed = self.admission.add(scored, ack)
        if self.admission.late + self.admission.duplicates == before:
            self._journal.count_episode(scored)
        if completed is not None:
            self._arrived.set()

    async def run(self) -> None:
        """All steps of the recipe. Raises when the run cannot go on."""
        steps = self._recipe.training.steps
        step_began = time.perf_counter()
        for step in range(1, steps + 1):
            await self._top_up(steps - step + 1)
            waited = time.perf_counter()
            batch = await self._next_batch(steps - step + 1)
            wait_s = time.perf_counter() - waited
            stats, train_s = await self._train(batch)
            await _whole(self._finish(step, batch, stats, wait_s, train_s, step_began))
            step_began = time.perf_counter()

    async def _finish(
        self,
        step: int,
        batch: Mapping[str, Sequence[TrajectoryScored]],
        stats: StepStats,
        wait_s: float,
        train_s: float,
        step_began: float,
    ) -> None:
        """What makes a step count: all of it or none, also where the run is cancelled meanwhile."""
        publish_s = await self._publish(step)
        await self._retire(batch, step)
        await self._record(step, batch, stats, wait_s, train_s, publish_s, time.perf_counter() - step_began)

    async def _top_up(self, steps_left: int) -> None:
        groups = self.admission.issue(version=self.version, now=time.time(), steps_left=steps_left)
        if not groups:
            return
        await self._state.set_open_groups(self._run_id, added=[group.group_id for group in groups])
        for group in groups:
            self._issuer.issue_group(group)
            # Other loops of this process get their turn between groups.
            await asyncio.sleep(0)
        metrics.GROUPS_OPEN.set(len(self.admission.open))

    async def _next_batch(self, steps_left: int) -> Mapping[str, list[TrajectoryScored]]:
        while True:
            self._arrived.clear()
            await self._evict(steps_left)
            batch = self.admission.batch(version=self.version)
            if batch is not None:
                return batch
            try:
                await asyncio.wait_for(self._arrived.wait(), _LOOK_S)
            except TimeoutError:
                continue

    async def _evict(self, steps_left: int) -> None:
        """Drop what can no longer be trained, and issue its prompts again."""
        dropped = self.admission.evict(version=self.version, now=time.time())
        if not dropped:
            return
        for item in dropped:
            self._note_drop(item)
        await self._state.set_open_groups(self._run_id, removed=[d.group.group_id for d in dropped])
        if self.admission.failures_in_a_row >= _HOPELESS_FACTOR * self.admission.budget:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in self.admission.dropped.items())
            raise Internal(f"no group can be completed ({reasons}); see the environment's and reward's logs")
        await self._top_up(steps_left)

    def _note_drop(self, item: Dropped) -> None:
        self._dropped_since[item.reason] += 1
        metrics.GROUPS.labels(item.group.prompt.task, item.reason).inc()
        # What was dropped needs no checkpoint: its prompt is in the ledger again.
        for ack in item.group.acks:
            ack()
        if item.given_up:
            self._journal.errors["prompt_given_up"] += 1
            _LOG.error("prompt given up", group=item.group.group_id, reason=item.reason)

    async def _train(self, batch: Mapping[str, Sequence[TrajectoryScored]]) -> tuple[StepStats, float]:
        began = time.perf_counter()
        stats = await asyncio.to_thread(self._trainer.step, batch)
        train_s = time.perf_counter() - began
        self.busy_s += train_s
        metrics.TRAIN_SECONDS.observe(train_s)
        for name in ("rejected", "skipped"):
            if count := getattr(stats, name):
                self._journal.errors[f"train_{name}"] += count
        members = [scored for group in batch.values() for scored in group]
        limit = self._recipe.training.max_mismatch_kl
        wrong = mismatch(stats, members, version=self.version, limit=limit)
        if wrong is not None:
            self._journal.errors["sampler_mismatch"] += 1
            _LOG.error("sampler mismatch", why=wrong)
        return stats, train_s

    async def _publish(self, step: int) -> float:
        began = time.perf_counter()
        await self._publisher.publish(self._trainer.raw_weights(), version=self.version + 1, step=step)
        self.version += 1
        took = time.perf_counter() - began
        self.busy_s += took
        metrics.PUBLISH_SECONDS.observe(took)
        metrics.POLICY_VERSION.set(self.version)
        return took

    async def _retire(self, batch: Mapping[str, Sequence[TrajectoryScored]], step: int) -> None:
        """Close the trained groups; acknowledge them once a checkpoint holds their effect."""
        trained_version = self.version - 1
        for members in batch.values():
            for scored in members:
                lag = trained_version - scored.trajectory.start_version
                self._journal.count_lag(lag)
                metrics.LAG.observe(lag)
        for group_id in batch:
            metrics.GROUPS.labels(self.admission.open[group_id].prompt.task, "trained").inc()
        self._owed += self.admission.retire(list(batch))
        await self._state.set_open_groups(self._run_id, removed=list(batch))
        last = step == self._recipe.training.steps
        if last or step % self._recipe.checkpoint.every_steps == 0:
            await self.save(step)

    async def save(self, step: int) -> None:
        """Write a checkpoint and pay the acknowledgements it covers. A full disk is counted, not fatal."""
        ledger = self.admission.ledger() | {"run_id": self._run_id, "version": self.version, "step": step}
        try:
            await asyncio.to_thread(
                checkpoint.save,
                self._folder / "checkpoints",
                step=step,
                state=self._trainer.state_dict(),
                ledger=ledger,
                keep=self._recipe.checkpoint.keep,
            )
        except RollArtError as error:
            self._journal.errors["checkpoint_failed"] += 1
            _LOG.error("checkpoint failed", step=step, error=error.message)
            return
        owed, self._owed = self._owed, []
        for ack in owed:
            ack()

    async def _record(
        self,
        step: int,
        batch: Mapping[str, Sequence[TrajectoryScored]],
        stats: StepStats,
        wait_s: float,
        train_s: float,
        publish_s: float,
        step_s: float,
    ) -> None:
        self.admission.check(await self._state.open_groups(self._run_id))
        metrics.STEPS.inc()
        metrics.BATCH_WAIT_SECONDS.observe(wait_s)
        sampled = self._journal.sampled - self._sampled_before
        self._sampled_before = self._journal.sampled
        members = [scored for group in batch.values() for scored in group]
        record = StepRecord(
            step=step,
            version=self.version,
            time=time.time(),
            elapsed_s=time.time() - self._journal.accepted_at,
            lag=_count(str(self.version - 1 - m.trajectory.start_version) for m in members),
            tokens_sampled=sampled,
            tokens_trained=stats.tokens_trained,
            tokens_per_s=sampled / max(step_s, 1e-6),
            wait_s=wait_s,
            train_s=train_s,
            publish_s=publish_s,
            step_s=step_s,
            loss=stats.loss,
            entropy=stats.entropy,
            grad_norm=stats.grad_norm,
            mismatch_kl=stats.mismatch_kl,
            ess=stats.ess,
            clip_fraction=(stats.clip_fraction_positive + stats.clip_fraction_negative) / 2,
            ratio_max=stats.ratio_max,
            learning_rate=stats.learning_rate,
            zero_variance_groups=stats.zero_variance_groups,
            dropped=dict(self._dropped_since),
            open_groups=len(self.admission.open),
            stages=dict(await self._journal.stage_shares()),
            **_per_task(members),
        )
        self._dropped_since.clear()
        await self._journal.write(record)
        await self._state.update_run(self._run_id, step=step, version=self.version)


async def _whole(work: Coroutine[object, object, None]) -> None:
    """Run it to its end; a cancellation that comes meanwhile is raised afterwards."""
    task = asyncio.create_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names))


def _per_task(members: Sequence[TrajectoryScored]) -> dict[str, dict[str, float]]:
    """Task → mean reward, episodes, mean turns."""
    by_task: dict[str, list[TrajectoryScored]] = {}
    for scored in members:
        by_task.setdefault(scored.trajectory.task, []).append(scored)
    return {
        "reward": {task: sum(s.reward or 0.0 for s in found) / len(found) for task, found in by_task.items()},
        "episodes": {task: len(found) for task, found in by_task.items()},
        "turns_mean": {
            task: sum(len(s.trajectory.turns) for s in found) / len(found) for task, found in by_task.items()
        },
    }
