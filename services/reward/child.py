"""The process of isolated scorers: `python -m services.reward.child <file descriptor> <time limit>`.

Started by `isolation.py`. Consumes completed trajectories from its end of a pipe, produces for each `loaded`
and then a verdict, waits for the next
one; ends when the other end closes. What a scorer prints is thrown away, what it writes to standard
error is seen.
"""

from __future__ import annotations

import faulthandler
import sys
from multiprocessing.connection import Connection

from services.reward.loading import ISOLATED, Scorers
from services.reward.verdict import Verdict, judge
from shared.events import TrajectoryCompleted


def main() -> None:
    """Grade until the pipe closes."""
    connection = Connection(int(sys.argv[1]))
    timeout_s = float(sys.argv[2])
    scorers = Scorers(in_child=True)
    while True:
        try:
            trajectory = TrajectoryCompleted.model_validate_json(connection.recv_bytes())
        except EOFError:
            return
        found = scorers.get(trajectory.reward)
        connection.send_bytes(b"loaded")
        # A scorer that spins while the service dies has nobody left to kill it; this timer needs no
        # interpreter lock and ends the process itself.
        faulthandler.dump_traceback_later(2 * timeout_s + 5, exit=True)
        assert found != ISOLATED
        verdict = found if isinstance(found, Verdict) else judge(found, trajectory)
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(verdict.model_dump_json().encode())


if __name__ == "__main__":
    main()
