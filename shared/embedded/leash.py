"""Ties a child process to its parent: it ends when the parent does, however the parent ends.

Run as a script it puts another program on the leash: `python -I leash.py PARENT_PID program args…`.
`services.host` calls `hold` for a service that the launcher started. Standard library only, so that the
script starts fast and needs no import path.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def signal_on_parent_death(parent: int) -> bool:
    """Ask Linux for a SIGTERM when the parent (its thread that started us) is gone; False elsewhere.

    Ends this process at once when the parent has gone already. Survives an `exec`.
    """
    linux = sys.platform == "linux"
    if linux and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        linux = False
    if os.getppid() != parent:
        os._exit(1)
    return linux


def hold(parent: int, *, grace_s: float) -> None:
    """Put this process on the leash: SIGTERM when `parent` is gone, and `grace_s` later a hard exit.

    The hard exit is for a process whose main thread hangs in native code and never sees the signal.
    """
    signal_on_parent_death(parent)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="leash", daemon=True).start()


def _run(parent: int, command: list[str]) -> int:
    """Become the command on Linux; elsewhere stay beside it and pass signals on."""
    if signal_on_parent_death(parent):
        os.execvp(command[0], command)
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: child.send_signal(received))
    while child.poll() is None:
        if os.getppid() != parent:
            child.terminate()
        try:
            child.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            continue
    return child.returncode


if __name__ == "__main__":
    sys.exit(_run(int(sys.argv[1]), sys.argv[2:]))
