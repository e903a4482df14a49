"""Child processes of the launcher: a log file each, a session of their own, an end that is certain.

A child runs in a session of its own, so that the terminal's Ctrl-C reaches the launcher alone, which then
brings all down in order. Called by the embedded parts and by `services.launcher`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, ClassVar

from shared.embedded import leash
from shared.errors import Conflict, Invalid, Unavailable

_PORTS = range(20_000, 32_000)
"""Below the range from which Linux and macOS take the ports of outgoing connections: a port of a child
that is being restarted cannot be taken by a client in the meantime."""


@dataclass
class Child:
    """One child process; may be started again after it has ended."""

    name: str
    command: Sequence[str]
    log_path: Path
    env: Mapping[str, str] | None = None
    """Whole environment; None inherits ours."""
    leashed: bool = True
    """False for a program that puts itself on the leash (`leash.hold`)."""
    lock_path: Path | None = None
    """Held by the child as long as it lives: a second one on the same data waits, then is refused."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self.process.pid if self.alive and self.process else None

    @property
    def alive(self) -> bool:
        """Whether it has been started and has not ended."""
        return self.process is not None and self.process.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status; negative: the signal that ended it; None: running or never started."""
        return self.process.poll() if self.process else None

    def spawn(self) -> None:
        """Start it. Returns at once.

        Call it from a thread that lives as long as the child shall: on Linux the leash is tied to the
        starting thread. Raises Conflict when another process holds `lock_path` for 15 s.
        """
        command = list(self.command)
        if self.leashed:
            command = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), *command]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self.log_path.open("ab"))
            held: tuple[int, ...] = ()
            if self.lock_path is not None:
                held = (stack.enter_context(locked(self.lock_path, wait_s=15)).fileno(),)
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
                pass_fds=held,
            )

    def terminate(self) -> None:
        """Ask it to end."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL it and what it started in its session."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self, grace_s: float = 10.0) -> None:
        """Terminate, wait up to `grace_s`, then kill. Blocks; idempotent."""
        if self.process is None:
            return
        self.terminate()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()

    def reap(self) -> None:
        """Wait for the end of a process that has been told to end."""
        if self.process is not None:
            self.process.wait()

    def wait_until(self, ready: Callable[[], bool], *, deadline_s: float) -> None:
        """Block until `ready()`. Raises Unavailable with the end of the log when it ends or is too late."""
        limit = time.monotonic() + deadline_s
        while not ready():
            if not self.alive:
                raise Unavailable(self.epitaph())
            if time.monotonic() > limit:
                raise Unavailable(f"{self.name} was not ready after {deadline_s:g} s\n{self.log_tail()}")
            time.sleep(0.05)

    def epitaph(self) -> str:
        """How it ended, with the end of its log."""
        code = self.returncode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return f"{self.name} ended {how}\n{self.log_tail()}"

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log, under the name of the file."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 16_384))
                text = log.read().decode(errors="replace").strip()
        except OSError:
            text = ""
        return "\n".join([f"the end of {self.log_path}:", *(text.splitlines()[-lines:] or ["(empty)"])])


class RestartPolicy:
    """When a child that died is started again: at once, later, or never.

    A death within 60 s of the last start continues a streak. The first three of a streak restart at once,
    then the delay doubles from 0.5 s to 30 s; after ten it is given up.
    """

    HEALTHY_S: ClassVar[float] = 60.0
    LIMIT: ClassVar[int] = 10

    def __init__(self) -> None:
        self.streak = 0

    def delay(self, lived_s: float) -> float | None:
        """Seconds to wait after a child that lived so long; None: give up."""
        self.streak = 1 if lived_s >= self.HEALTHY_S else self.streak + 1
        if self.streak > self.LIMIT:
            return None
        return 0.0 if self.streak <= 3 else min(30.0, 0.5 * 2 ** (self.streak - 4))


@contextlib.contextmanager
def locked(path: Path, *, wait_s: float = 0.0) -> Iterator[BinaryIO]:
    """Hold an exclusive lock on a file. Raises Conflict naming the folder and the holder.

    The system drops the lock with its last holder, however that ends, so there is no stale lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    limit = time.monotonic() + wait_s
    with path.open("a+b") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= limit:
                    raise Conflict(_in_use(path)) from None
                time.sleep(0.1)
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
        yield file


def _in_use(path: Path) -> str:
    holder = path.read_text(errors="replace").strip() or "unknown"
    return (
        f"another stack (pid {holder}) is using the folder {path.parent}; stop it, or give this one a "
        "folder of its own: ROLLART_STATE_DIR=another-folder"
    )


def free_port(host: str = "127.0.0.1", *, avoid: Sequence[int] = ()) -> int:
    """A TCP port that nothing listens on. Raises Unavailable when there is none."""
    for port in random.sample(_PORTS, 500):
        if port not in avoid and port_is_free(host, port):
            return port
    raise Unavailable(f"no free TCP port on {host} between {_PORTS.start} and {_PORTS.stop}")


def port_is_free(host: str, port: int) -> bool:
    """Whether one could listen on it now."""
    try:
        bind(host, port).close()
    except Invalid:
        return False
    return True


def bind(host: str, port: int, *, field_name: str = "HTTP__PORT") -> socket.socket:
    """A listening TCP socket; port 0 picks one. Raises Invalid naming the port and the fix."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        # A second socket may bind, with SO_REUSEADDR, until one of them listens.
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise Invalid(
            f"cannot listen on {host}:{port} ({error.strerror}): stop what uses it or choose another "
            f"with {field_name}=<port> ({field_name}=0 picks a free one)"
        ) from error
    return bound


def check_folder(name: str, folder: Path, *, min_free_bytes: int) -> None:
    """Make a folder of results. Raises Invalid, naming the variable that sets it, where it cannot be written
    or its disk is full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise Invalid(
            f"cannot write to {name}={folder}: {error.strerror}; set it to another folder"
        ) from error
    if free < min_free_bytes:
        raise Invalid(
            f"only {free // 1_000_000} MB free at {folder}, {min_free_bytes // 1_000_000} MB are needed: "
            f"free some or set {name} to a folder on another disk"
        )
