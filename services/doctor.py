"""What this machine lacks to run a stack, and what to do about it. Called by `rollart doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services import processes
from services.launcher import MIN_FREE_BYTES
from shared.embedded import admin
from shared.embedded.kafka import EmbeddedKafka, find_java, kafka_home
from shared.embedded.process import bind
from shared.embedded.redis import ask, find_server
from shared.errors import RollArtError
from shared.settings import Settings

_PACKAGES = {
    "confluent-kafka": (2, 16),
    "redis": (8, 1),
    "fastapi": (0, 165),
    "uvicorn": (0, 54),
    "pydantic": (2, 14),
    "transformers": (5, 24),
    "tokenizers": (0, 23),
    "safetensors": (0, 8),
    "gymnasium": (1, 4),
}


@dataclass(frozen=True)
class Check:
    """One thing looked at."""

    name: str
    ok: bool
    detail: str
    """What was found."""
    fix: str = ""
    """What to do; empty when it is ok."""


def checks(settings: Settings) -> list[Check]:
    """Look at everything a stack with these settings needs. Starts nothing that stays; takes seconds."""
    return [
        _python(),
        *(_package(name, least) for name, least in _PACKAGES.items()),
        _torch(),
        _writable("state folder", settings.state_dir, "ROLLART_STATE_DIR"),
        _writable("runs folder", settings.runs_dir, "ROLLART_RUNS_DIR"),
        _disk(settings.state_dir),
        _port(settings),
        _workers(settings),
        _kafka(settings),
        _redis(settings),
    ]


def _python() -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Check("python", ok, found, "" if ok else "install Python 3.11 or newer and run `make setup`")


def _package(name: str, least: tuple[int, int]) -> Check:
    wanted = ".".join(map(str, least))
    fix = f"run `make setup`, or pip install '{name}>={wanted}'"
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, False, "not installed", fix)
    parts = [int(part) if part.isdigit() else 0 for part in found.split(".")[:2]]
    return _judge(name, tuple(parts) >= least, f"{found} (needs {wanted})", fix)


def _torch() -> Check:
    """In a process of its own: a build for another processor ends the one that imports it."""
    code = "import torch; print(torch.__version__, 'cuda' if torch.cuda.is_available() else 'cpu')"
    fix = "run `make setup`; generation and training need torch"
    if importlib.util.find_spec("torch") is None:
        return Check("torch", False, "not installed", fix)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
        )
    except subprocess.TimeoutExpired:
        return Check("torch", False, "import took more than 120 s", fix)
    tail = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return _judge("torch", done.returncode == 0, done.stdout.strip() or tail, fix)


def _writable(name: str, folder: Path, variable: str) -> Check:
    """Tries the nearest folder that exists, so that looking creates none."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    fix = f"make {existing} a folder you may write to, or set {variable} to another"
    try:
        with tempfile.TemporaryFile(dir=existing):
            return Check(name, True, str(folder.absolute()))
    except OSError as error:
        return Check(name, False, f"{existing}: {error.strerror}", fix)


def _disk(folder: Path) -> Check:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    fix = f"free {MIN_FREE_BYTES // 1_000_000} MB or set ROLLART_STATE_DIR to a folder on another disk"
    return _judge("disk", free >= MIN_FREE_BYTES, f"{free / 1e9:.1f} GB free at {existing}", fix)


def _port(settings: Settings) -> Check:
    host, port = settings.http.host, settings.http.port
    where = f"{host}:{port}" if port else f"any port of {host}"

    def look() -> str:
        bind(host, port).close()
        return f"{where} is free"

    return _try("port", look)


def _workers(settings: Settings) -> Check:
    def look() -> str:
        workers = processes.plan(settings, ["generation"])
        return f"{processes.describe(workers)} on {os.cpu_count()} CPU cores"

    return _try("workers", look)


def _kafka(settings: Settings) -> Check:
    bootstrap = settings.kafka.bootstrap

    def look() -> str:
        if bootstrap == "embedded":
            with EmbeddedKafka() as broker:
                admin.partition_counts(broker.bootstrap)
            return "embedded: starts and answers"
        if bootstrap == "local":
            return f"local: {kafka_home(settings.kafka)} with {find_java()}"
        return f"{bootstrap} answers, {len(admin.partition_counts(bootstrap))} topics"

    return _try("kafka", look)


def _redis(settings: Settings) -> Check:
    url = settings.redis.url
    if url == "embedded":
        return _try("redis", lambda: f"embedded: {_executable(find_server())}")
    answer = _try("redis", lambda: ask(url, "PING"))
    if not answer.ok:
        return Check("redis", False, answer.detail, "start that server, or set REDIS__URL=embedded")
    try:
        policy = ask(url, "CONFIG", "GET", "maxmemory-policy").split()[-1]
    except (RollArtError, IndexError):
        return Check("redis", True, "answers; it does not tell its maxmemory-policy (must be noeviction)")
    fix = "set maxmemory-policy to noeviction on the server: an evicted key loses a run's state"
    return _judge("redis", policy == "noeviction", f"answers, maxmemory-policy {policy}", fix)


def _executable(path: str) -> str:
    if not os.access(path, os.X_OK):
        raise PermissionError(f"{path} is not executable")
    return path


def _judge(name: str, ok: bool, detail: str, fix: str) -> Check:
    return Check(name, ok, detail, "" if ok else fix)


def _try(name: str, look: Callable[[], str]) -> Check:
    """Errors of ours say what is wrong and the fix in one sentence."""
    try:
        return Check(name, True, look())
    except RollArtError as error:
        return Check(name, False, error.message, error.message)
    except OSError as error:
        return Check(name, False, str(error), "run `make setup`")
