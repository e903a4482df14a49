"""Every Redis key, and nothing else touches Redis.

    policy:{name}            HASH    version, step, uri, digest, model_uri, published_at
    policy:{name}:versions   ZSET    version → score version; member is the published record
    worker:{id}              STRING  a worker's own report, with expiry;   workers    SET of ids
    process:{id}             STRING  any process's report, with expiry;    processes  SET of ids
    run:{id}                 HASH    state, recipe, progress, summary;     runs     ZSET by creation
    run:{id}:groups          SET     open groups, the admission budget
    run:{id}:events          STREAM  what `GET /v1/runs/{id}/events` sends
    task:{id}                HASH    a roll-out of given seeds outside any run
    task:{id}:results        HASH    trajectory id → result
    lease:{name}             STRING  owner, with expiry
    abort:{run}              STRING  reason
    aborts                   ZSET    trajectory/attempt → when its turns were aborted
    idempotency:{key}        STRING  digest of the body and the id it made
    starts                   HASH    service → processes started

No Lua: single commands, or WATCH/MULTI. Pub/sub messages on the channel `hints` only hurry a reader up;
every loop reads the state at least once a second and acts on the difference.
"""

from __future__ import annotations

from shared.state.control import Control
from shared.state.link import HINT_INTERVAL_S
from shared.state.policies import Policies
from shared.state.processes import Processes
from shared.state.records import (
    TERMINAL,
    ProcessRecord,
    Record,
    RunRecord,
    SessionOutcome,
    SessionRecord,
    TaskProfile,
    TaskRecord,
    WorkerRecord,
)
from shared.state.runs import Runs
from shared.state.sessions import Sessions

__all__ = [
    "HINT_INTERVAL_S",
    "TERMINAL",
    "ProcessRecord",
    "Record",
    "RunRecord",
    "SessionOutcome",
    "SessionRecord",
    "State",
    "TaskProfile",
    "TaskRecord",
    "WorkerRecord",
]


class State(Policies, Processes, Runs, Sessions, Control):
    """One process's door to Redis. Methods wait for a Redis that is away, and raise Unavailable when it stays
    so. Each may run its commands again after a lost connection, and says the same then."""
