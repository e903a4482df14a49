"""Runs `rollart run` as a user does, in a process of its own, and looks at what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from shared.summary import Summary, check_conservation, read_summary

ROOT = Path(__file__).parents[2]


@dataclass
class Job:
    """One `rollart run` in progress."""

    process: subprocess.Popen[str]
    folder: Path

    @property
    def run_folder(self) -> Path | None:
        """Of the run, once it exists."""
        found = sorted((self.folder / "runs").glob("*/recipe.json"))
        return found[0].parent if found else None

    def records(self, kind: str) -> list[dict[str, object]]:
        """Lines of metrics.jsonl so far."""
        path = self.run_folder / "metrics.jsonl" if self.run_folder else None
        if path is None or not path.exists():
            return []
        lines = path.read_text().splitlines()
        return [record for line in lines if (record := _json(line)) and record["kind"] == kind]

    def service(self, name: str) -> psutil.Process:
        """The process of a service, by its name in the process list."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if " ".join(child.cmdline()).strip().startswith(f"rollart serve {name}"):
                    return child
            except psutil.Error:
                continue
        raise LookupError(name)

    def until(self, condition: Callable[[], object], *, timeout_s: float, what: str) -> None:
        """Wait for a condition while the job runs."""
        limit = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the job ended while waiting for {what}:\n{self.output()}"
            assert time.monotonic() < limit, f"no {what} within {timeout_s} s:\n{self.output()}"
            time.sleep(0.05)

    def until_step(self, step: int, *, timeout_s: float = 120) -> None:
        """Wait until so many steps are recorded."""
        self.until(lambda: len(self.records("step")) >= step, timeout_s=timeout_s, what=f"step {step}")

    def output(self) -> str:
        """What the user has seen so far, and the end of the services' logs."""
        text = (self.folder / "output.txt").read_text()
        logs = [f"--- {p.name}\n{p.read_text()[-1500:]}" for p in (self.folder / "state/logs").glob("*.log")]
        return "\n".join([text, *logs])

    def finish(self, *, timeout_s: float = 240) -> Summary:
        """Wait for a good end; the summary, its conservation checked again."""
        code = self.process.wait(timeout_s)
        assert code == 0, self.output()
        assert self.run_folder is not None
        summary = read_summary(self.run_folder / "summary.json")
        check_conservation(summary.groups)
        return summary


@contextmanager
def rollart_run(recipe: Path, folder: Path, **environ: str) -> Iterator[Job]:
    """Start a job; whatever happens, nothing of it is left running afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("KAFKA__", "REDIS__"))}
    env |= {
        "ROLLART_STATE_DIR": str(folder / "state"),
        "ROLLART_RUNS_DIR": str(folder / "runs"),
        **environ,
    }
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "run", str(recipe)],
            cwd=ROOT,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield Job(process, folder)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()


def leftovers(folder: Path) -> list[str]:
    """Processes whose environment names this folder: there must be none after a job."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("ROLLART_STATE_DIR") == str(folder / "state"):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def _json(line: str) -> dict[str, object] | None:
    try:
        found: dict[str, object] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found
