"""Every error of the command line is one line and one exit code, and nothing heavy is imported for help."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import JsonValue
from rich.console import Console
from typer.testing import CliRunner

from services.cli import app
from services.commands.connection import Stack, attached, running_stack
from services.commands.output import FAILED, INTERRUPTED, UNREACHABLE, WRONG_INPUT, report
from services.commands.rollouts import seeds_of
from services.progress import Display, RunView, arrow, duration, render, sparkline
from shared.errors import Conflict, FieldProblem, Invalid, NotFound, Unavailable
from shared.http import RunEvent
from shared.settings import KafkaSettings, RedisSettings, Settings

ROOT = Path(__file__).parents[2]
COMMANDS = [
    ["run"],
    ["up"],
    ["serve"],
    ["submit"],
    ["runs"],
    ["watch"],
    ["cancel"],
    ["tasks", "submit"],
    ["tasks", "show"],
    ["trajectories"],
    ["tail"],
    ["doctor"],
    ["bench", "turn"],
]


def rollart(*arguments: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ROLLART_")}
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        cwd=cwd,
        env=clean | {"PYTHONPATH": str(ROOT)} | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself_with_an_example_and_its_exit_codes(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert f"Example: {'rollart' if command != ['serve'] else 'HTTP__PORT=8001 rollart'}" in result.output
    assert "Exit codes:" in result.output


def test_help_imports_nothing_heavy() -> None:
    heavy = [
        "fastapi",
        "confluent_kafka",
        "redis",
        "torch",
        "transformers",
        "uvicorn",
        "httpx",
        "shared.settings",
    ]
    code = f"import sys, services.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


WRONG = [
    ("learning_rate = 1e-3", "learning_rate: unknown key here; it belongs in [training]"),
    ("[training]\nlearning_rat = 5e-5", "training.learning_rat: unknown key; did you mean 'learning_rate'?"),
    ("[training]\nlearning_rate = nan", "training.learning_rate:"),
    ("[training]\nsteps = -1", "training.steps:"),
    (
        "[tasks.lake]\nenvironment = 'frozenlak'",
        "tasks.lake.environment: unknown environment 'frozenlak'; did you",
    ),
    ("[training", "bad.toml: not valid TOML"),
]


def test_a_wrong_recipe_is_told_by_key_and_nothing_is_started(tmp_path: Path) -> None:
    recipe = tmp_path / "bad.toml"
    task = "[tasks.lake]\nenvironment = 'frozenlake'\n"
    for text, said in WRONG:
        recipe.write_text(text + "\n" + ("" if "tasks" in text or text == "[training" else task))
        result = CliRunner().invoke(app, ["run", str(recipe)])
        assert isinstance(result.exception, Invalid), (text, result.output)
        assert said in "; ".join(f"{f.field}: {f.message}" for f in result.exception.fields)
    done = rollart("run", "bad.toml", cwd=tmp_path)
    assert done.returncode == WRONG_INPUT
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.toml"]


def test_a_misspelt_setting_and_a_port_in_use_are_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "ok.toml").write_text("[tasks.lake]\nenvironment = 'frozenlake'\n")
    done = rollart("run", "ok.toml", cwd=tmp_path, KAFKA__BOOTSTRAB="x")
    assert (done.returncode, done.stdout) == (WRONG_INPUT, "")
    assert "KAFKA__BOOTSTRAB: unknown setting; did you mean KAFKA__BOOTSTRAP?" in done.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = rollart("up", "--json", cwd=tmp_path, HTTP__PORT=str(taken.getsockname()[1]))
    assert (done.returncode, done.stdout) == (WRONG_INPUT, "")
    assert "port" in done.stderr
    assert "Traceback" not in done.stderr


def test_client_commands_without_a_stack_say_how_to_get_one(tmp_path: Path) -> None:
    done = rollart("runs", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (UNREACHABLE, "")
    assert "rollart up" in done.stderr
    done = rollart("runs", "--url", "http://127.0.0.1:1", cwd=tmp_path)
    assert done.returncode == WRONG_INPUT
    assert "--key" in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Invalid("x", fields=[FieldProblem(field="a.b", message="wrong")]), WRONG_INPUT),
        (Invalid("x"), WRONG_INPUT),
        (Unavailable("x"), UNREACHABLE),
        (NotFound("x"), FAILED),
        (Conflict("x"), FAILED),
        (KeyboardInterrupt(), INTERRUPTED),
        (RuntimeError("x"), FAILED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_kind_of_error_has_its_exit_code_and_no_traceback(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(error) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == (0 if isinstance(error, KeyboardInterrupt) else 1)
    assert "Traceback" not in said.err


def test_seeds_are_numbers_lists_and_spans() -> None:
    assert seeds_of("7") == [7]
    assert seeds_of("1, 2,8-10") == [1, 2, 8, 9, 10]
    for bad in ("", "a", "5-1", "-1", "1-", "0-99999999999"):
        with pytest.raises(Invalid, match="no list of seeds"):
            seeds_of(bad)


def _stack(folder: Path, pid: int) -> Settings:
    stack = Stack(
        pid=pid,
        url="http://g",
        key="k",
        bootstrap="b:1",
        redis_url="redis://r",
        store="file:///s",
        runs_dir=folder,
    )
    (folder / "stack.json").write_text(stack.model_dump_json())
    return Settings(ROLLART_STATE_DIR=folder)


def test_a_service_served_alone_joins_the_stack_of_this_machine(tmp_path: Path) -> None:
    joined = attached(_stack(tmp_path, os.getpid()))
    assert (joined.kafka.bootstrap, joined.redis.url, joined.store) == ("b:1", "redis://r", "file:///s")
    assert joined.api_keys == "k"
    named = Settings(
        ROLLART_STATE_DIR=tmp_path, kafka=KafkaSettings(bootstrap="x:1"), redis=RedisSettings(url="redis://x")
    )
    assert attached(named) == named


def test_the_stack_file_of_a_dead_launcher_counts_for_nothing(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    settings = _stack(tmp_path, child.pid)
    assert running_stack(settings) is None
    with pytest.raises(Invalid, match="rollart up"):
        attached(settings)


def _run(**fields: JsonValue) -> RunEvent:
    return RunEvent("run", "", {"run_id": "r-1", "created_at": 0.0, "state": "running", "steps": 4, **fields})


def _step(step: int, **fields: JsonValue) -> RunEvent:
    data: dict[str, JsonValue] = {
        "kind": "step",
        "step": step,
        "version": step,
        "time": 1.0,
        "elapsed_s": 1.0,
        "step_s": 2.0,
    }
    rewards: JsonValue = {"lake": step / 4, "sea": None}
    return RunEvent("step", f"{step}-0", {**data, "reward": rewards, "lag": {"0": 1, "1": 3}, **fields})


def test_the_view_follows_the_events_of_a_run() -> None:
    view = RunView("r-1", warm_steps=10)
    assert view.phase == "waiting for its turn"
    view.apply(_run(phase="warm_start"))
    view.apply(RunEvent("warm_start", "1", {"kind": "warm_start", "step": 3, "time": 1.0, "loss": None}))
    assert (view.phase, view.progress, view.eta_s) == ("warm start", (3, 10), None)
    view.apply(_run(phase="training"))
    for step in (1, 2):
        view.apply(_step(step, dropped={"stale": step}))
    assert view.progress == (2, 4)
    assert view.eta_s == pytest.approx(4.0)
    assert view.rewards == {"lake": [0.25, 0.5]}
    assert view.lag_mean == pytest.approx(0.75)
    assert (view.lag_max, view.dropped) == (1, 3)
    view.apply(RunEvent("something_new", "9", {"kind": "something_new"}))
    view.apply(_run(state="finished", step=4, ended_at=9.0))
    assert (view.phase, view.eta_s) == ("finished", None)


def test_the_panel_shows_every_figure_at_any_width() -> None:
    view = RunView("r-1")
    evaluation: dict[str, JsonValue] = {
        "kind": "evaluation",
        "version": 0,
        "step": 0,
        "time": 1.0,
        "reward": {"lake": 0.2},
        "episodes": {},
    }
    for event in (
        _run(phase="training"),
        RunEvent("evaluation", "1", evaluation),
        *(_step(i, stages={"generation": 0.9, "reward": None}, tokens_per_s=3214.0) for i in range(1, 5)),
    ):
        view.apply(event)
    for width in (40, 100, 200):
        out = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        out.print(render(view, now=time.time(), restarts={"reward": 2}, width=width))
        text = out.export_text()
        assert all(len(row) <= width for row in text.splitlines())
        if width >= 100:
            for part in (
                "r-1",
                "learning",
                "step 4/4",
                "lake",
                "0.62",
                "0.20",
                "3,214",
                "generation",
                "90%",
                "2×",
            ):
                assert part in text, part


def test_without_a_terminal_each_step_is_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    out = Console(width=80, force_terminal=False)
    with Display(out, "r-1") as display:
        for event in (
            _run(phase="training"),
            _step(1),
            _run(phase="training", step=1),
            _step(2),
            _run(state="finished"),
        ):
            display.show(event)
    said = capsys.readouterr().out
    assert "\x1b" not in said
    lines = said.splitlines()
    assert lines[0] == "r-1: learning"
    assert lines[1].startswith("step 1/4  lake 0.25  lag 0.8")
    assert lines[-1] == "r-1: finished"
    assert len(lines) == 4


def test_small_drawings() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert len(sparkline([i / 1000 for i in range(1000)], width=28)) == 28
    assert sparkline([]) == ""
    assert [arrow([0, 0, 1, 1]), arrow([1, 1, 0, 0]), arrow([1, 1, 1, 1]), arrow([1])] == ["↗", "↘", "→", " "]
    assert [duration(42.9), duration(185), duration(7620)] == ["42s", "3m 05s", "2h 07m"]


@pytest.mark.parametrize("command", [["run", "recipe.toml"], ["up"]])
def test_a_state_folder_that_cannot_be_written_is_wrong_input_naming_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text('[tasks.lake]\nenvironment = "frozenlake"\n')
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROLLART_STATE_DIR", str(tmp_path / "file" / "state"))
    with pytest.raises(Invalid, match="ROLLART_STATE_DIR"):
        CliRunner().invoke(app, command, catch_exceptions=False)
