"""The process of isolated scorers: `python -m services.reward.child <file descriptor> <time limit>`.

Started by `isolation.py`. Consumes completed trajectories from its end of a pipe, produces verdicts, waits for the next
one; ends when the other end closes. What a scorer prints is thrown away, what it writes to standard
error is seen.
"""

from __future__ import annotations

import faulthandler
import sys
from multiprocessing.connection import Connection

from services.reward.loading import Scorers
from services.reward.verdict import Verdict, judge, refuse
from shared.events import TrajectoryCompleted


def main() -> None:
    """Grade until the pipe closes."""
    connection = Connection(int(sys.argv[1]))
    timeout_s = float(sys.argv[2])
    scorers = Scorers(in_child=True)
    connection.send_bytes(b"ready")
    while True:
        try:
            trajectory = TrajectoryCompleted.model_validate_json(connection.recv_bytes())
        except EOFError:
            return
        # A scorer that spins while the service dies has nobody left to kill it; this timer needs no
        # interpreter lock and ends the process itself.
        faulthandler.dump_traceback_later(2 * timeout_s + 5, exit=True)
        verdict = _grade(scorers, trajectory)
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(verdict.model_dump_json().encode())


def _grade(scorers: Scorers, trajectory: TrajectoryCompleted) -> Verdict:
    found = scorers.get(trajectory.reward)
    if isinstance(found, Verdict):
        return found
    if found.scorer is None:
        return refuse("scorer_failed", "not made")
    return judge(found.scorer, trajectory)


if __name__ == "__main__":
    main()
