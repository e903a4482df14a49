"""The same run on a broker and a Redis that someone else runs, and on an Apache Kafka that is killed."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from shared import topics
from shared.embedded import admin
from shared.embedded.kafka import EmbeddedKafka
from shared.embedded.process import Child
from shared.embedded.redis import EmbeddedRedis, answers
from shared.settings import KafkaSettings
from tests.e2e.stack import ROOT, Job, leftovers, rollart_run

QUICK = ROOT / "tests" / "e2e" / "quick.toml"
FAULTS = ROOT / "tests" / "e2e" / "faults.toml"


@pytest.mark.timeout(200)
def test_a_running_broker_and_redis_are_used_and_left_running(tmp_path: Path) -> None:
    redis = EmbeddedRedis(tmp_path / "redis")
    broker = EmbeddedKafka(topics.plan(KafkaSettings()), prefix=KafkaSettings().prefix)
    try:
        redis.spawn()
        redis.wait_ready()
        with rollart_run(
            QUICK,
            tmp_path / "job",
            KAFKA__BOOTSTRAP=broker.bootstrap,
            KAFKA__FETCH_WAIT_MS="5",
            REDIS__URL=redis.url,
        ) as job:
            summary = job.finish()
        assert summary.state == "finished"
        assert summary.groups.trained == summary.steps * 4
        assert answers(redis.url)
        assert f"{KafkaSettings().prefix}{topics.TURNS}" in admin.partition_counts(broker.bootstrap)
        assert leftovers(tmp_path / "job") == []
    finally:
        end(redis.child)
        broker.stop()


@pytest.mark.timeout(300)
@pytest.mark.skipif("KAFKA_HOME" not in os.environ, reason="KAFKA_HOME names no Apache Kafka")
def test_apache_kafka_is_killed_in_the_middle_and_comes_back_on_its_data(tmp_path: Path) -> None:
    with rollart_run(FAULTS, tmp_path, KAFKA__BOOTSTRAP="local") as job:
        job.until_step(8, timeout_s=180)
        kafka_process(job).kill()
        summary = job.finish()
    assert summary.state == "finished"
    assert summary.steps == 60
    assert summary.groups.in_flight == 0
    assert leftovers(tmp_path) == []


def kafka_process(job: Job) -> psutil.Process:
    """The JVM below the launcher."""
    children = psutil.Process(job.process.pid).children(recursive=True)
    return next(child for child in children if child.name() == "java")


def end(child: Child) -> None:
    """Stop a part that this test has started."""
    child.terminate()
    child.reap()
