"""Following a run to its end, and what is said about it then. Used by `run`, `watch` and `submit --watch`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from services.commands.output import FAILED, console, write_line
from shared.api import RunDetail
from shared.errors import NotFound
from shared.summary import Summary

if TYPE_CHECKING:
    from rich.table import Table

    from shared.http import ApiClient


async def follow(
    client: ApiClient,
    run: RunDetail,
    *,
    as_json: bool = False,
    restarts: Callable[[], Mapping[str, int]] = dict,
    workers: str = "",
) -> RunDetail:
    """Show a run until it has ended; the run as it is then. `workers` are those of a stack of our own."""
    if as_json:
        async for event in client.events(run.run_id):
            write_line(json.dumps({"event": event.kind, "id": event.event_id, "data": event.data}))
        return await client.run(run.run_id)

    from services.progress import Display

    warm = run.recipe.get("warm_start")
    steps = warm.get("steps") if isinstance(warm, dict) else 0
    with Display(
        console(),
        run.run_id,
        warm_steps=steps if isinstance(steps, int) else 0,
        restarts=restarts,
        workers=workers,
    ) as display:
        async for event in client.events(run.run_id):
            display.show(event)
    return await client.run(run.run_id)


async def outcome(client: ApiClient, run: RunDetail) -> Summary | None:
    """The summary, where the run got far enough to have one."""
    try:
        return await client.summary(run.run_id)
    except NotFound:
        return None


def conclude(run: RunDetail, summary: Summary | None, *, as_json: bool) -> int:
    """Print how a run ended and where its results lie; the exit code."""
    if as_json:
        write_line(summary.model_dump_json() if summary else run.model_dump_json(exclude={"recipe"}))
    else:
        _print(run, summary)
    return 0 if run.state == "finished" else FAILED


def _print(run: RunDetail, summary: Summary | None) -> None:
    from rich.text import Text

    out = console()
    style = {"finished": "bold green", "failed": "bold red"}.get(run.state, "bold yellow")
    head = Text.assemble((run.run_id, "bold"), " ", (run.state, style))
    if run.error:
        head.append(f": {run.error}")
    out.print(head, soft_wrap=True)
    if summary is not None:
        out.print(_tasks(summary))
        out.print(_figures(summary))
    if run.folder:
        out.print(Text.assemble(("results in ", "dim"), run.folder), soft_wrap=True)


def _tasks(summary: Summary) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for title in ("task", "before", "after", "change", "episodes", "turns"):
        table.add_column(title, justify="left" if title == "task" else "right")
    for name, task in summary.tasks.items():
        before, after = task.reward_before, task.reward_after
        change = "" if before is None or after is None else f"{after - before:+.2f}"
        table.add_row(
            name,
            "–" if before is None else f"{before:.2f}",
            "–" if after is None else f"{after:.2f}",
            change,
            f"{task.episodes:,}",
            f"{task.turns_mean:.1f}",
        )
    return table


def _figures(summary: Summary) -> Table:
    from rich.table import Table

    from services.progress import duration

    groups = summary.groups
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(groups.dropped.items())) or "0"
    errors = ", ".join(f"{count} {kind}" for kind, count in sorted(summary.errors.items())) or "none"
    step = summary.step_time
    rows = {
        "time": f"{duration(summary.wall_s)} for {summary.steps} steps, {summary.versions} versions",
        "step": f"{step.mean_s:.2f} s = wait {step.wait_s:.2f} + train {step.train_s:.2f} "
        f"+ publish {step.publish_s:.2f}",
        "tokens": f"{summary.tokens.sampled:,} sampled, {summary.tokens.trained:,} trained, "
        f"{summary.tokens_per_s:,.0f}/s",
        "lag": f"at most {summary.lag.max}",
        "groups": f"{groups.issued} issued = {groups.trained} trained + {dropped} dropped + "
        f"{groups.in_flight} in flight",
        "busy": ", ".join(f"{name} {stage.share:.0%}" for name, stage in summary.stages.items()) or "–",
        "errors": errors,
    }
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim")
    for name, said in rows.items():
        table.add_row(name, said)
    return table
