"""Checkpoints of a run on disk. Called by the training service after steps and when a run resumes.

    {folder}/step-00000012-0/state.pt       tensors and numbers, by `torch.save`
                             ledger.json    prompts, open groups, offsets: the caller's own JSON
                             complete.json  size and SHA-256 of both, written last
    {folder}/.writing-…                     an attempt that has not ended, or never will

A reader believes a folder only with its marker, and only if the files are what the marker says. A writer
works in a fresh folder, makes everything durable, renames, reads it back, and only then deletes old ones:
whatever is killed or full, the newest complete checkpoint stays loadable. One writer at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import structlog
import torch
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from shared.errors import NotFound, Unavailable

_log = structlog.get_logger()

_STATE, _LEDGER, _MARKER = "state.pt", "ledger.json", "complete.json"
_WRITING = ".writing-"
_NAME = re.compile(r"step-(\d{8,})-(\d+)")


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    size: int
    sha256: str


class _Marker(BaseModel):
    """What makes a checkpoint complete."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    step: int
    files: dict[str, _File]


@dataclass(frozen=True)
class Checkpoint:
    """What `load` returns."""

    step: int
    state: dict[str, object]
    """As given to `save`; tensors on the CPU."""
    ledger: dict[str, JsonValue]


def save(
    folder: Path,
    *,
    step: int,
    state: Mapping[str, object],
    ledger: Mapping[str, JsonValue],
    keep: int = 2,
) -> Path:
    """Write a checkpoint, then delete all but the newest `keep`. Returns its folder.

    `state` holds tensors, numbers, strings and containers of them. A step that already has a checkpoint gets
    another one beside it, which is then the newer. Raises Unavailable where it cannot be written (disk full,
    no permission): what was there before is untouched and training may go on.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        path = _write(folder, step=step, state=state, ledger=ledger)
    # torch.save reports a failed write of its archive as RuntimeError.
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"checkpoint of step {step} cannot be written to {folder}: {error}") from error
    if not _intact(path):
        raise Unavailable(f"checkpoint {path} does not read back as written; older ones are kept")
    _prune(folder, keep=keep)
    _log.info("checkpoint_saved", path=str(path), step=step)
    return path


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint whose files are intact, or None. Changes nothing on disk."""
    for path in reversed(_finished(folder)):
        if _intact(path):
            return path
        _log.warning("checkpoint_ignored", path=str(path), problem="its files are not what its marker says")
    return None


def load(path: Path) -> Checkpoint:
    """Read one checkpoint. Raises NotFound where it is not complete and intact."""
    if not _intact(path):
        raise NotFound(f"no complete checkpoint at {path}")
    marker = _Marker.model_validate_json((path / _MARKER).read_bytes())
    state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
    return Checkpoint(step=marker.step, state=state, ledger=json.loads((path / _LEDGER).read_bytes()))


def _write(folder: Path, *, step: int, state: Mapping[str, object], ledger: Mapping[str, JsonValue]) -> Path:
    ledger_bytes = json.dumps(dict(ledger), allow_nan=False).encode()
    with _fresh(folder) as work:
        files = {
            _STATE: _write_file(work / _STATE, lambda file: torch.save(dict(state), file)),
            _LEDGER: _write_file(work / _LEDGER, lambda file: file.write(ledger_bytes)),
        }
        marker = _Marker(step=step, files=files).model_dump_json().encode()
        _write_file(work / _MARKER, lambda file: file.write(marker))
        _sync(work)
        path = folder / f"step-{step:08d}-{_next_attempt(folder, step)}"
        os.rename(work, path)
        _sync(folder)
    return path


@contextmanager
def _fresh(folder: Path) -> Iterator[Path]:
    """A new folder, gone again if the block fails."""
    work = Path(tempfile.mkdtemp(prefix=_WRITING, dir=folder))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_file(path: Path, write: Callable[[BinaryIO], object]) -> _File:
    with path.open("xb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    return _describe(path)


def _describe(path: Path) -> _File:
    with path.open("rb") as file:
        return _File(size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _intact(path: Path) -> bool:
    try:
        marker = _Marker.model_validate_json((path / _MARKER).read_bytes())
        return set(marker.files) == {_STATE, _LEDGER} and all(
            _describe(path / name) == expected for name, expected in marker.files.items()
        )
    except (OSError, ValidationError):
        return False


def _order(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def _finished(folder: Path) -> list[Path]:
    """Checkpoints that have a marker, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / _MARKER).is_file()]
    return sorted(found, key=_order)


def _next_attempt(folder: Path, step: int) -> int:
    taken = [_order(path)[1] for path in folder.iterdir() if _order(path)[0] == step]
    return max(taken, default=-1) + 1


def _remove_leftovers(folder: Path) -> None:
    """What killed writers left: unfinished attempts and half-deleted checkpoints."""
    for path in folder.iterdir():
        unmarked = _NAME.fullmatch(path.name) and not (path / _MARKER).exists()
        if path.name.startswith(_WRITING) or unmarked:
            shutil.rmtree(path, ignore_errors=True)


def _prune(folder: Path, *, keep: int) -> None:
    for path in _finished(folder)[:-keep]:
        # The marker goes first: a half-deleted checkpoint must not look complete.
        try:
            (path / _MARKER).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("checkpoint_not_deleted", path=str(path), problem=str(error))
        else:
            shutil.rmtree(path, ignore_errors=True)
