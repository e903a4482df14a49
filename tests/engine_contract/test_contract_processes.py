"""An engine's processes end with the service that started them, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

HOLDER = """
import sys, threading
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from contract import Driven, build, prompt_of, raw_weights

if __name__ == "__main__":
    driven = Driven(Path(sys.argv[1]))
    driven.load(raw_weights(build(1)), 1)
    driven.one("first", prompt_of(0, 9))
    print("ready", flush=True)
    sys.stdin.readline()
    driven.engine.close()
"""


@pytest.mark.parametrize("end", ["kill", "close"])
def test_no_process_outlives_its_service(end: str, tmp_path: Path) -> None:
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)
    here = Path(__file__).parent
    holder = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "model"), str(here)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{here.parents[1]}"},
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        while holder.stdout.readline().strip() != "ready":
            assert holder.poll() is None, "it did not start"
        children = psutil.Process(holder.pid).children(recursive=True)
        if end == "kill":
            holder.send_signal(signal.SIGKILL)
        else:
            holder.stdin.write("\n")
            holder.stdin.close()
        assert holder.wait(60) == (-signal.SIGKILL if end == "kill" else 0)
        limit = time.monotonic() + 20
        while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
            assert time.monotonic() < limit, children
            time.sleep(0.05)
    finally:
        holder.kill()
        holder.wait()
