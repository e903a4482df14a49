"""`submit`, `runs`, `watch`, `cancel`: runs on a gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from services.commands.output import AsJson, Key, Url, console, run_async, write_line
from services.commands.stack import RecipeFile, load_recipe

if TYPE_CHECKING:
    from shared.api import Run, RunDetail
    from shared.http import ApiClient

RunId = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or `last` for the newest.")]


async def _find(client: ApiClient, run_id: str) -> RunDetail:
    from shared.errors import NotFound

    if run_id == "last":
        newest = await client.runs(limit=1)
        if not newest:
            raise NotFound("no run yet: submit a recipe with `rollart submit`")
        run_id = newest[0].run_id
    return await client.run(run_id)


def submit(
    recipe: RecipeFile,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow the run to its end.")] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(help="A repeat with the same key makes no second run.")
    ] = None,
    as_json: AsJson = False,
    url: Url = "",
    key: Key = "",
) -> None:
    """Queue a recipe on a gateway; one run trains at a time.

    Example: rollart submit recipes/quickstart.toml --watch

    Exit codes: 0 queued (with --watch: finished), 1 the run failed, 2 wrong recipe, 3 no gateway,
    130 interrupted (the run goes on).
    """
    checked = load_recipe(recipe)

    async def work() -> int:
        from services.commands.connection import open_client
        from services.commands.watching import conclude, follow, outcome

        async with open_client(url, key) as client:
            run = await client.submit_run(
                checked.model_dump(mode="json", exclude_unset=True), idempotency_key=idempotency_key
            )
            if not watch:
                write_line(run.model_dump_json(exclude={"recipe"}) if as_json else run.run_id)
                return 0
            ended = await follow(client, run, as_json=as_json)
            return conclude(ended, await outcome(client, ended), as_json=as_json)

    raise typer.Exit(run_async(work()))


def runs(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Newest so many.")] = 20,
    as_json: AsJson = False,
    url: Url = "",
    key: Key = "",
) -> None:
    """List runs, newest first.

    Example: rollart runs --json | jq -r '.runs[] | select(.state == "finished") | .run_id'

    Exit codes: 0, 2 wrong option, 3 no gateway.
    """

    async def work() -> list[Run]:
        from services.commands.connection import open_client

        async with open_client(url, key) as client:
            return await client.runs(limit=limit)

    found = run_async(work())
    if as_json:
        from shared.api import RunList

        write_line(RunList(runs=found).model_dump_json())
        return
    _print(found)


def _print(found: list[Run]) -> None:
    import time

    from rich.table import Table

    from services.progress import duration

    if not found:
        console().print("no run yet: submit a recipe with `rollart submit`", style="dim")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for title in ("run", "state", "step", "version", "age", "took"):
        table.add_column(title, overflow="fold")
    now = time.time()
    for run in found:
        took = (run.ended_at or now) - run.started_at if run.started_at else 0.0
        table.add_row(
            run.run_id,
            f"{run.state} {run.phase}".strip() if run.state == "running" else run.state,
            f"{run.step}/{run.steps}",
            str(run.version),
            duration(max(0.0, now - run.created_at)),
            duration(took) if took > 0 else "",
        )
    console().print(table)


def watch(run: RunId, as_json: AsJson = False, url: Url = "", key: Key = "") -> None:
    """Follow a run to its end; with --json one event a line, the summary last.

    Example: rollart watch last

    Exit codes: 0 finished, 1 failed or cancelled, 3 no gateway, 130 interrupted (the run goes on).
    """

    async def work() -> int:
        from services.commands.connection import open_client
        from services.commands.watching import conclude, follow, outcome

        async with open_client(url, key) as client:
            ended = await follow(client, await _find(client, run), as_json=as_json)
            return conclude(ended, await outcome(client, ended), as_json=as_json)

    raise typer.Exit(run_async(work()))


def cancel(run: RunId, as_json: AsJson = False, url: Url = "", key: Key = "") -> None:
    """Cancel a run: a queued one ends at once, a running one within seconds.

    Example: rollart cancel last

    Exit codes: 0 cancelled, 1 it has ended already, 3 no gateway.
    """

    async def work() -> RunDetail:
        from services.commands.connection import open_client

        async with open_client(url, key) as client:
            return await client.cancel_run((await _find(client, run)).run_id)

    ended = run_async(work())
    said = f"{ended.run_id} {'cancelled' if ended.state == 'cancelled' else 'is being cancelled'}"
    write_line(ended.model_dump_json(exclude={"recipe"}) if as_json else said)


def register(app: typer.Typer) -> None:
    """Add these commands."""
    for command in (submit, runs, watch, cancel):
        app.command()(command)
