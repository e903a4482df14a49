"""The object store: weights, model folders and payloads too large for a message.

A store maps a key (`weights/run-1/v000001/manifest.json`) to bytes. Writes are atomic: a reader sees
the whole object or none. `open_store` picks the implementation by the scheme of the URI.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlparse

from shared.errors import FieldProblem, Invalid, NotFound, StorageFull


class ObjectStore(Protocol):
    """Bytes by key. Keys are relative paths with `/`."""

    def put(self, key: str, data: bytes) -> None:
        """Write the whole object, or nothing."""

    def get(self, key: str) -> bytes:
        """Raises NotFound."""

    def list(self, prefix: str) -> list[str]:
        """Keys below a prefix, sorted."""

    def delete(self, prefix: str) -> None:
        """Remove every object below a prefix; fine where there is none."""

    def folder(self, prefix: str) -> Path:
        """A local folder that holds the objects below a prefix. Raises NotFound."""


class FileStore:
    """Objects as files below one folder, shared by all processes that name it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def _path(self, key: str) -> Path:
        if "\0" in key:
            raise Invalid(f"store key with a NUL: {key!r}")
        path, root = (self.root / key).resolve(), self.root.resolve()
        if path == root or not path.is_relative_to(root):
            raise Invalid(f"store key leaves the store: {key!r}")
        return path

    def put(self, key: str, data: bytes) -> None:
        """Write to a temporary file beside the target, then rename over it. Raises StorageFull."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not `tempfile`: its files are for their owner alone, and stores are shared between users.
        temporary = path.with_name(f".put-{uuid.uuid4().hex}")
        try:
            with temporary.open("xb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"no room in {self.root} for {key!r} ({len(data)} bytes)") from error
            raise

    def get(self, key: str) -> bytes:
        """The object's bytes. Raises NotFound."""
        try:
            return self._path(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise NotFound(f"no object {key!r} in {self.root}") from error

    def list(self, prefix: str) -> list[str]:
        """Keys below a prefix, sorted."""
        base = self._path(prefix) if prefix else self.root.resolve()
        files = [p for p in base.rglob("*") if p.is_file() and not p.name.startswith(".put-")]
        return sorted(str(p.relative_to(self.root.resolve())) for p in files)

    def delete(self, prefix: str) -> None:
        """Remove a folder or a file."""
        path = self._path(prefix)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def folder(self, prefix: str) -> Path:
        """The folder itself."""
        path = self._path(prefix)
        if not path.is_dir():
            raise NotFound(f"no folder {prefix!r} in {self.root}")
        return path


def _open_file(uri: str) -> ObjectStore:
    parts = urlparse(uri)
    if parts.netloc not in ("", "localhost"):
        message = f"store {uri!r} names a host; use file:///folder"
        raise Invalid(message, fields=[FieldProblem(field="ROLLART_STORE", message=message)])
    return FileStore(Path(unquote(parts.path)))


SCHEMES: dict[str, Callable[[str], ObjectStore]] = {"file": _open_file}
"""Scheme of a URI → what opens it. A process that knows another kind of store adds it before it serves."""


def open_store(uri: str) -> ObjectStore:
    """The store at a URI. Raises Invalid naming `ROLLART_STORE` for an unknown scheme."""
    opened = SCHEMES.get(urlparse(uri).scheme)
    if opened is None:
        message = f"unknown store {uri!r}; use file:///folder"
        raise Invalid(message, fields=[FieldProblem(field="ROLLART_STORE", message=message)])
    return opened(uri)
