"""`bench`: what the system costs."""

from __future__ import annotations

from typing import Annotated

import typer

from services.commands.output import AsJson, console, write_line

bench = typer.Typer(no_args_is_help=True, help="Measure what the system itself costs.")


@bench.callback()
def _group() -> None:
    """Keeps `turn` a command of its own while it is the only one."""


@bench.command()
def turn(
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Of each measurement.")] = 6.0,
    as_json: AsJson = False,
) -> None:
    """Time a turn through environment, router, worker and back, with an engine that answers at once.

    Runs the bare pipeline of the same messages beside it, for comparison; takes about a minute.

    Example: rollart bench turn --json | jq '.in_flight["16"].p50_ms'

    Exit codes: 0, 2 wrong setting, 3 no broker or Redis.
    """
    import json

    from benchmarks.turn import main
    from shared.settings import TelemetrySettings
    from shared.telemetry import configure_logs

    # On stderr: what is printed is for whoever reads the figures.
    configure_logs(TelemetrySettings(log_level="warning"), service="bench")
    found = main(seconds=seconds)
    if as_json:
        write_line(json.dumps(found))
    else:
        _print(found)


def _print(found: dict[str, object]) -> None:
    """One row per load, ours above the bare pipeline."""
    from rich.table import Table

    rows = [
        (load, name, figures)
        for name, part in (("RollArt", found.get("in_flight")), ("bare", found.get("bare")))
        if isinstance(part, dict)
        for load, figures in part.items()
        if isinstance(figures, dict)
    ]
    columns = list(dict.fromkeys(key for _, _, figures in rows for key in figures))
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for title in ("in flight", "pipeline", *columns):
        table.add_column(title, justify="left" if title == "pipeline" else "right")
    for load, name, figures in sorted(rows, key=lambda row: (int(row[0]), row[1])):
        values = (figures.get(column) for column in columns)
        table.add_row(load, name, *(f"{v:,.2f}" if isinstance(v, float) else str(v) for v in values))
    console().print(table)


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(bench, name="bench")
