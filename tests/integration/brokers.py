"""Settings and topics of one test on a broker that many share."""

from __future__ import annotations

import uuid

from shared import topics
from shared.settings import KafkaSettings
from shared.topics import TopicPlan

SESSION_S = 3.0
PARTITIONS = 4


def settings_for(bootstrap: str, *, embedded: bool) -> KafkaSettings:
    """Settings with a prefix that no other test uses."""
    return KafkaSettings(
        bootstrap=bootstrap,
        prefix=f"t{uuid.uuid4().hex[:10]}.",
        partitions=PARTITIONS,
        reply_partitions=PARTITIONS,
        session_timeout_s=SESSION_S,
        fetch_wait_ms=5 if embedded else None,
    )


def prefixed(settings: KafkaSettings) -> list[TopicPlan]:
    """All topics under the prefix of the settings, by their full names."""
    return [TopicPlan(settings.prefix + plan.name, plan.partitions) for plan in topics.plan(settings)]
