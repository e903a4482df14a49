"""`tasks` and `trajectories`: rolling out given seeds, and reading what was played."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from services.commands.output import FAILED, AsJson, Key, Url, console, run_async, write_line

if TYPE_CHECKING:
    from rich.text import Text

    from shared.api import Task
    from shared.events import TrajectoryScored
    from shared.http import ApiClient

tasks = typer.Typer(no_args_is_help=True, help="Roll out given seeds, for evaluation or collection.")
_WAIT_S = 10.0


def seeds_of(text: str) -> list[int]:
    """`7`, `1,2,5` or `100-199`, in any mixture. Raises Invalid."""
    from shared.errors import FieldProblem, Invalid

    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            span = range(int(first), int(last if dash else first) + 1)
            if len(span) > 1_000_000 or not span:
                raise ValueError
            found += span
    except ValueError:
        message = f"{text!r} is no list of seeds; write 7 or 1,2,5 or 100-199"
        raise Invalid(message, fields=[FieldProblem(field="--seeds", message=message)]) from None
    return found


@tasks.command("submit")
def submit_task(
    task: Annotated[str | None, typer.Argument(metavar="[TASK]", help="A task of the run's recipe.")] = None,
    seeds: Annotated[str, typer.Option(help="7, or 1,2,5, or 100-199.")] = "0-31",
    run: Annotated[str | None, typer.Option(help="Run whose recipe names the task; default: newest.")] = None,
    policy: Annotated[str | None, typer.Option(help="name or name@version; default: the run's own.")] = None,
    environment: Annotated[
        str | None, typer.Option(help="An environment's name or package.module:Class, in place of a task.")
    ] = None,
    members: Annotated[int, typer.Option(help="Trajectories of one seed.")] = 1,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the recipe's.")] = None,
    scripted: Annotated[
        float | None, typer.Option(metavar="SKILL", help="Scripted play of this skill, 0 to 1, no model.")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait for the end and show it.")] = True,
    as_json: AsJson = False,
    url: Url = "",
    key: Key = "",
) -> None:
    """Play seeds with a policy, or by script; nothing of it is trained.

    Example: rollart tasks submit frozenlake --seeds 1000-1063 --temperature 0

    Exit codes: 0 done, 1 some have no reward, 2 wrong input, 3 no gateway, 130 interrupted (it goes on).
    """
    from pydantic import ValidationError

    from shared import registry
    from shared.api import TaskRequest
    from shared.errors import Invalid

    given: dict[str, object] = {
        "task": task,
        "run_id": run,
        "policy": policy,
        "environment": environment,
        "members": members,
    }
    given |= {"temperature": temperature, "seeds": seeds_of(seeds)}
    if scripted is not None:
        given |= {"actor": "scripted", "skill": scripted}
    try:
        request = TaskRequest.model_validate({name: v for name, v in given.items() if v is not None})
    except ValidationError as error:
        fields = registry.problems(error)
        raise Invalid("; ".join(f.message for f in fields), fields=fields) from error

    async def work() -> Task:
        from services.commands.connection import open_client

        async with open_client(url, key) as client:
            made = await client.submit_task(request)
            return await _until_finished(client, made) if wait else made

    made = run_async(work())
    if not wait:
        write_line(made.model_dump_json() if as_json else made.task_id)
        return
    raise typer.Exit(_show(made, as_json=as_json))


@tasks.command("show")
def show_task(
    task: Annotated[str, typer.Argument(metavar="TASK", help="A task's id.")],
    wait: Annotated[bool, typer.Option("--wait", help="Wait for its end.")] = False,
    as_json: AsJson = False,
    url: Url = "",
    key: Key = "",
) -> None:
    """Show how far a task is: reward of each seed, their mean, failures by reason.

    Example: rollart tasks show task-3f2a91bc --json | jq .reward_mean

    Exit codes: 0, 1 unknown task or some have no reward, 3 no gateway.
    """

    async def work() -> Task:
        from services.commands.connection import open_client

        async with open_client(url, key) as client:
            found = await client.task(task)
            return await _until_finished(client, found) if wait else found

    raise typer.Exit(_show(run_async(work()), as_json=as_json))


async def _until_finished(client: ApiClient, task: Task) -> Task:
    while task.state == "running":
        task = await client.task(task.task_id, wait_s=_WAIT_S)
    return task


def _show(task: Task, *, as_json: bool) -> int:
    code = FAILED if task.failures else 0
    if as_json:
        write_line(task.model_dump_json())
        return code
    from rich.table import Table

    mean = "–" if task.reward_mean is None else f"{task.reward_mean:.3f}"
    out = console()
    by = task.policy or "scripted play"
    out.print(
        f"{task.task_id}  {task.task} by {by}: {task.state}, {task.done}/{task.total}, mean reward {mean}"
    )
    for reason, count in sorted(task.failures.items()):
        out.print(f"  {count} without a reward: {reason}", style="yellow")
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for title in ("seed", "reward", "turns", "trajectory"):
        table.add_column(title, overflow="fold")
    for result in task.results[:40]:
        reward = "–" if result.reward is None else f"{result.reward:g}"
        table.add_row(str(result.seed), reward, str(result.turns), result.trajectory_id)
    out.print(table)
    if len(task.results) > 40:
        out.print(f"… and {len(task.results) - 40} more; --json has all", style="dim")
    return code


def trajectories(
    trajectory: Annotated[
        str, typer.Argument(metavar="ID", help="A trajectory's id, or a run's: lists its newest.")
    ],
    task: Annotated[str | None, typer.Option(help="With a run: only this task's.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="With a run: newest so many.")] = 20,
    as_json: AsJson = False,
    url: Url = "",
    key: Key = "",
) -> None:
    """Read what was played: one trajectory as text, or the newest of a run.

    Example: rollart trajectories 'quickstart-3f2a91/frozenlake-17.3#0'

    Exit codes: 0, 1 unknown, 3 no gateway.
    """

    async def one() -> TrajectoryScored:
        from services.commands.connection import open_client

        async with open_client(url, key) as client:
            return await client.trajectory(trajectory)

    if "/" in trajectory:
        found = run_async(one())
        if as_json:
            write_line(found.model_dump_json())
        else:
            console().print(_readable(found))
        return
    _list(trajectory, task, limit, as_json=as_json, url=url, key=key)


def _list(run_id: str, task: str | None, limit: int, *, as_json: bool, url: str, key: str) -> None:
    from rich.table import Table

    from shared.api import TrajectoryList

    async def work() -> TrajectoryList:
        from services.commands.connection import open_client

        async with open_client(url, key) as client:
            return await client.trajectories(run_id, task=task, limit=limit)

    listed = run_async(work())
    if as_json:
        write_line(listed.model_dump_json())
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for title in ("trajectory", "status", "reward", "turns", "tokens", "version", "seed"):
        table.add_column(title, overflow="fold")
    for brief in listed.trajectories:
        reward = "–" if brief.reward is None else f"{brief.reward:g}"
        numbers = (brief.turns, brief.tokens, brief.start_version, brief.seed)
        table.add_row(brief.trajectory_id, brief.status, reward, *map(str, numbers))
    console().print(table)


def _readable(scored: TrajectoryScored) -> Text:
    from rich.text import Text

    trajectory = scored.trajectory
    reward = "none" if scored.reward is None else f"{scored.reward:g}"
    said = Text()
    said.append(trajectory.trajectory_id, style="bold").append(
        f"  {trajectory.task}, seed {trajectory.seed}\n"
    )
    why = scored.reason or trajectory.reason
    said.append(
        f"{trajectory.status}{f' ({why})' if why else ''}, reward {reward}, {len(trajectory.turns)} turns, "
    )
    said.append(f"{len(trajectory.token_ids)} tokens ({sum(trajectory.mask)} sampled), ")
    said.append(f"version {trajectory.start_version} at its start\n")
    for message in trajectory.messages:
        style = "cyan" if message.role == "assistant" else ""
        said.append(f"\n{message.role:>9}  ", style="dim")
        said.append(message.content.strip().replace("\n", "\n" + " " * 11), style=style)
    return said


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(tasks, name="tasks")
    app.command()(trajectories)
