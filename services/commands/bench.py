"""`bench`: what the system costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from services.commands.output import AsJson, console, write_line

Figures = dict[str, object]

bench = typer.Typer(no_args_is_help=True, help="Measure what the system itself costs.")


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
    from benchmarks.turn import main

    _run(lambda: main(seconds=seconds), as_json=as_json, show=_print_turn)


@bench.command()
def route(
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Of each measurement.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Time what the router adds to a turn at 16, 256 and 2,000 in flight.

    Example: rollart bench route --json | jq '.route["256"]'

    Exit codes: 0, 2 wrong setting, 3 no broker or Redis.
    """
    from benchmarks.route import main

    _run(lambda: main(seconds=seconds), as_json=as_json)


@bench.command()
def weights(
    megabits: Annotated[float, typer.Option(min=1, help="Speed of the store, in Mbit/s.")] = 400.0,
    as_json: AsJson = False,
) -> None:
    """Time push and pull of weights from a store slowed to network speed, and how much of it stalls decoding.

    Example: rollart bench weights --json | jq .weights.hidden_share

    Exit codes: 0, 2 wrong setting, 3 no broker or Redis.
    """
    from benchmarks.weights import main

    _run(lambda: main(megabits=megabits), as_json=as_json)


@bench.command()
def engine(as_json: AsJson = False) -> None:
    """Compare our engine with `transformers` generate, and with vLLM where it is installed.

    The same model and the same 32 requests, of mixed and of equal length.

    Example: rollart bench engine --json | jq .engine.mixed

    Exit codes: 0, 2 wrong setting.
    """
    from benchmarks.engine import main

    _run(main, as_json=as_json)


@bench.command()
def pd(
    quick: Annotated[bool, typer.Option(help="Fewer trajectories: minutes become seconds.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare turns split over prefill and decode workers with turns that stay together.

    On the tiny model, and on an engine that takes the time that H800 and H20 would.

    Example: rollart bench pd --json | jq .pd

    Exit codes: 0, 2 wrong setting, 3 no broker or Redis.
    """
    from benchmarks.pd import main

    _run(lambda: main(quick=quick), as_json=as_json)


def _run(
    measure: Callable[[], Figures], *, as_json: bool, show: Callable[[Figures], None] | None = None
) -> None:
    import json

    from shared.settings import TelemetrySettings
    from shared.telemetry import configure_logs

    # On stderr: what is printed is for whoever reads the figures.
    configure_logs(TelemetrySettings(log_level="warning"), service="bench")
    found = measure()
    if as_json:
        write_line(json.dumps(found))
    else:
        (show or _print)(found)


def _print(found: Figures) -> None:
    """A table of whatever is nested two deep; the rest as lines."""
    for name, part in found.items():
        rows = dict(part) if isinstance(part, dict) else {"": part}
        nested = {key: value for key, value in rows.items() if isinstance(value, dict)}
        if nested:
            _table([name, *dict.fromkeys(k for v in nested.values() for k in v)], nested)
        for key, value in rows.items():
            if not isinstance(value, dict):
                console().print(f"{name} {key}".strip(), _text(value))


def _table(columns: list[str], rows: dict[str, dict[str, object]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for i, title in enumerate(columns):
        table.add_column(title, justify="right" if i else "left")
    for name, figures in rows.items():
        table.add_row(name, *(_text(figures.get(column)) for column in columns[1:]))
    console().print(table)


def _print_turn(found: Figures) -> None:
    """One row per load, ours above the bare pipeline."""
    rows: dict[str, dict[str, object]] = {}
    for name, key in (("RollArt", "in_flight"), ("bare", "bare")):
        part = found.get(key)
        assert isinstance(part, dict)
        rows |= {f"{load} {name}": figures for load, figures in part.items()}
    ordered = dict(sorted(rows.items(), key=lambda row: (int(row[0].partition(" ")[0]), row[0])))
    _table(["in flight", *dict.fromkeys(k for v in ordered.values() for k in v)], ordered)


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    return "–" if value is None else str(value)


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(bench, name="bench")
