"""`run`, `up`, `serve`: what starts services."""

from __future__ import annotations

from contextlib import AbstractContextManager, AsyncExitStack, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.commands.output import AsJson, console, log_to, run_async, show_error, write_line

if TYPE_CHECKING:
    from services.launcher import Launcher
    from shared.api import RunDetail
    from shared.http import ApiClient
    from shared.recipe import Recipe
    from shared.settings import Settings
    from shared.summary import Summary

_CANCEL_S = 6.0
RecipeFile = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A TOML file, or the name of one in recipes/.")
]


def load_recipe(given: str) -> Recipe:
    """The validated recipe in a file or under a name. Raises Invalid naming each wrong key."""
    from shared import recipe

    path = Path(given)
    named = Path("recipes") / f"{given}.toml"
    if not path.exists() and "/" not in given and named.exists():
        path = named
    return recipe.load(path)


def run(recipe: RecipeFile, as_json: AsJson = False) -> None:
    """Train a recipe on this machine: start everything, train, stop everything.

    Starts the embedded Kafka and Redis (or uses those that KAFKA__BOOTSTRAP and REDIS__URL name) and the six
    services, submits the recipe, shows its progress and prints a summary. Ctrl-C cancels and cleans up.

    Example: rollart run recipes/quickstart.toml

    Exit codes: 0 finished, 1 the run failed, 2 wrong recipe or setting, 3 no broker or Redis,
    130 interrupted.
    """
    from services.commands.watching import conclude
    from shared.settings import load_settings

    checked, settings = load_recipe(recipe), load_settings()
    log_to(settings.state_dir / "logs" / "launcher.log")
    ended, summary = run_async(_run(checked, settings, as_json=as_json))
    raise typer.Exit(conclude(ended, summary, as_json=as_json))


async def _run(recipe: Recipe, settings: Settings, *, as_json: bool) -> tuple[RunDetail, Summary | None]:
    import asyncio

    from services.commands.connection import announced
    from services.commands.watching import follow, outcome
    from services.launcher import Launcher
    from shared.http import ApiClient

    launcher = Launcher(settings)
    async with AsyncExitStack() as exits:
        with _shown(_starting(launcher), quiet=as_json):
            await exits.enter_async_context(launcher)
        with announced(launcher) as stack:
            async with ApiClient(stack.url, stack.key) as client:
                await _cancel_leftovers(client, launcher)
                submitted = await client.submit_run(recipe.model_dump(mode="json", exclude_unset=True))
                try:
                    ended = await follow(
                        client,
                        submitted,
                        as_json=as_json,
                        restarts=lambda: _counts(launcher),
                        workers=_several(launcher),
                    )
                except asyncio.CancelledError:
                    with _shown("cancelling the run and stopping services", quiet=as_json):
                        await _cancel(client, submitted.run_id)
                        await launcher.stop()
                    raise
                summary = await outcome(client, ended)
        with _shown("stopping services", quiet=as_json):
            await launcher.stop()
    return ended, summary


def _shown(text: str, *, quiet: bool) -> AbstractContextManager[object]:
    from services.progress import waiting

    return nullcontext() if quiet else waiting(console(), text)


def _starting(launcher: Launcher) -> str:
    workers = _several(launcher)
    if not workers:
        return "starting Kafka, Redis and six services"
    return f"starting Kafka, Redis and six services, with the workers {workers}"


def _several(launcher: Launcher) -> str:
    """The generation workers, where there is more than one."""
    from services.processes import describe

    return describe(launcher.workers) if len(launcher.workers) > 1 else ""


def _counts(launcher: Launcher) -> dict[str, int]:
    return {name: len(times) for name, times in launcher.restarts.items()}


async def _cancel_leftovers(client: ApiClient, launcher: Launcher) -> None:
    """Runs that a killed launcher left in its own Redis would be served before ours."""
    if launcher.settings.redis.url != "embedded":
        return
    for run in await client.runs():
        if run.state in ("queued", "running"):
            await _cancel(client, run.run_id, wait_s=0.0)


async def _cancel(client: ApiClient, run_id: str, *, wait_s: float = _CANCEL_S) -> None:
    """Cancel a run and give it a moment to write what it has."""
    import asyncio

    from shared.api import TERMINAL
    from shared.errors import RollArtError

    with suppress(RollArtError, TimeoutError):
        async with asyncio.timeout(wait_s or _CANCEL_S):
            run = await client.cancel_run(run_id)
            while wait_s and run.state not in TERMINAL:
                await asyncio.sleep(0.2)
                run = await client.run(run_id)


def up(as_json: AsJson = False) -> None:
    """Start the stack and stay: submit recipes to it from another terminal. Ctrl-C stops it.

    Prints the gateway's address and key; `rollart submit`, `runs`, `watch` and the others find them by
    themselves on this machine.

    Example: rollart up & rollart submit quickstart --watch

    Exit codes: 1 a service was given up, 2 wrong setting, 3 no broker or Redis, 130 stopped by a signal.
    """
    from shared.settings import load_settings

    settings = load_settings()
    log_to(settings.state_dir / "logs" / "launcher.log")
    run_async(_up(settings, as_json=as_json))


async def _up(settings: Settings, *, as_json: bool) -> None:
    import json

    from services.commands.connection import announced
    from services.launcher import Launcher

    launcher = Launcher(settings)
    async with AsyncExitStack() as exits:
        with _shown(_starting(launcher), quiet=as_json):
            await exits.enter_async_context(launcher)
        with announced(launcher) as stack:
            if as_json:
                workers = {worker.name: worker.worker for worker in launcher.workers}
                found = {"url": stack.url, "key": stack.key, "services": launcher.urls, "workers": workers}
                write_line(json.dumps(found))
            else:
                out = console()
                out.print(f"gateway  {stack.url}   (documentation at {stack.url}/docs)", soft_wrap=True)
                router = launcher.urls["router"]
                out.print(f"router   {router}   (agents of yours: {router}/sessions/ID/v1)", soft_wrap=True)
                out.print(f"key      {stack.key}", soft_wrap=True)
                if workers_shown := _several(launcher):
                    out.print(f"workers  {workers_shown}", soft_wrap=True)
                out.print(f"logs     {launcher.log_dir}", soft_wrap=True)
                out.print("Ctrl-C stops everything.", style="dim")
            await launcher.wait()


def serve(
    services: Annotated[list[str], typer.Argument(metavar="SERVICE...", help="One or more services.")],
) -> None:
    """Run one service (or several) in this process.

    They are gateway, training, environment, reward, router and generation. With KAFKA__BOOTSTRAP and
    REDIS__URL left alone it joins the stack that runs on this machine. HTTP__PORT sets the first one's port.

    Example: HTTP__PORT=8001 rollart serve environment

    Exit codes: 0 stopped by a signal, 1 a loop died, 2 wrong setting.
    """
    from services.commands.connection import attached
    from services.host import APPS
    from services.host import serve as host
    from shared.settings import load_settings

    for name in services:
        if name not in APPS:
            show_error(f"SERVICE: no service is named {name!r}; known: {', '.join(APPS)}")
            raise typer.Exit(2)
    raise typer.Exit(host(services, attached(load_settings())))


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command()(run)
    app.command()(up)
    app.command()(serve)
