"""Every REST model of the gateway. JSON by `model_dump_json`; request bodies are strict.

Used by `services.gateway`, which serves them, and by `shared.http`, which reads them. Times are seconds
since the epoch, durations seconds. An unknown key, NaN, infinity or a value out of range is refused by
name; answers are read tolerantly, so that an older client understands a newer gateway.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from shared.events import Phases, Role, Split, TrajectoryStatus
from shared.sections import Float, Int, Name
from shared.summary import RunState

TERMINAL: frozenset[str] = frozenset({"finished", "failed", "cancelled"})
MAX_ROLLOUTS = 10_000
"""Rollouts of one task at most."""


class Body(BaseModel):
    """Root of request bodies: strict and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Answer(BaseModel):
    """Root of responses: frozen, tolerant of unknown fields."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class RunRequest(Body):
    """`POST /v1/runs`."""

    recipe: str | dict[str, JsonValue]
    """A recipe as an object (the keys of the TOML file), or the name of one that ships with the server:
    `quickstart`."""


class Run(Answer):
    """One run."""

    run_id: str
    state: RunState
    phase: str = ""
    """What a running run is doing: `prepare`, `warm_start`, `evaluation_before`, `training`, …"""
    name: str = ""
    """The recipe's name."""
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    step: int = 0
    """Optimiser steps taken."""
    steps: int = 0
    """Steps the recipe asks for."""
    version: int = 0
    """Newest policy version."""
    error: str = ""
    """Why it failed."""


class RunDetail(Run):
    """One run with what it was asked to do."""

    recipe: dict[str, JsonValue]
    """The recipe, defaults filled in."""
    folder: str = ""
    """Where its results lie, on the server's machine."""


class RunList(Answer):
    """`GET /v1/runs`, newest first."""

    runs: list[Run]


class TaskRequest(Body):
    """`POST /v1/tasks`: roll out given seeds; the result is never trained.

    What is left out comes from the run's recipe (`run_id`, or else the newest run that has a policy).
    """

    run_id: str | None = Field(None, min_length=1, max_length=128)
    """Run whose recipe names the task; default: the newest run with a policy."""
    task: Name | None = None
    """A task of that recipe; with `environment`, a label of your own."""
    environment: str | None = Field(None, min_length=1, max_length=512)
    """A name of the environments table or `package.module:Class`, in place of a recipe's task."""
    config: dict[str, JsonValue] | None = None
    """The environment's own keys."""
    reward: str | None = Field(None, min_length=1, max_length=512)
    """A name of the rewards table or `package.module:Class`."""
    reward_config: dict[str, JsonValue] | None = None
    """The scorer's own keys."""
    policy: str | None = Field(None, pattern=r"^[A-Za-z0-9._-]{1,128}(@\d{1,9})?$")
    """`name` (follows the newest version) or `name@version`; default: the run's own policy."""
    seeds: list[Int] = Field(min_length=1, max_length=MAX_ROLLOUTS)
    """One group each, 0 to 2^53, all different."""
    members: Int = Field(1, ge=1, le=1024)
    """Trajectories of one seed."""
    split: Split = "eval"
    """Which seeds of the environment: held out (`eval`) or of training (`train`)."""
    actor: Literal["policy", "scripted"] = "policy"
    """`scripted`: the environment's own demonstration play, no model involved."""
    skill: Float = Field(1.0, ge=0, le=1)
    """Scripted play only: probability of the best known action, else a random one."""
    temperature: Float | None = Field(None, ge=0, le=10)
    """0 is greedy; default: the recipe's."""
    max_turns: Int | None = Field(None, ge=1, le=10_000)
    max_tokens_per_turn: Int | None = Field(None, ge=1, le=131_072)
    context_window: Int | None = Field(None, ge=16, le=1_048_576)
    affinity: Name | None = None
    """Device class for the task's turns, or `auto`; default: the recipe's, else the router's."""
    deadline_s: Float = Field(300.0, ge=1, le=86_400)
    """What has not ended by then is aborted and counts as lost."""

    @model_validator(mode="after")
    def _consistent(self) -> TaskRequest:
        if self.environment is None and self.task is None:
            raise ValueError("name a task of the run's recipe, or an environment")
        if self.environment is None and (self.config is not None or self.reward_config is not None):
            raise ValueError("config and reward_config go with environment; a recipe's task has its own")
        if any(not 0 <= seed <= 2**53 for seed in self.seeds):
            raise ValueError("seeds must be within 0 and 2^53")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError("seeds holds the same seed twice; use members to roll a seed out repeatedly")
        if len(self.seeds) * self.members > MAX_ROLLOUTS:
            raise ValueError(f"seeds × members is above {MAX_ROLLOUTS} rollouts; split the task")
        return self


class TaskResult(Answer):
    """One trajectory of a task."""

    trajectory_id: str
    seed: int
    member: int
    status: TrajectoryStatus
    reward: float | None
    """Null where there is none."""
    reason: str = ""
    """Why there is no reward, or why the episode was truncated."""
    turns: int = 0


class Task(Answer):
    """`GET /v1/tasks/{id}`."""

    task_id: str
    state: Literal["running", "finished"]
    """Finished when every trajectory has ended or is lost."""
    task: str
    environment: str
    policy: str
    """What sampled; empty for scripted play."""
    created_at: float
    total: int
    done: int
    lost: int = 0
    """Not ended by the deadline."""
    reward_mean: float | None = None
    """Over the trajectories that have a reward."""
    failures: dict[str, int] = {}
    """Reason → trajectories without a reward."""
    results: list[TaskResult] = []
    """By seed and member; what is still open is not in it."""
    trajectory_ids: list[str] = []
    """All of them, for `GET /v1/trajectories/{id}`."""


class TrajectoryBrief(Answer):
    """One line of `GET /v1/runs/{id}/trajectories`."""

    trajectory_id: str
    task: str
    seed: int
    purpose: str
    status: TrajectoryStatus
    reward: float | None
    turns: int
    tokens: int
    start_version: int
    completed_at: float


class TrajectoryList(Answer):
    """Newest first."""

    trajectories: list[TrajectoryBrief]


class Worker(Answer):
    """A generation worker as it last reported."""

    worker_id: str
    role: Role
    device_class: str
    gpu_model: str
    url: str
    partitions: list[int]
    running: int
    """Sequences in its batch."""
    waiting: int
    kv_usage: float
    """Share of its KV slots in use."""
    policies: dict[str, int]
    """Policy → version live."""
    kv_leases: int = 0
    """Prefilled prompts whose KV waits to be fetched."""
    draining: bool
    updated_at: float


class WorkerList(Answer):
    """`GET /v1/workers`."""

    workers: list[Worker]


class AffinityWish(Answer):
    """What turns ask for, the router's settings filled in; `auto` is left to the router."""

    phases: Phases
    device_class: str
    """Of turns on one worker."""
    decode_class: str
    """Of the decode of split turns."""
    prefill_class: str
    """Of their prefill."""


class AffinityOption(Answer):
    """One way to serve a task's turns, with what it costs. Seconds and tokens are of the task's typical turn,
    null before they are measured."""

    phases: Literal["together", "split"]
    device_class: str
    """Of the decode, where split."""
    prefill_class: str | None = None
    """Where split."""
    turns: float
    """Measured, by half less for every minute since."""
    prefill_s: float | None = None
    decode_s: float | None = None
    transfer_s: float | None = None
    """Of the prompt's KV, where split."""
    price: float
    """Of a second on the class, relative to the others."""
    prefill_price: float
    """Of a second on the class of the prefill."""
    cost: float | None = None
    """Price times seconds."""
    exploring: bool = False
    """Too little was measured of late: a small share of trajectories goes there."""


class AffinityFallback(Answer):
    """A preference that had no live worker."""

    kind: Literal["phases", "class", "prefill_class"]
    turns: int
    """Since the router started."""
    active: bool
    """Whether it is so now."""


class TaskAffinity(Answer):
    """How the turns of one task are served, and why."""

    task: str
    wish: AffinityWish
    phases: Literal["together", "split"]
    """Now."""
    device_class: str
    prefill_class: str | None = None
    why: str
    since: float
    switches: int
    assigned: int
    """Turns, since the router started."""
    explored: int
    """Trajectories sent elsewhere to measure."""
    prompt_tokens: float | None = None
    """Of a typical turn."""
    generated_tokens: float | None = None
    cached_share: float | None = None
    """Of the prompt's tokens, those whose KV was at hand."""
    options: list[AffinityOption] = []
    """Those with live workers; only where something is left to the router."""
    fallbacks: list[AffinityFallback] = []


class AffinityReport(Answer):
    """`GET /v1/affinity` of a router: one entry for each task and what its turns ask for."""

    tasks: list[TaskAffinity]
