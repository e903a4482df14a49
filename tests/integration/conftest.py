"""Brokers and Redis for integration tests: started once, told apart by a prefix of each test's own."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
from brokers import SESSION_S, prefixed, settings_for

from shared import topics
from shared.embedded import admin
from shared.embedded.kafka import EmbeddedKafka, LocalKafka
from shared.embedded.redis import EmbeddedRedis
from shared.settings import KafkaSettings, RedisSettings


@pytest.fixture(scope="session")
def _embedded_broker() -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(session_timeout_s=SESSION_S) as broker:
        yield broker


@pytest.fixture(scope="session")
def _local_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalKafka]:
    if not os.environ.get("KAFKA_HOME"):
        pytest.skip("KAFKA_HOME is not set")
    settings = KafkaSettings(session_timeout_s=SESSION_S)
    with LocalKafka(tmp_path_factory.mktemp("kafka"), settings=settings) as broker:
        yield broker


@pytest.fixture
def embedded_kafka(_embedded_broker: EmbeddedKafka) -> KafkaSettings:
    """The embedded broker, with all topics under a fresh prefix."""
    settings = settings_for(_embedded_broker.bootstrap, embedded=True)
    _embedded_broker.create_topics(prefixed(settings))
    return settings


@pytest.fixture
def local_kafka(_local_broker: LocalKafka) -> KafkaSettings:
    """Apache Kafka where KAFKA_HOME is set, with all topics under a fresh prefix."""
    settings = settings_for(_local_broker.bootstrap, embedded=False)
    admin.ensure_topics(settings.bootstrap, topics.plan(settings), settings=settings)
    return settings


@pytest.fixture(params=["embedded", "local"])
def kafka(request: pytest.FixtureRequest) -> KafkaSettings:
    """Both brokers in turn."""
    settings: KafkaSettings = request.getfixturevalue(f"{request.param}_kafka")
    return settings


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis-protocol server for the whole session."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def redis_settings(redis_url: str) -> RedisSettings:
    """That server, with a prefix of the test's own."""
    return RedisSettings(url=redis_url, prefix=f"t{uuid.uuid4().hex[:10]}:")
