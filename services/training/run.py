"""One run from its recipe to its results.

Phases: `prepare` (scripted play, tokenizer, model) → `warm_start` → `evaluation_before` → `training` →
`evaluation_after` → `export`. Scripted play and evaluation travel through the same services as training
rollouts do. The files of a run are listed in README.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
from transformers import PreTrainedModel

from services.training import model as models
from services.training import report, warm_start
from services.training.journal import Journal
from services.training.loop import TrainingLoop
from services.training.publisher import PolicyPublisher
from services.training.rollouts import Campaign, Issuer
from services.training.trainer import Trainer
from shared import registry
from shared.archive import TrajectoryArchive
from shared.bus import Delivery, Subscription
from shared.errors import ConservationViolated, Internal, RollArtError
from shared.events import RolloutRequested, Sampling, TrajectoryScored
from shared.recipe import Recipe
from shared.records import EvaluationRecord, WarmStartRecord
from shared.service import Context
from shared.summary import Groups, RunState, Summary, check_conservation, write_summary
from shared.tokens import ChatTokenizer
from shared.topics import SAMPLES, training_group

_LOG = structlog.get_logger()
_FOLDER_ERRORS = {
    errno.EACCES, errno.EEXIST, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO,
    errno.ENOTDIR,
}  # fmt: skip


class Run:
    """Owns everything that exists only while one run is trained."""

    def __init__(
        self, context: Context, recipe: Recipe, *, run_id: str, accepted_at: float, owner: str
    ) -> None:
        self._context = context
        self._recipe = recipe
        self.run_id = run_id
        self.violation = ""
        self.fault: OSError | None = None
        """What became of a trajectory that could not be written: the run cannot go on."""
        self.folder = context.settings.runs_dir / run_id
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "recipe.json").write_text(recipe.model_dump_json(indent=2), encoding="utf-8")
        self._journal = Journal(context, run_id=run_id, folder=self.folder, accepted_at=accepted_at)
        self._archive = TrajectoryArchive(self.folder / "trajectories")
        self._issuer = Issuer(context.bus, recipe, run_id=run_id)
        self._publisher = PolicyPublisher(
            context.state, context.store, context.bus, policy=run_id, lease=f"trainer:{run_id}", owner=owner
        )
        self._campaign: Campaign | None = None
        self._loop: TrainingLoop | None = None
        self._subscription: Subscription | None = None
        self._own_busy_s = 0.0
        self._model_folder = self.folder / "model"

    @property
    def busy_s(self) -> float:
        """Seconds of model work: warm start, steps, publishing."""
        return self._own_busy_s + (self._loop.busy_s if self._loop else 0.0)

    async def execute(self) -> None:
        """All phases. Raises what makes the run fail; CancelledError when it is cancelled."""
        await self._journal.processes.begin()
        self._subscription = self._context.bus.subscribe(
            [SAMPLES],
            group=training_group(self.run_id),
            handler=self._handle,
            max_unacked=1_000_000_000,
            # Its events are acknowledged by checkpoints: waiting brings nothing.
            drain_s=0.0,
            relaxed=True,
            accept=lambda headers: headers.get("run") == self.run_id.encode(),
        )
        await self._subscription.assigned.wait()
        # What a recipe names is loaded before anything is played for it.
        registry.load("algorithm", self._recipe.training.algorithm, field="training.algorithm")
        pretrained = await self._pretrained()
        transcripts = await self._collect()
        model, tokenizer_folder = pretrained or await self._tiny(transcripts)
        await self._warm_start(model, tokenizer_folder, transcripts)
        trainer = Trainer(
            model,
            recipe=self._recipe,
            device=self._context.settings.training.device,
            threads=self._context.settings.training.threads,
        )
        await self._publish_first(trainer, tokenizer_folder)
        await self._evaluate("evaluation_before", version=0, step=0)
        await self._train(trainer)
        steps = self._recipe.training.steps
        await self._evaluate("evaluation_after", version=steps, step=steps)
        await self._export(model, tokenizer_folder)

    # Samples

    def _handle(self, deliveries: Sequence[Delivery]) -> None:
        if self._subscription is None:
            # The books are closed: what comes now is no part of them.
            return
        for delivery in deliveries:
            scored = delivery.event
            assert isinstance(scored, TrajectoryScored)
            try:
                self._archive.append(scored)
            except OSError as error:
                self.fault = error
            if scored.trajectory.purpose == "train" and self._loop is not None:
                self._loop.add(scored, delivery.ack)
                continue
            if self._campaign is not None:
                self._campaign.add(scored)
            delivery.ack()

    async def _gather(self, phase: str, rollouts: list[RolloutRequested]) -> list[TrajectoryScored]:
        self._campaign = Campaign(self._issuer, rollouts)
        try:
            found = await self._campaign.run()
        finally:
            if self._campaign.lost:
                self._journal.errors["rollouts_lost"] += self._campaign.lost
            self._campaign = None
            self._archive.flush()
        if rollouts and not any(scored.reward is not None for scored in found):
            reasons = sorted({scored.trajectory.reason or scored.reason for scored in found})
            raise Internal(
                f"{phase}: no episode succeeded ({', '.join(reasons) or 'none came back'}); see the "
                "environment's and reward's logs"
            )
        return found

    # Phases

    async def _phase(self, name: str) -> float:
        await self._context.state.update_run(self.run_id, phase=name)
        return time.time()

    async def _collect(self) -> list[TrajectoryScored]:
        """Scripted play, for the tokenizer and the warm start."""
        total = self._recipe.warm_start.episodes
        if total == 0 or (self._recipe.model != "tiny" and self._recipe.warm_start.steps == 0):
            return []
        start = await self._phase("prepare")
        tasks = list(self._recipe.tasks)
        rollouts = [
            self._issuer.request(
                task,
                group=f"warm-{task}-{index}",
                seed=2**31 + self._recipe.seed * 10_000_019 + index,
                purpose="warm_start",
                policy="",
                sampling=Sampling(),
            )
            for index in range(total // len(tasks) + 1)
            for task in tasks
        ][:total]
        found = await self._gather("prepare", rollouts)
        rewards = [scored.reward for scored in found if scored.reward is not None]
        await self._journal.phase(
            "prepare", start, episodes=len(found), reward=sum(rewards) / max(len(rewards), 1)
        )
        return [scored for scored in found if scored.reward is not None]

    async def _pretrained(self) -> tuple[PreTrainedModel, Path] | None:
        """The model that the recipe names; None for one that is built."""
        if self._recipe.model == "tiny":
            return None
        await self._phase("prepare")
        return await asyncio.to_thread(models.load_pretrained, self._recipe.model)

    async def _tiny(self, transcripts: Sequence[TrajectoryScored]) -> tuple[PreTrainedModel, Path]:
        recipe = self._recipe
        texts = [message.content for scored in transcripts for message in scored.trajectory.messages]
        folder = self.folder / "tokenizer"

        def build() -> PreTrainedModel:
            models.train_tokenizer(texts, vocab_size=recipe.tiny.vocab_size, folder=folder)
            return models.build_tiny(
                recipe.tiny,
                tokenizer_folder=folder,
                context_window=recipe.rollout.context_window,
                seed=recipe.seed,
            )

        return await asyncio.to_thread(build), folder

    async def _warm_start(
        self, model: PreTrainedModel, tokenizer_folder: Path, transcripts: Sequence[TrajectoryScored]
    ) -> None:
        settings = self._recipe.warm_start
        if settings.steps == 0 or not transcripts:
            return
        start = await self._phase("warm_start")
        tokenizer = ChatTokenizer.from_folder(tokenizer_folder)
        rows = await asyncio.to_thread(
            warm_start.make_rows,
            [scored.trajectory for scored in transcripts],
            tokenizer,
            context_window=self._recipe.rollout.context_window,
        )
        progress = warm_start.run(model, rows, settings=settings, seed=self._recipe.seed)
        loss, tokens = 0.0, 0
        while (done := await self._timed(lambda: next(progress, None))) is not None:
            loss, tokens = done.loss, tokens + done.tokens
            if done.step % 10 == 0 or done.step == settings.steps:
                await self._journal.write(WarmStartRecord(step=done.step, time=time.time(), loss=done.loss))
        await self._journal.phase("warm_start", start, loss=loss, tokens=tokens, steps=settings.steps)

    async def _timed(
        self, function: Callable[[], warm_start.WarmStartProgress | None]
    ) -> warm_start.WarmStartProgress | None:
        began = time.perf_counter()
        try:
            return await asyncio.to_thread(function)
        finally:
            self._own_busy_s += time.perf_counter() - began

    async def _publish_first(self, trainer: Trainer, tokenizer_folder: Path) -> None:
        models.save_model_folder(trainer.model, tokenizer_folder, self._model_folder)
        await self._publisher.publish_model(self._model_folder)
        await self._publisher.publish(trainer.raw_weights(), version=0, step=0)

    async def _evaluate(self, phase: str, *, version: int, step: int) -> None:
        """Held-out episodes with exactly this version."""
        settings = self._recipe.evaluation
        if settings.episodes == 0:
            return
        start = await self._phase(phase)
        rollouts = [
            self._issuer.request(
                task,
                group=f"{phase}-{task}-{index}",
                seed=settings.first_seed + index,
                purpose="eval",
                policy=f"{self.run_id}@{version}",
                sampling=Sampling(
                    temperature=settings.temperature,
                    top_p=self._recipe.rollout.top_p if settings.temperature else 1.0,
                    top_k=self._recipe.rollout.top_k if settings.temperature else 0,
                    max_tokens=self._recipe.tasks[task].max_tokens_per_turn,
                ),
            )
            for index in range(settings.episodes)
            for task in self._recipe.tasks
        ]
        found = await self._gather(phase, rollouts)
        rewards: dict[str, list[float]] = {task: [] for task in self._recipe.tasks}
        for scored in found:
            if scored.reward is not None:
                rewards[scored.trajectory.task].append(scored.reward)
        means = {task: sum(values) / len(values) for task, values in rewards.items() if values}
        await self._journal.write(
            EvaluationRecord(
                version=version,
                step=step,
                time=time.time(),
                reward=means,
                episodes={task: len(values) for task, values in rewards.items()},
            )
        )
        await self._journal.phase(phase, start, **{f"reward_{task}": mean for task, mean in means.items()})

    async def _train(self, trainer: Trainer) -> None:
        start = await self._phase("training")
        self._loop = TrainingLoop(
            run_id=self.run_id,
            recipe=self._recipe,
            folder=self.folder,
            state=self._context.state,
            trainer=trainer,
            publisher=self._publisher,
            issuer=self._issuer,
            journal=self._journal,
        )
        try:
            await self._loop.run()
        finally:
            self._journal.training_s = time.time() - start
        await self._journal.phase("training", start, steps=self._recipe.training.steps)

    async def _export(self, model: PreTrainedModel, tokenizer_folder: Path) -> None:
        start = await self._phase("export")
        await asyncio.to_thread(models.export_folder, model, tokenizer_folder, self.folder / "export")
        await self._journal.phase("export", start)

    # The end

    async def conclude(self, state: RunState) -> Summary:
        """Close the books whatever happened: nothing in flight, files complete, conservation checked.

        The summary's state is `failed` where it is violated (`violation` says how).
        """
        self._leave_samples()
        groups = Groups()
        loop = self._loop
        if loop is not None:
            left = loop.admission.drop_all("run_ended" if state == "finished" else state)
            await self._context.state.set_open_groups(self.run_id, removed=[d.group.group_id for d in left])
            groups = loop.admission.groups()
            self._journal.errors["late_trajectories"] = loop.admission.late
            self._journal.errors["duplicate_trajectories"] = loop.admission.duplicates
        if state != "finished":
            await self._context.state.abort_run(self.run_id, state)
        self._archive.flush()
        try:
            check_conservation(groups)
        except ConservationViolated as error:
            self.violation, state = error.message, "failed"
            self._journal.errors["conservation_violated"] = 1
        summary = await self._journal.summary(
            state=state,
            groups=groups,
            push_s=self._publisher.push_s,
            version=loop.version if loop else 0,
            tasks=list(self._recipe.tasks),
        )
        self._journal.close()
        write_summary(self.folder / "summary.json", summary)
        await asyncio.to_thread(report.write_report, self.folder)
        for scratch in ("tokenizer", "model"):
            shutil.rmtree(self.folder / scratch, ignore_errors=True)
        return summary

    def abandon(self) -> None:
        """Let go of everything and write no summary. Idempotent."""
        self._leave_samples()
        self._journal.close()

    def _leave_samples(self) -> None:
        if self._subscription is not None:
            self._context.bus.leave(self._subscription)
            self._subscription = None


def reason(error: BaseException, folder: Path) -> str:
    """What to tell the user of a run that failed; `folder` is that of its results."""
    if isinstance(error, RollArtError):
        return error.message
    if isinstance(error, OSError) and error.errno in _FOLDER_ERRORS:
        place = error.filename or folder
        return (
            f"cannot write to {place}: {error.strerror}; make room or set ROLLART_RUNS_DIR to another folder"
        )
    return f"{type(error).__name__}: {error}"
