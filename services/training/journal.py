"""What a run leaves behind while it goes: metrics, the event stream, and the sums for its summary."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from pathlib import Path

from services.training.metrics_log import MetricsLog
from shared.events import TrajectoryScored
from shared.records import AnyRecord, EvaluationRecord, PhaseRecord, StepRecord
from shared.service import Context
from shared.state import ProcessRecord, State
from shared.summary import (
    Groups,
    Lag,
    RunState,
    StageSummary,
    StepTime,
    Summary,
    TaskSummary,
    Tokens,
    WeightsTime,
)

_STAGES = ("environment", "router", "generation", "reward", "training")


class Processes:
    """Sums what the processes of the stack report, over restarts, from when it was made."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._seen: dict[tuple[str, float], ProcessRecord] = {}
        self._starts: dict[str, int] = {}
        self.busy_s: dict[str, float] = defaultdict(float)
        self.counters: dict[str, float] = defaultdict(float)
        self.count: Counter[str] = Counter()
        """Service → processes alive at the last look."""
        self._share: dict[tuple[str, float], float] = {}
        self._live: dict[tuple[str, float], str] = {}
        self.restarts: dict[str, int] = {}

    async def begin(self) -> None:
        """What was reported before does not count."""
        for process in await self._state.processes():
            self._seen[process.process_id, process.started_at] = process
        self._starts = await self._state.starts()

    async def look(self) -> None:
        """Add what has been reported since."""
        live: Counter[str] = Counter()
        found = await self._state.processes()
        for process in found:
            key = process.process_id, process.started_at
            before = self._seen.get(key)
            self._seen[key] = process
            if before is not None and process.updated_at > before.updated_at:
                elapsed = process.updated_at - before.updated_at
                self._share[key] = min(1.0, max(0.0, (process.busy_s - before.busy_s) / elapsed))
            live[process.service] += 1
            self.busy_s[process.service] += process.busy_s - (before.busy_s if before else 0.0)
            for name, value in process.counters.items():
                self.counters[name] += value - (before.counters.get(name, 0.0) if before else 0.0)
        self.count = live
        self._live = {(p.process_id, p.started_at): p.service for p in found}
        starts = await self._state.starts()
        self.restarts = {
            service: count - self._starts.get(service, 0)
            for service, count in starts.items()
            if count > self._starts.get(service, 0)
        }

    def share(self, service: str) -> float:
        """Busy share of a service's live processes."""
        shares = [self._share.get(key, 0.0) for key, name in self._live.items() if name == service]
        return sum(shares) / len(shares) if shares else 0.0


class Journal:
    """Of one run."""

    def __init__(self, context: Context, *, run_id: str, folder: Path, accepted_at: float) -> None:
        self._context = context
        self._run_id = run_id
        self._log = MetricsLog(folder)
        self.accepted_at = accepted_at
        self.processes = Processes(context.state)
        self.steps: list[StepRecord] = []
        self.evaluations: list[EvaluationRecord] = []
        self.errors: Counter[str] = Counter()
        self._episodes: Counter[str] = Counter()
        self._turns: Counter[str] = Counter()
        self._lags: Counter[int] = Counter()
        self.sampled = 0
        self.training_s = 0.0
        """Wall time of the RL phase."""

    async def write(self, record: AnyRecord) -> None:
        """Append a record to the metrics, and tell whoever watches."""
        self._log.write(record)
        if isinstance(record, StepRecord):
            self.steps.append(record)
        if isinstance(record, EvaluationRecord):
            self.evaluations.append(record)
        await self._context.state.append_run_event(self._run_id, record.model_dump_json())

    async def phase(self, name: str, start: float, **detail: float) -> None:
        """A phase has ended."""
        await self.write(PhaseRecord(phase=name, start=start, end=time.time(), detail=dict(detail)))

    def count_episode(self, scored: TrajectoryScored) -> None:
        """A training trajectory has come back."""
        trajectory = scored.trajectory
        self.sampled += sum(trajectory.mask)
        if scored.reward is not None:
            self._episodes[trajectory.task] += 1
            self._turns[trajectory.task] += len(trajectory.turns)

    def count_lag(self, lag: int) -> None:
        """A trajectory was trained."""
        self._lags[lag] += 1

    async def stage_shares(self) -> dict[str, float]:
        """Service → share of the time in which its processes were busy, by their last two reports."""
        await self.processes.look()
        return {stage: self.processes.share(stage) for stage in _STAGES}

    async def summary(
        self, *, state: RunState, groups: Groups, push_s: float, version: int, tasks: list[str]
    ) -> Summary:
        """The outcome so far."""
        await self.processes.look()
        wall_s = time.time() - self.accepted_at
        steps = len(self.steps)
        counters = self.processes.counters
        return Summary(
            run_id=self._run_id,
            state=state,
            wall_s=wall_s,
            steps=steps,
            versions=version,
            tokens=Tokens(sampled=self.sampled, trained=sum(s.tokens_trained for s in self.steps)),
            tokens_per_s=self.sampled / self.training_s if self.training_s else 0.0,
            tasks={task: self._task(task) for task in tasks},
            lag=Lag(
                histogram={str(lag): count for lag, count in sorted(self._lags.items())},
                max=max(self._lags, default=0),
            ),
            stages=self._stages(wall_s),
            step_time=StepTime(
                mean_s=_mean([s.step_s for s in self.steps]),
                wait_s=_mean([s.wait_s for s in self.steps]),
                train_s=_mean([s.train_s for s in self.steps]),
                publish_s=_mean([s.publish_s for s in self.steps]),
            ),
            weights=WeightsTime(
                push_s=push_s,
                pull_s=max(0.0, counters.get("pull_s", 0.0)),
                exposed_s=max(0.0, counters.get("exposed_s", 0.0)),
            ),
            groups=groups,
            errors=self._errors(),
        )

    def _task(self, task: str) -> TaskSummary:
        def reward(evaluation: EvaluationRecord | None) -> float | None:
            return evaluation.reward.get(task) if evaluation else None

        before = next((e for e in self.evaluations if e.step == 0), None)
        after = next((e for e in reversed(self.evaluations) if e.step > 0), None)
        episodes = self._episodes[task]
        return TaskSummary(
            reward_before=reward(before),
            reward_after=reward(after),
            episodes=episodes,
            turns_mean=self._turns[task] / episodes if episodes else 0.0,
        )

    def _stages(self, wall_s: float) -> dict[str, StageSummary]:
        found = {}
        for stage in _STAGES:
            busy = max(0.0, self.processes.busy_s.get(stage, 0.0))
            count = max(self.processes.count[stage], 1)
            found[stage] = StageSummary(busy_s=busy, share=min(1.0, busy / max(wall_s * count, 1e-6)))
        return found

    def _errors(self) -> dict[str, int]:
        internal = {"pull_s", "exposed_s", "tokens_sampled"}
        errors = Counter(self.errors)
        for name, value in self.processes.counters.items():
            if name not in internal and value >= 1:
                errors[name] += int(value)
        for service, count in self.processes.restarts.items():
            errors[f"restart_{service}"] += count
        return {kind: count for kind, count in sorted(errors.items()) if count}

    def close(self) -> None:
        """Finish the files."""
        self._log.close()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
