"""What a person sees of a run while it goes on. Fed with the gateway's events by `services.commands`.

On a terminal a live panel of a few lines, elsewhere one plain line per step and phase.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Self

from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from shared.api import TERMINAL, Run
from shared.http import RunEvent
from shared.records import RECORD, EvaluationRecord, PhaseRecord, StepRecord, WarmStartRecord

_BARS = "▁▂▃▄▅▆▇█"
_SPARK = 28
_STAGE = 12
_STAGES = ("environment", "router", "generation", "reward", "training")
_PHASES = {
    "": "waiting for its turn",
    "prepare": "preparing the model",
    "warm_start": "warm start",
    "evaluation_before": "evaluating before RL",
    "training": "learning",
    "evaluation_after": "evaluating after RL",
    "export": "exporting the model",
}
"""Phase of a run → what a person reads."""
_STYLE = {"running": "cyan", "queued": "yellow", "finished": "green", "failed": "red", "cancelled": "yellow"}


@dataclass
class RunView:
    """A run as far as its events have told."""

    run_id: str
    warm_steps: int = 0
    """Supervised steps the recipe asks for."""
    run: Run | None = None
    warm: WarmStartRecord | None = None
    last: StepRecord | None = None
    rewards: dict[str, list[float]] = field(default_factory=dict)
    """Task → mean reward of each step."""
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=10))
    lag_max: int = 0
    dropped: int = 0
    workers: str = ""
    """Generation workers, where there are several and they are known."""

    def apply(self, event: RunEvent) -> StepRecord | PhaseRecord | WarmStartRecord | EvaluationRecord | None:
        """Take one event in and return the record it carries, if it is one this version knows."""
        if event.run is not None:
            self.run = event.run
            return None
        try:
            record = RECORD.validate_python(event.data)
        except ValidationError:
            return None
        if isinstance(record, StepRecord):
            self._step(record)
        elif isinstance(record, WarmStartRecord):
            self.warm = record
        elif isinstance(record, EvaluationRecord):
            self.evaluations.append(record)
        return record

    def _step(self, record: StepRecord) -> None:
        self.last = record
        self.step_s.append(record.step_s)
        self.dropped += sum(record.dropped.values())
        for task, reward in record.reward.items():
            if reward is not None:
                self.rewards.setdefault(task, []).append(reward)
        self.lag_max = max([self.lag_max, *(int(lag) for lag in record.lag)])

    @property
    def state(self) -> str:
        """State of the run, `queued` until told."""
        return self.run.state if self.run else "queued"

    @property
    def phase(self) -> str:
        """What it does now, in words."""
        if self.state in TERMINAL:
            return self.state
        name = self.run.phase if self.run else ""
        if self.state == "running" and not name:
            return "starting"
        return _PHASES.get(name, name.replace("_", " "))

    @property
    def progress(self) -> tuple[int, int]:
        """Done and total of the present phase; total 0 where it has no end in sight."""
        if self.run is None:
            return 0, 0
        if self.run.phase == "warm_start":
            return (self.warm.step if self.warm else 0), self.warm_steps
        if self.run.phase == "training" or self.state in TERMINAL:
            return max(self.run.step, self.last.step if self.last else 0), self.run.steps
        return 0, 0

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last step, from the pace of the last ten; None outside training."""
        done, total = self.progress
        if self.last is None or not self.step_s or not total or self.state != "running":
            return None
        return max(0, total - done) * sum(self.step_s) / len(self.step_s)

    @property
    def lag_mean(self) -> float | None:
        """Mean lag of the last batch."""
        lags = self.last.lag if self.last else {}
        count = sum(lags.values())
        return sum(int(lag) * n for lag, n in lags.items()) / count if count else None


def sparkline(values: Sequence[float], *, width: int = _SPARK) -> str:
    """The course of a series in one line; within 0 and 1 on that scale, else on its own."""
    if not values:
        return ""
    count = min(width, len(values))
    cuts = [i * len(values) // count for i in range(count + 1)]
    means = [sum(values[i:j]) / (j - i) for i, j in pairwise(cuts)]
    low, high = (0.0, 1.0) if all(0 <= v <= 1 for v in values) else (min(means), max(means))
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in means)


def arrow(values: Sequence[float]) -> str:
    """Where a series is heading: the last five against the five before."""
    if len(values) < 4:
        return " "
    half = min(5, len(values) // 2)
    now = sum(values[-half:]) / half
    before = sum(values[-2 * half : -half]) / half
    margin = 0.01 * max(1.0, abs(before))
    return "↗" if now > before + margin else "↘" if now < before - margin else "→"


def duration(seconds: float) -> str:
    """`42s`, `3m 05s`, `2h 07m`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def render(view: RunView, *, now: float, restarts: Mapping[str, int], width: int) -> RenderableType:
    """The panel."""
    parts: list[RenderableType] = [_title(view, now), _bar(view, width), Text()]
    if view.rewards or view.evaluations:
        parts += [Text(), _tasks(view)]
    if view.last is not None:
        parts += [Text(), _figures(view)]
        if view.last.stages:
            parts += [Text(), _stages(view)]
    if view.dropped:
        parts += [
            Text(),
            Text(f"groups dropped and issued again or given up: {view.dropped}", style="yellow"),
        ]
    if restarts:
        said = ", ".join(f"{name} {count}×" for name, count in sorted(restarts.items()))
        parts += [Text(), Text(f"restarted: {said}; their work was replayed", style="yellow")]
    if view.run is not None and view.run.error:
        parts += [Text(), Text(view.run.error, style="red")]
    return Padding(Group(*parts), (1, 2))


def _title(view: RunView, now: float) -> RenderableType:
    started = (view.run.started_at or view.run.created_at) if view.run else None
    ended = view.run.ended_at if view.run else None
    left = Text.assemble((view.run_id, "bold"), "   ", (view.phase, _STYLE.get(view.state, "cyan")))
    done, total = view.progress
    if total:
        left.append(f"   step {done}/{total}")
    if view.last is not None:
        left.append(f"   version {view.last.version}", style="dim")
    right = Text(style="dim")
    if started is not None:
        right.append(duration(max(0.0, (ended or now) - started)))
    if view.eta_s is not None:
        right.append(f" · about {duration(view.eta_s)} left")
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1, no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, right)
    return grid


def _bar(view: RunView, width: int) -> RenderableType:
    done, total = view.progress
    style = _STYLE.get(view.state, "cyan")
    if total or view.state in TERMINAL:
        return ProgressBar(
            total=max(1, total), completed=done, width=width - 4, complete_style=style, finished_style=style
        )
    return ProgressBar(pulse=True, width=width - 4, pulse_style=style, animation_time=time.monotonic())


def _tasks(view: RunView) -> RenderableType:
    grid = Table.grid(padding=(0, 3))
    for justify in ("left", "right", "left", "left", "left"):
        grid.add_column(justify=justify, no_wrap=True)
    grid.add_row(*(Text(word, style="dim") for word in ("reward", "now", "", "", "held out")))
    names = sorted({*view.rewards, *(task for item in view.evaluations for task in item.reward)})
    for name in names:
        values = view.rewards.get(name, [])
        last = values[-5:]
        now = f"{sum(last) / len(last):.2f}" if last else "–"
        held = [item.reward[name] for item in view.evaluations if item.reward.get(name) is not None]
        shown = " → ".join(f"{value:.2f}" for value in held if value is not None)
        grid.add_row(
            Text(name), Text(now, style="bold"), Text(arrow(values)), Text(sparkline(values), "cyan"),
            Text(shown, style="green" if len(held) > 1 else ""),
        )  # fmt: skip
    return grid


def _figures(view: RunView) -> RenderableType:
    last = view.last
    assert last is not None
    said = Text()
    if last.tokens_per_s is not None:
        said.append(f"{last.tokens_per_s:,.0f}", style="bold").append(" tokens/s", style="dim").append("   ")
    if view.lag_mean is not None:
        said.append("lag ", style="dim").append(f"{view.lag_mean:.1f}", style="bold")
        said.append(f" (at most {view.lag_max})", style="dim").append("   ")
    said.append("step ", style="dim").append(f"{last.step_s:.1f}s", style="bold")
    said.append(
        f" = wait {last.wait_s:.1f} + train {last.train_s:.1f} + publish {last.publish_s:.1f}", style="dim"
    )
    return said


def _stages(view: RunView) -> RenderableType:
    last = view.last
    assert last is not None
    grid = Table.grid(padding=(0, 2))
    names = [*(s for s in _STAGES if s in last.stages), *sorted(set(last.stages) - {*_STAGES, "gateway"})]
    for name in names:
        share = min(1.0, max(0.0, last.stages[name] or 0.0))
        full = round(share * _STAGE)
        bar = Text("━" * full, style="magenta").append("─" * (_STAGE - full), style="bright_black")
        said = view.workers if name == "generation" else ""
        grid.add_row(Text(name, style="dim"), bar, Text(f"{share:4.0%}"), Text(said, style="dim"))
    return grid


def line(view: RunView, record: object) -> str | None:
    """What a record says in one plain line; None for one that would say too much."""
    if isinstance(record, StepRecord):
        total = view.run.steps if view.run else record.step
        if record.step % max(1, total // 50) and record.step != total:
            return None
        said = [f"step {record.step}/{total}"]
        said += [f"{task} {value:.2f}" for task, value in sorted(record.reward.items()) if value is not None]
        if record.tokens_per_s is not None:
            said.append(f"{record.tokens_per_s:,.0f} tokens/s")
        if view.lag_mean is not None:
            said.append(f"lag {view.lag_mean:.1f}")
        if view.eta_s is not None:
            said.append(f"about {duration(view.eta_s)} left")
        return "  ".join(said)
    if isinstance(record, PhaseRecord):
        return f"{_PHASES.get(record.phase, record.phase)}: done in {duration(record.end - record.start)}"
    if isinstance(record, EvaluationRecord):
        said = [f"{task} {value:.2f}" for task, value in sorted(record.reward.items()) if value is not None]
        return f"held-out reward after step {record.step}: {'  '.join(said)}"
    return None


class Display:
    """Shows one run until the `with` ends."""

    def __init__(
        self,
        console: Console,
        run_id: str,
        *,
        warm_steps: int = 0,
        restarts: Callable[[], Mapping[str, int]] = dict,
        workers: str = "",
    ) -> None:
        self._console = console
        self._restarts = restarts
        self._state = ""
        self.view = RunView(run_id, warm_steps=warm_steps, workers=workers)
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                console=console, get_renderable=self._render, refresh_per_second=8, redirect_stdout=False
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, event: RunEvent) -> None:
        """Take one event in; what is on the screen follows."""
        record = self.view.apply(event)
        if self._live is not None:
            return
        text = line(self.view, record)
        if record is None and self._state != self.view.phase:
            self._state = self.view.phase
            text = f"{self.view.run_id}: {self._state}"
        if text is not None:
            self._console.print(text, highlight=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        return render(
            self.view, now=time.time(), restarts=self._restarts(), width=min(self._console.width, 100)
        )


def waiting(console: Console, text: str) -> Live:
    """A spinner for what has no events yet; one plain line where there is no terminal."""
    if not console.is_terminal:
        console.print(text, highlight=False)
    spinner = Padding(Spinner("dots", text=Text(text), style="cyan"), (1, 2))
    return Live(spinner if console.is_terminal else Text(), console=console, transient=True)
