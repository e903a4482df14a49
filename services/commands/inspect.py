"""`tail` and `doctor`: looking at a stack and at the machine it needs."""

from __future__ import annotations

from typing import Annotated

import typer

from services.commands.output import FAILED, AsJson, console, write_line


def tail(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="rollouts, turns, replies, samples, …")],
    from_start: Annotated[
        bool, typer.Option("--from-start", help="From the oldest event kept, not only new ones.")
    ] = False,
    until_end: Annotated[bool, typer.Option("--until-end", help="Stop at the topic's present end.")] = False,
    max_events: Annotated[int | None, typer.Option("--max", min=1, help="Stop after so many.")] = None,
) -> None:
    """Print the events of a topic as JSON lines; joins no group, so it takes nothing from anyone.

    Example: rollart tail samples --from-start --max 5 | jq .event.reward

    Exit codes: 0, 2 no such topic, 3 no broker, 130 interrupted.
    """
    from services.commands.connection import attached
    from shared.bus.tail import tail as read
    from shared.settings import load_settings
    from shared.store import open_store

    settings = attached(load_settings())
    store = open_store(settings.store_uri)
    found = read(settings.kafka, topic, store=store, from_start=from_start, follow=not until_end)
    for count, message in enumerate(found, start=1):
        write_line(message.model_dump_json())
        if count == max_events:
            break


def doctor(as_json: AsJson = False) -> None:
    """Check what a stack needs on this machine, and say what to do about what is missing.

    Looks at versions, ports, broker, Redis and disk. Starts nothing that stays.

    Example: rollart doctor

    Exit codes: 0 all well, 1 something is missing, 2 wrong setting.
    """
    import json
    from dataclasses import asdict

    from services.doctor import checks
    from shared.settings import load_settings

    found = checks(load_settings())
    if as_json:
        write_line(json.dumps({"ok": all(c.ok for c in found), "checks": [asdict(c) for c in found]}))
    else:
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for check in found:
            mark = "[green]✓[/]" if check.ok else "[red]✗[/]"
            table.add_row(mark, check.name, check.detail)
            if check.fix and check.fix != check.detail:
                table.add_row("", "", f"[yellow]→ {check.fix}[/]")
        console().print(table)
    raise typer.Exit(0 if all(check.ok for check in found) else FAILED)


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command()(tail)
    app.command()(doctor)
