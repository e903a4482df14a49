"""Topic and group names, who produces and who consumes, and their creation.

| topic | event | key | group |
|---|---|---|---|
| `rollouts` | RolloutRequested | trajectory_id | `environment` |
| `turns` | TurnRequested | trajectory_id | `router` |
| `generate.{class}` | GenerateRequested | partition chosen by the router | `generation.both.{class}` |
| `prefill.{class}` | PrefillRequested | partition chosen by the router | `generation.prefill.{class}` |
| `decode.{class}` | DecodeRequested | partition chosen by the router | `generation.decode.{class}` |
| `replies` | TurnGenerated, TurnProgressed, TurnFailed | the asker's own partition | none |
| `trajectories` | TrajectoryCompleted | group_id | `reward` |
| `samples` | TrajectoryScored | group_id | `training.{run}`, `gateway` |
| `policies` | PolicyPublished | policy | none (compacted) |
| `deadletters` | the original bytes | original key | none |

A turn whose phases stay together is one GenerateRequested; a split one is a PrefillRequested, which the
prefill worker turns into a DecodeRequested.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.events import Role
from shared.settings import KafkaSettings

ROLLOUTS = "rollouts"
TURNS = "turns"
REPLIES = "replies"
TRAJECTORIES = "trajectories"
SAMPLES = "samples"
POLICIES = "policies"
DEADLETTERS = "deadletters"

_VERB: dict[Role, str] = {"both": "generate", "prefill": "prefill", "decode": "decode"}


def worker_topic(role: Role, device_class: str) -> str:
    """The topic that workers of a role and a device class consume."""
    return f"{_VERB[role]}.{device_class}"


def worker_group(role: Role, device_class: str) -> str:
    """Their consumer group."""
    return f"generation.{role}.{device_class}"


def training_group(run_id: str) -> str:
    """The consumer group of one run's trainer."""
    return f"training.{run_id}"


@dataclass(frozen=True)
class TopicPlan:
    """A topic as it should exist."""

    name: str
    """Without prefix."""
    partitions: int
    compacted: bool = False


def plan(settings: KafkaSettings, device_classes: tuple[str, ...] = ("bandwidth",)) -> list[TopicPlan]:
    """Every topic of a stack that serves these device classes."""
    work = [ROLLOUTS, TURNS, TRAJECTORIES, SAMPLES]
    work += [worker_topic(role, name) for name in device_classes for role in _VERB]
    topics = [TopicPlan(name, settings.partitions) for name in work]
    topics.append(TopicPlan(REPLIES, settings.reply_partitions))
    topics.append(TopicPlan(POLICIES, 1, compacted=True))
    topics.append(TopicPlan(DEADLETTERS, 1))
    return topics
