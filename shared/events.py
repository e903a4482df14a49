"""Every Kafka event. Frozen, tolerant of unknown fields, JSON by `model_dump_json`.

Producers and consumers are listed in `shared/topics.py`. All times are seconds since the epoch,
all durations seconds, all versions policy versions (optimiser steps published). Token arrays of a
trajectory are flat and aligned: index t is the same token in `token_ids`, `mask`, `logprobs` and
`versions`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from shared.errors import RollArtError

CONTEXT_VERSION = -1
"""The `versions` entry of a token that no policy sampled (environment text, template glue)."""

FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Role = Literal["prefill", "decode", "both"]
Purpose = Literal["train", "eval", "warm_start", "task"]
Split = Literal["train", "eval"]
Phases = Literal["together", "split", "auto"]
"""Whether prefill and decode of a turn run on one worker, on two, or as the router measures to be cheaper."""
AUTO = "auto"
"""In place of a device class: the router picks it by what it measures."""


class Event(BaseModel):
    """Root of all events."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Sampling(Event):
    """How tokens are drawn. Log-probabilities are always of the distribution that this describes."""

    temperature: FiniteFloat = Field(1.0, ge=0.0, le=10.0)
    """0 means greedy."""
    top_p: FiniteFloat = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0)
    """0 means no limit."""
    max_tokens: int = Field(16, ge=1)
    """New tokens of one turn; clipped to what the context window leaves."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after sampling one of these; the token is kept."""


class RewardSpec(Event):
    """Which scorer turns a trajectory into a number."""

    scorer: str = "episode_return"
    """A name of the rewards table or `package.module:Class`."""
    config: dict[str, JsonValue] = {}


class RolloutRequested(Event):
    """Play one episode. Answered by exactly one TrajectoryCompleted with the same trajectory_id."""

    run_id: str
    """The run or task that asked."""
    trajectory_id: str
    """`{run}/{group}.{member}#{attempt}`."""
    group_id: str
    """`{run}/{group}`; members of a group share prompt and seed."""
    member: int
    attempt: int = 0
    task: str
    environment: str
    """A name of the environments table or `package.module:Class`."""
    config: dict[str, JsonValue] = {}
    """Keyword arguments of the environment's Config."""
    seed: int
    split: Split = "train"
    purpose: Purpose = "train"
    actor: Literal["policy", "scripted"] = "policy"
    """`scripted`: the environment's own demonstration play, no model involved (warm start)."""
    skill: FiniteFloat = Field(0.0, ge=0.0, le=1.0)
    """Scripted play only: probability of the best known action, else a random one."""
    policy: str = ""
    """`name` (follows the newest version) or `name@version` (pinned)."""
    sampling: Sampling = Sampling()
    max_turns: int = Field(8, ge=1)
    context_window: int = Field(512, ge=2)
    """Tokens of the whole trajectory at most."""
    max_staleness: int | None = None
    """Lag at which the environment gives up at a turn; None for rollouts that are never trained."""
    deadline: FiniteFloat
    affinity: str | None = None
    """Device class that the task prefers, or `auto`."""
    prefill_affinity: str | None = None
    """The same for the prefill of a split turn; the router's where absent."""
    phases: Phases | None = None
    """The router's where absent."""
    reward: RewardSpec = RewardSpec()


class TurnRequested(Event):
    """Sample one turn. Answered by TurnGenerated or TurnFailed on the asker's reply partition."""

    run_id: str
    trajectory_id: str
    attempt: int
    turn: int
    try_number: int = 0
    """Grows when the asker asks again after a try's deadline; late replies of earlier tries are dropped."""
    task: str
    policy: str
    prompt_ids: list[int]
    """All tokens so far, verbatim as sampled or tokenised once. Shape (T,)."""
    sampling: Sampling
    context_window: int
    min_version: int = 0
    """Oldest policy version to sample with; a worker that has not loaded it yet holds the turn till then."""
    deadline: FiniteFloat
    """When the turn, all tries together, fails."""
    try_deadline: FiniteFloat
    """When this try is given up; engines drop a request whose try deadline has passed."""
    asker: str
    """Process that waits for the reply (partitions may be shared)."""
    reply_partition: int
    last_worker: str | None = None
    """Worker that answered the previous turn: it may hold the KV."""
    last_prefill_worker: str | None = None
    """Worker that prefilled the previous turn, where it was split: it may hold the KV of that prompt."""
    affinity: str | None = None
    """Device class for the turn, of its decode where it is split; `auto`: the router picks."""
    prefill_affinity: str | None = None
    """Device class for the prefill of a split turn."""
    phases: Phases | None = None
    stream: bool = False
    """The asker wants tokens as they are sampled (TurnProgressed)."""


class GenerateRequested(Event):
    """A turn assigned to a worker of role `both` (prefill and decode together)."""

    turn: TurnRequested
    worker_id: str
    device_class: str
    fallback: bool = False
    """The preferred class, or the preferred phases, had no live worker."""
    assigned_at: FiniteFloat


class DecodeTarget(Event):
    """Where a prefilled turn goes on, chosen by the router together with its prefill worker."""

    worker_id: str
    device_class: str
    partition: int
    """Of the topic `decode.{device_class}`."""


class PrefillRequested(Event):
    """A split turn assigned to a worker of role `prefill`, and where it goes on."""

    turn: TurnRequested
    worker_id: str
    device_class: str
    decode: DecodeTarget
    fallback: bool = False
    """A preferred class, or the preferred phases, had no live worker."""
    assigned_at: FiniteFloat


class Prefilled(Event):
    """What a prefill worker hands over: the first token, and where the prompt's KV can be fetched."""

    worker_id: str
    device_class: str
    token_ids: list[int]
    """The tokens sampled so far: the first one. Shape (1,)."""
    logprobs: list[float]
    versions: list[tuple[int, int]]
    version: int
    """Policy version that computed the KV."""
    cached_tokens: int = 0
    """Prompt tokens whose KV the prefill worker reused."""
    queued_s: float = 0.0
    prefill_s: float = 0.0
    kv_transfer_params: dict[str, JsonValue]
    """For the engine of the decode worker, named as vLLM names them. KV itself goes from worker to worker."""


class DecodeRequested(Event):
    """A prefilled turn handed over to a worker of role `decode`."""

    turn: TurnRequested
    worker_id: str
    device_class: str
    prefilled: Prefilled
    fallback: bool = False
    assigned_at: FiniteFloat
    """When the router assigned the turn."""


class FinishReason(StrEnum):
    """Why sampling ended."""

    STOP = "stop"
    """A stop token was sampled."""
    LENGTH = "length"
    """`max_tokens` reached."""
    CONTEXT = "context"
    """The context window is full."""


class TurnTimings(Event):
    """Where a turn's time went in the worker, seconds."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Handover(Event):
    """How the KV of a split turn came from its prefill worker to its decode worker."""

    prefill_worker: str
    prefill_class: str
    prefill_cached_tokens: int = 0
    """Prompt tokens whose KV the prefill worker reused."""
    transferred_tokens: int = 0
    """Prompt tokens whose KV was fetched."""
    transferred_bytes: int = 0
    transfer_s: float = 0.0
    recomputed: str = ""
    """Why the decode worker computed the prompt itself: `gone`, `late`, `version`, `corrupt`, …; empty where
    the KV was used."""


class TurnGenerated(Event):
    """Tokens of one turn. `token_ids`, `logprobs` aligned; `versions` run-length: (version, count)."""

    run_id: str
    trajectory_id: str
    attempt: int
    turn: int
    try_number: int
    asker: str
    worker_id: str
    device_class: str
    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each token under the distribution it was drawn from. Finite."""
    versions: list[tuple[int, int]]
    finish_reason: FinishReason
    cached_tokens: int = 0
    """Prompt tokens whose KV the answering worker had or fetched, and did not compute."""
    timings: TurnTimings = TurnTimings()
    """Of a split turn: those of both workers, added up."""
    handover: Handover | None = None
    """Where the turn was split."""

    @model_validator(mode="after")
    def _aligned(self) -> TurnGenerated:
        n = len(self.token_ids)
        if len(self.logprobs) != n:
            raise ValueError(f"logprobs has {len(self.logprobs)} entries, token_ids {n}")
        if sum(count for _, count in self.versions) != n:
            raise ValueError(f"versions cover {sum(c for _, c in self.versions)} tokens, token_ids {n}")
        return self


class TurnProgressed(Event):
    """Some tokens of a turn that goes on, for an asker that streams them. Lost ones do no harm: TurnGenerated
    carries all tokens."""

    run_id: str
    trajectory_id: str
    attempt: int
    turn: int
    try_number: int
    asker: str
    start: int
    """Tokens of the turn before these."""
    token_ids: list[int]
    logprobs: list[float]


class TurnFailed(Event):
    """A turn that could not be sampled."""

    run_id: str
    trajectory_id: str
    attempt: int
    turn: int
    try_number: int
    asker: str
    code: str
    """An error code of `shared/errors.py`."""
    message: str
    retryable: bool

    @classmethod
    def of(cls, turn: TurnRequested, error: RollArtError) -> TurnFailed:
        """The reply to a try that ended in an error."""
        return cls(
            run_id=turn.run_id,
            trajectory_id=turn.trajectory_id,
            attempt=turn.attempt,
            turn=turn.turn,
            try_number=turn.try_number,
            asker=turn.asker,
            code=error.code,
            message=error.message,
            retryable=error.retryable,
        )


class TrajectoryStatus(StrEnum):
    """How an episode ended. Every rollout ends in exactly one of these."""

    FINISHED = "finished"
    """The environment terminated."""
    TRUNCATED = "truncated"
    """Turn limit or context window; `reason` says which. Keeps its reward."""
    FAILED = "failed"
    """Environment or generation error; no reward."""
    ABORTED = "aborted"
    """Stale, cancelled or past its deadline; no reward."""


class Message(Event):
    """One message of the episode as text, for people and for warm starts."""

    role: Literal["user", "assistant"]
    content: str


class TurnRecord(Event):
    """One turn of a trajectory."""

    start: int
    """Index of the turn's first sampled token in the flat arrays."""
    sampled: int
    """Tokens sampled in this turn."""
    reward: float = 0.0
    """What the environment gave for the step."""
    finish_reason: FinishReason = FinishReason.STOP
    worker_id: str = ""
    device_class: str = ""
    cached_tokens: int = 0
    wait_s: float = 0.0
    """From asking to answer."""
    env_s: float = 0.0
    """Spent in the environment's step."""


class TrajectoryCompleted(Event):
    """The one terminal event of a rollout. Arrays have shape (T,) and are aligned."""

    run_id: str
    trajectory_id: str
    group_id: str
    member: int
    attempt: int
    task: str
    purpose: Purpose
    split: Split
    seed: int
    policy: str = ""
    status: TrajectoryStatus
    reason: str = ""
    token_ids: list[int] = []
    mask: list[int] = []
    """1 on tokens that the policy sampled, 0 elsewhere."""
    logprobs: list[float] = []
    """0.0 where mask is 0."""
    versions: list[int] = []
    """Policy version of each sampled token, CONTEXT_VERSION elsewhere."""
    start_version: int = 0
    """Version the policy had when the episode started."""
    sampling: Sampling = Sampling()
    turns: list[TurnRecord] = []
    messages: list[Message] = []
    reward: RewardSpec = RewardSpec()
    reset_s: float = 0.0
    started_at: FiniteFloat
    completed_at: FiniteFloat

    @model_validator(mode="after")
    def _aligned(self) -> TrajectoryCompleted:
        n = len(self.token_ids)
        for name in ("mask", "logprobs", "versions"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries, token_ids {n}")
        return self


class TrajectoryScored(Event):
    """A trajectory with its reward, or without one where scoring failed (never 0.0 instead)."""

    trajectory: TrajectoryCompleted
    reward: FiniteFloat | None
    reason: str = ""
    """Why there is no reward: `environment_failed`, `scorer_failed`, `timeout`, `out_of_range`, …"""
    components: dict[str, float] = {}
    scored_at: FiniteFloat
    score_s: float = 0.0


class PolicyPublished(Event):
    """A hint that a version exists. Redis is the truth."""

    policy: str
    version: int
    step: int
    uri: str
    """Folder in the weight store."""
    digest: str
    """SHA-256 of the manifest."""
    published_at: FiniteFloat
