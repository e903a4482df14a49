"""`report.html` of a run: one file without outside resources, made from what the run left in its folder.

Called by the trainer when a run ends in any way; safe to call again. Reads `summary.json`,
`metrics.jsonl` and `recipe.json`, each of which may be missing.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import jinja2
import structlog
from markupsafe import Markup

from services.training.metrics_log import FILE, read_metrics
from services.training.report_plots import Plot, Points, Series, bars, lines, stacked
from shared.records import EvaluationRecord, PhaseRecord, StepRecord, WarmStartRecord
from shared.summary import Summary, TaskSummary, read_summary, write_atomically

log = structlog.get_logger()


@dataclass(frozen=True)
class _Run:
    """What the folder holds."""

    name: str
    summary: Summary | None
    steps: list[StepRecord]
    phases: list[PhaseRecord]
    warm_start: list[WarmStartRecord]
    evaluations: list[EvaluationRecord]
    recipe: str

    @property
    def started(self) -> float:
        """Seconds since the epoch; 0 where nothing was recorded."""
        times = [phase.start for phase in self.phases] + [record.time for record in self.warm_start]
        times += [step.time - step.elapsed_s for step in self.steps] + [e.time for e in self.evaluations]
        return min(times, default=0.0)

    @property
    def rewards(self) -> list[dict[str, float | None]]:
        """Task → mean reward, of every evaluation and every step."""
        return [e.reward for e in self.evaluations] + [step.reward for step in self.steps]

    @property
    def tasks(self) -> list[str]:
        """Task names, in the recipe's order as far as the summary knows it."""
        names = dict.fromkeys(self.summary.tasks if self.summary else ())
        for reward in self.rewards:
            names |= dict.fromkeys(reward)
        return list(names)


def write_report(run_folder: Path) -> Path:
    """Write `report.html` atomically and return its path. Raises OSError where it cannot be written."""
    run = _read(run_folder)
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("report_template.html")
    started = datetime.fromtimestamp(run.started, UTC).strftime("%Y-%m-%d %H:%M UTC") if run.started else ""
    html = template.render(
        name=run.name,
        state=run.summary.state if run.summary else "unfinished",
        started=started,
        summary=run.summary,
        headlines=[(task, _headline(run, task)) for task in run.tasks],
        facts=_facts(run),
        sections=_sections(run),
        phases=run.phases,
        recipe=run.recipe,
        svg=Markup,
        seconds=_seconds,
    )
    path = run_folder / "report.html"
    write_atomically(path, html)
    return path


def _read(folder: Path) -> _Run:
    summary: Summary | None = None
    try:
        summary = read_summary(folder / "summary.json")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        log.warning("report.summary_unreadable", folder=str(folder), error=str(error))
    try:
        recipe = json.dumps(json.loads((folder / "recipe.json").read_bytes()), indent=2, ensure_ascii=False)
    except (OSError, ValueError):
        recipe = ""
    records = read_metrics(folder / FILE)
    return _Run(
        name=summary.run_id if summary else folder.resolve().name,
        summary=summary,
        steps=[record for record in records if isinstance(record, StepRecord)],
        phases=[record for record in records if isinstance(record, PhaseRecord)],
        warm_start=[record for record in records if isinstance(record, WarmStartRecord)],
        evaluations=[record for record in records if isinstance(record, EvaluationRecord)],
        recipe=recipe.encode(errors="replace").decode(),
    )


def _headline(run: _Run, task: str) -> TaskSummary:
    """The task's numbers; from the evaluations where the run left no summary."""
    if run.summary and task in run.summary.tasks:
        return run.summary.tasks[task]
    before = [e.reward.get(task) for e in run.evaluations if e.step == 0]
    after = [e.reward.get(task) for e in run.evaluations if e.step > 0]
    episodes = sum(step.episodes.get(task, 0) for step in run.steps)
    turns = sum(step.episodes.get(task, 0) * (step.turns_mean.get(task) or 0.0) for step in run.steps)
    return TaskSummary(
        reward_before=before[-1] if before else None,
        reward_after=after[-1] if after else None,
        episodes=episodes,
        turns_mean=turns / episodes if episodes else 0.0,
    )


def _facts(run: _Run) -> list[tuple[str, str, str]]:
    """(name, value, remark) of the header's small numbers."""
    last = run.steps[-1] if run.steps else None
    summary = run.summary
    steps = summary.steps if summary else len(run.steps)
    facts = [("Steps", f"{steps:,}", f"{summary.versions:,} versions published" if summary else "")]
    if summary:
        facts.append(("Wall time", _seconds(summary.wall_s), f"{summary.step_time.mean_s:.2f} s a step"))
        sampled, trained = summary.tokens.sampled, summary.tokens.trained
        facts.append(("Tokens sampled", f"{sampled:,}", f"{trained:,} trained"))
        facts.append(("Tokens per second", f"{summary.tokens_per_s:,.0f}", "sampled, RL phase"))
        lag = summary.lag
        counts = sum(lag.histogram.values())
        mean = sum(int(k) * n for k, n in lag.histogram.items()) / counts if counts else 0.0
        facts.append(("Largest lag", f"{lag.max}", f"mean {mean:.2f} versions"))
        exposed = f"push {summary.weights.push_s:.1f} s, pull {summary.weights.pull_s:.1f} s"
        facts.append(("Decoding stalled", f"{summary.weights.exposed_s:.2f} s", exposed))
    elif last:
        facts.append(("Last record", _seconds(last.elapsed_s), "after the run began"))
    return facts


def _sections(run: _Run) -> list[tuple[str, list[Plot]]]:
    """Headings and their plots; a heading without plots is left out."""
    sections = [
        ("Learning", _reward_plots(run)),
        ("Time", _time_plots(run)),
        ("Staleness and throughput", _flow_plots(run)),
        ("Optimisation", _optimisation_plots(run)),
    ]
    drawn = [(heading, [plot for plot in plots if plot is not None]) for heading, plots in sections]
    return [(heading, plots) for heading, plots in drawn if plots]


def _reward_plots(run: _Run) -> list[Plot | None]:
    def series(*, by_time: bool) -> list[Series]:
        def x(record: StepRecord | EvaluationRecord) -> float:
            return (record.time - run.started) / 60 if by_time else float(record.step)

        return [
            Series(
                task,
                [(x(step), step.reward.get(task)) for step in run.steps],
                [(x(e), e.reward.get(task)) for e in run.evaluations],
            )
            for task in run.tasks
        ]

    values = [v for reward in run.rewards for v in reward.values() if v is not None]
    unit = (-0.02, 1.04) if values and min(values) >= 0 and max(values) <= 1 else None
    note = "Mean of each batch (faint) and its moving average; discs are held-out evaluations."
    return [
        lines("Reward over steps", series(by_time=False), note=note, x_label="step", y_label="mean reward",
              y_range=unit, smooth=True),
        lines("Reward over time", series(by_time=True), note=note, x_label="minutes since the run began",
              y_label="mean reward", y_range=unit, smooth=True),
    ]  # fmt: skip


def _time_plots(run: _Run) -> list[Plot | None]:
    parts: dict[str, Points] = {
        "waiting for a batch": [(s.step, s.wait_s) for s in run.steps],
        "forward, backward, optimiser": [(s.step, s.train_s) for s in run.steps],
        "publishing weights": [(s.step, s.publish_s) for s in run.steps],
    }
    names = dict.fromkeys(name for step in run.steps for name in step.stages)
    stages = [Series(name, [(s.step, s.stages.get(name)) for s in run.steps]) for name in names]
    return [
        stacked("Trainer time per step", parts, note="Where each step of the trainer went.", x_label="step",
                y_label="seconds"),
        lines("Stage activity", stages, note="Share of the time since the last step that a stage was busy.",
              x_label="step", y_label="busy share", y_range=(-0.02, 1.04), smooth=True, wide=True),
    ]  # fmt: skip


def _flow_plots(run: _Run) -> list[Plot | None]:
    lag: Counter[str] = Counter(run.summary.lag.histogram if run.summary else ())
    if not lag:
        for step in run.steps:
            lag.update(step.lag)
    ordered = {key: lag[key] for key in sorted(lag, key=int)}
    speed = Series("tokens per second", [(s.step, s.tokens_per_s) for s in run.steps])
    return [
        bars("Lag", ordered, note="Versions between a trajectory's start and the step that trained it.",
             x_label="lag (versions)", y_label="trajectories"),
        lines("Tokens per second", [speed], note="Sampled by the policy, between steps.", x_label="step",
              y_label="tokens / s", smooth=True),
    ]  # fmt: skip


def _optimisation_plots(run: _Run) -> list[Plot | None]:
    def one(title: str, note: str, points: Points, *, y_label: str) -> Plot | None:
        return lines(title, [Series(title, points)], note=note, x_label="step", y_label=y_label, smooth=True)

    steps = run.steps
    return [
        one("Warm-start loss", "Cross-entropy on scripted play, before RL.",
            [(r.step, r.loss) for r in run.warm_start], y_label="nats per token"),
        one("Entropy", "Of the policy, over trained tokens.", [(s.step, s.entropy) for s in steps],
            y_label="nats"),
        one("Gradient norm", "Global L2 norm before clipping.", [(s.step, s.grad_norm) for s in steps],
            y_label="norm"),
        one("Sampler mismatch", "KL between sampler and trainer at the same version.",
            [(s.step, s.mismatch_kl) for s in steps], y_label="nats per token"),
        one("Clipped tokens", "Fraction of trained tokens whose ratio was clipped.",
            [(s.step, s.clip_fraction) for s in steps], y_label="fraction"),
        one("Groups without variance", "All members had the same reward: no gradient.",
            [(s.step, float(s.zero_variance_groups)) for s in steps], y_label="groups"),
    ]  # fmt: skip


def _seconds(value: float) -> str:
    """`4 min 09 s`, `12.3 s`, `2 h 05 min`."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
