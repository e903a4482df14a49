"""Every scored trajectory of a run, as JSON lines that people can read.

Written by the training service as samples arrive, read by the gateway (`GET /v1/trajectories/{id}`) and
by the command line. Layout: `<folder>/<task>/<bucket>.jsonl`; a bucket holds the groups of one range of
numbers, so looking up one trajectory reads one small file per task. A line is the JSON of a
TrajectoryScored with its keys in reading order: reward, messages, ids and status, versions, turns, and
the token arrays last.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import structlog
from pydantic import ValidationError
from pydantic_core import to_json

from shared.events import TrajectoryCompleted, TrajectoryScored

log = structlog.get_logger()

GROUPS_PER_FILE = 16
BUFFER_BYTES = 1 << 20
_ARRAYS = {"token_ids", "mask", "logprobs", "versions"}
_REST = set(TrajectoryCompleted.model_fields) - _ARRAYS - {"messages"}
_NUMBERED = re.compile(r"(.*?)([0-9]{1,18})", re.DOTALL)


class TrajectoryArchive:
    """Append-only. Lines are whole after any kill; one cut short by a kill is left out by readers."""

    def __init__(self, folder: Path) -> None:
        """`folder` is made when the first line is written."""
        self._folder = folder
        self._pending: dict[Path, list[bytes]] = {}
        self._pending_bytes = 0

    def append(self, scored: TrajectoryScored) -> None:
        """Add one trajectory; on disk after `flush`, or once a megabyte waits. Raises OSError."""
        trajectory = scored.trajectory
        path = self._folder / safe_name(trajectory.task) / _bucket(trajectory.trajectory_id)
        line = to_line(scored)
        self._pending.setdefault(path, []).append(line)
        self._pending_bytes += len(line)
        if self._pending_bytes >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand every buffered line to the operating system. Raises OSError; what failed stays buffered."""
        while self._pending:
            path, lines = next(iter(self._pending.items()))
            append_lines(path, b"".join(lines))
            del self._pending[path]
            self._pending_bytes -= sum(map(len, lines))

    def find(self, trajectory_id: str) -> TrajectoryScored | None:
        """The trajectory with this id, or None. Reads one bucket of each task."""
        self.flush()
        needle = to_json(trajectory_id)
        for path in sorted(self._folder.glob(f"*/{_bucket(trajectory_id)}")):
            for line in read_lines(path):
                if needle in line:
                    found = _parse(line, path)
                    if found is not None and found.trajectory.trajectory_id == trajectory_id:
                        return found
        return None

    def iterate(self) -> Iterator[TrajectoryScored]:
        """All trajectories, by task and bucket, in the order of arrival within a bucket."""
        self.flush()
        for path in sorted(self._folder.glob("*/*.jsonl")):
            for line in read_lines(path):
                found = _parse(line, path)
                if found is not None:
                    yield found


def to_line(scored: TrajectoryScored) -> bytes:
    """One line, newline included; `TrajectoryScored.model_validate_json` reads it back unchanged."""
    trajectory = scored.trajectory
    inner = ",".join(
        trajectory.model_dump_json(include=part)[1:-1] for part in ({"messages"}, _REST, _ARRAYS)
    )
    outer = scored.model_dump_json(exclude={"trajectory"})
    return f'{outer[:-1]},"trajectory":{{{inner}}}}}\n'.encode()


def append_lines(path: Path, data: bytes) -> None:
    """Append whole lines to a file, after ending a line that an earlier writer was killed in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            data = b"\n" + data
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
    finally:
        os.close(file)


def read_lines(path: Path) -> Iterator[bytes]:
    """The complete lines of a file; a last one without its newline is left out, as are empty ones."""
    try:
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n") and len(line) > 1:
                    yield line
    except FileNotFoundError:
        return


def safe_name(text: str) -> str:
    """`text` as one path component: only [A-Za-z0-9_.-] pass, all else is %XX; never hidden, never
    empty, at most 120 characters. Different texts give different names."""
    name = re.sub(rb"[^A-Za-z0-9_.-]", lambda m: b"%%%02X" % m[0][0], text.encode("utf-8", "surrogatepass"))
    escaped = name.decode("ascii")
    if escaped.startswith("."):
        escaped = "%2E" + escaped[1:]
    if len(escaped) > 120:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        escaped = f"{escaped[:100]}%{digest}"
    return escaped or "%"


def _bucket(trajectory_id: str) -> str:
    """File name for an id `{run}/{group}.{member}#{attempt}`: `{text}-{first}-{last}.jsonl` of the groups
    that share it, or the group's name where that does not end in a number."""
    group = trajectory_id.rpartition("#")[0].rpartition(".")[0] or trajectory_id
    group = group.rpartition("/")[2]
    numbered = _NUMBERED.fullmatch(group)
    if numbered is None:
        return f"{safe_name(group)}.jsonl"
    first = int(numbered[2]) // GROUPS_PER_FILE * GROUPS_PER_FILE
    text = numbered[1].rstrip("-_")
    return f"{safe_name(text) if text else 'groups'}-{first:06d}-{first + GROUPS_PER_FILE - 1:06d}.jsonl"


def _parse(line: bytes, path: Path) -> TrajectoryScored | None:
    try:
        return TrajectoryScored.model_validate_json(line)
    except ValidationError as error:
        log.warning("archive.line_unreadable", path=str(path), error=str(error).splitlines()[0])
        return None
