"""What a broker must have before services start: our topics, and short sessions for our groups.

For any broker but the embedded one, which takes both through its C interface. Called by
`services.launcher`, and by whoever starts a stack against a broker of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from shared.embedded.kafka import heartbeat_ms
from shared.errors import Invalid, Unavailable
from shared.settings import KafkaSettings
from shared.topics import TopicPlan

log = structlog.get_logger()

_DEFAULT_MESSAGE_BYTES = 1_000_000
_REQUEST_S = 5.0
_NOT_YET = (KafkaError.INVALID_REPLICATION_FACTOR, KafkaError.REQUEST_TIMED_OUT, KafkaError._TIMED_OUT)
"""What a broker answers in the first second of its life."""


def partition_counts(bootstrap: str, *, timeout_s: float = 10.0) -> dict[str, int]:
    """Topic (full name) → number of partitions. Raises Unavailable when no broker answers."""
    try:
        admin = _client(bootstrap)
        found = admin.list_topics(timeout=timeout_s)
    except KafkaException as error:
        raise Unavailable(
            f"no Kafka broker answers at {bootstrap}: start it, or set KAFKA__BOOTSTRAP=embedded"
        ) from error
    return {name: len(topic.partitions) for name, topic in found.topics.items()}


def ensure_topics(
    bootstrap: str, topics: Sequence[TopicPlan], *, settings: KafkaSettings, timeout_s: float = 30.0
) -> None:
    """Create missing topics and add missing partitions; what exists is left as it is.

    Raises Unavailable when no broker answers in time, Invalid when it refuses.
    """
    admin = _client(bootstrap)
    limit = time.monotonic() + timeout_s
    while True:
        present = partition_counts(bootstrap, timeout_s=timeout_s)
        missing = [topic for topic in topics if settings.prefix + topic.name not in present]
        problem = _create(admin, missing, settings)
        if problem is None:
            break
        if problem.code() not in _NOT_YET or time.monotonic() > limit:
            raise Invalid(f"the broker at {bootstrap} refuses our topics: {problem.str()}")
        time.sleep(0.3)
    short = [
        NewPartitions(settings.prefix + topic.name, topic.partitions)
        for topic in topics
        if 0 < present.get(settings.prefix + topic.name, 0) < topic.partitions
    ]
    if short:
        for name, future in admin.create_partitions(short, request_timeout=_REQUEST_S).items():
            try:
                future.result()
            except KafkaException as error:
                raise Invalid(
                    f"topic {name} has too few partitions and the broker adds none: {error.args[0].str()}; "
                    "lower KAFKA__PARTITIONS or delete the topic"
                ) from error
            log.info("partitions_added", topic=name)


def _create(admin: AdminClient, topics: Sequence[TopicPlan], settings: KafkaSettings) -> KafkaError | None:
    """The first refusal, if any."""
    if not topics:
        return None
    wanted = []
    for topic in topics:
        config = {"cleanup.policy": "compact"} if topic.compacted else {}
        if settings.inline_limit_bytes > _DEFAULT_MESSAGE_BYTES:
            config["max.message.bytes"] = str(settings.inline_limit_bytes + 100_000)
        wanted.append(
            NewTopic(
                settings.prefix + topic.name,
                num_partitions=topic.partitions,
                replication_factor=settings.replication,
                config=config,
            )
        )
    for future in admin.create_topics(wanted, request_timeout=_REQUEST_S).values():
        try:
            future.result()
        except KafkaException as error:
            problem: KafkaError = error.args[0]
            if problem.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                return problem
    return None


def set_group_sessions(bootstrap: str, groups: Sequence[str], *, settings: KafkaSettings) -> bool:
    """Ask the broker for `session_timeout_s` in these groups (names without prefix).

    A killed member's partitions then move after it, not after the broker's 45 s. Returns False, and says
    so once, where the broker refuses: floor not lowered, older than 4.0, no permission, or no answer.
    """
    if settings.protocol != "consumer" or not groups:
        return True
    session_ms = int(settings.session_timeout_s * 1000)
    values = {
        "consumer.session.timeout.ms": session_ms,
        "consumer.heartbeat.interval.ms": heartbeat_ms(session_ms),
    }
    resources = [
        ConfigResource(
            ResourceType.GROUP,
            settings.prefix + group,
            incremental_configs=[
                ConfigEntry(key, str(value), incremental_operation=AlterConfigOpType.SET)
                for key, value in values.items()
            ],
        )
        for group in groups
    ]
    refused: str | None = None
    admin = _client(bootstrap)
    for future in admin.incremental_alter_configs(resources, request_timeout=_REQUEST_S).values():
        try:
            future.result()
        except KafkaException as error:
            refused = error.args[0].str()
    if refused is not None:
        log.warning(
            "group_session_timeout_refused",
            reason=refused,
            effect="a killed consumer's partitions move after the broker's own timeout",
            fix="set group.consumer.min.session.timeout.ms on the broker",
        )
    return refused is None


def _client(bootstrap: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 2})
