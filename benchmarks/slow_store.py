"""A store as slow as a network, for the benchmark of weight updates, and a service process that knows it.

`slow+file:///folder?megabits=400`: objects are files, and each takes as long as so many Mbit/s would.
Run as `python -m benchmarks.slow_store SERVICE` where `rollart serve SERVICE` would be.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

from shared.store import SCHEMES, FileStore, ObjectStore

SCHEME = "slow+file"


class SlowStore(FileStore):
    """Files at the speed of a network."""

    def __init__(self, root: Path, *, megabits: float) -> None:
        super().__init__(root)
        self._bytes_per_s = megabits * 1e6 / 8

    def put(self, key: str, data: bytes) -> None:
        """As a file, then wait for the rest of its time."""
        self._wait(time.perf_counter(), len(data))
        super().put(key, data)

    def get(self, key: str) -> bytes:
        """As a file, then wait for the rest of its time."""
        began = time.perf_counter()
        data = super().get(key)
        self._wait(began, len(data))
        return data

    def _wait(self, began: float, size: int) -> None:
        time.sleep(max(0.0, began + size / self._bytes_per_s - time.perf_counter()))


def slow_uri(folder: Path, *, megabits: float) -> str:
    """The URI of such a store."""
    return f"{SCHEME}{folder.absolute().as_uri().removeprefix('file')}?megabits={megabits}"


def open_slow(uri: str) -> ObjectStore:
    """What a URI of this scheme stands for."""
    parts = urlparse(uri)
    return SlowStore(Path(unquote(parts.path)), megabits=float(parse_qs(parts.query)["megabits"][0]))


SCHEMES[SCHEME] = open_slow

if __name__ == "__main__":
    from services.host import serve
    from shared.settings import load_settings
    from shared.telemetry import configure_logs

    settings = load_settings()
    configure_logs(settings.telemetry, service=sys.argv[1])
    sys.exit(serve([sys.argv[1]], settings))
