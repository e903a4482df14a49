"""What is kept in Redis: one model per kind of record. Used by `shared.state` and by who reads it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from shared.events import Phases, Role, Sampling, TrajectoryStatus
from shared.summary import RunState

FieldT = bytes | bytearray | memoryview | str | int | float
"""What redis-py takes as a field or a value."""
TERMINAL: frozenset[str] = frozenset({"finished", "failed", "cancelled"})


class Record(BaseModel):
    """Root of what is kept in Redis; tolerant, as events are."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def flat(self) -> dict[FieldT, FieldT]:
        """As the fields of a hash."""
        return {key: str(value) for key, value in self.model_dump(mode="json").items()}


class TaskProfile(Record):
    """What one task's turns have needed on one worker, accumulated since it started."""

    prefills: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of these, reused or fetched instead of computed."""
    prefill_s: float = 0.0
    """Of the worker's time, the turns' shares from a place in the batch to the first token: where n are
    worked on at a moment, each has one part in n."""
    decodes: int = 0
    generated_tokens: int = 0
    decode_s: float = 0.0
    """The same between the first token and the last."""
    decode_wall_s: float = 0.0
    """From the first token to the last by the clock, summed over turns; over `decode_s` it tells how many
    were worked on at a time."""
    transfer_s: float = 0.0
    """Fetching KV from prefill workers, summed over turns."""


class WorkerRecord(Record):
    """What a generation worker says of itself, every second."""

    worker_id: str
    role: Role
    device_class: str
    gpu_model: str
    url: str
    partitions: list[int]
    """Of its topic, assigned to it now: where the router can reach it."""
    running: int
    waiting: int
    kv_usage: float
    policies: dict[str, int]
    """Policy reference → version live."""
    tasks: dict[str, TaskProfile] = {}
    kv_leases: int = 0
    """Prefilled prompts whose KV waits to be fetched."""
    draining: bool = False
    updated_at: float


class ProcessRecord(Record):
    """What every process of every service says of itself, every second."""

    process_id: str
    service: str
    busy_s: float
    """Seconds of its stage's own work since it started."""
    counters: dict[str, float] = {}
    """Accumulated since it started; a reader adds up differences."""
    started_at: float
    updated_at: float


class RunRecord(Record):
    """One run as everyone sees it."""

    run_id: str
    state: RunState
    phase: str = ""
    recipe: str
    """JSON."""
    created_at: float
    started_at: float = 0.0
    ended_at: float = 0.0
    step: int = 0
    steps: int = 0
    version: int = 0
    error: str = ""
    summary: str = ""
    """JSON of `shared.summary.Summary`, once there is one."""


class TaskRecord(Record):
    """A roll-out of given seeds, asked for over REST."""

    task_id: str
    request: str
    """JSON."""
    trajectory_ids: list[str]
    created_at: float


class SessionOutcome(Record):
    """How a session of an outside agent ended, as its caller said."""

    status: TrajectoryStatus
    reason: str = ""
    reward: float | None = None
    components: dict[str, float] = {}


class SessionRecord(Record):
    """One session of an outside agent, in its present attempt."""

    session_id: str
    attempt: int
    state: Literal["open", "ending", "ended"] = "open"
    """`ending`: decided, its trajectories are being published."""
    policy: str
    task: str
    run_id: str
    group_id: str
    member: int
    context_window: int | None
    """Of the whole conversation; None: the model's."""
    sampling: Sampling
    """What a call does not say itself."""
    affinity: str | None = None
    prefill_affinity: str | None = None
    phases: Phases | None = None
    start_version: int
    created_at: float
    outcome: SessionOutcome | None = None
    trajectory_ids: list[str] = []
    """What it has become."""
