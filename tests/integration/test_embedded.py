"""The embedded parts behave as the services need: topics, quick hand-over, durable data, no orphans."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, Producer

from shared import topics
from shared.embedded import admin
from shared.embedded.kafka import EmbeddedKafka, LocalKafka, find_java, kafka_home
from shared.embedded.process import Child, free_port, locked, port_is_free
from shared.embedded.redis import EmbeddedRedis, answers, ask
from shared.errors import Conflict, Invalid, Unavailable
from shared.settings import KafkaSettings

ROOT = Path(__file__).parents[2]
SETTINGS = KafkaSettings(partitions=4, reply_partitions=4, session_timeout_s=3)

MEMBER = """
import sys
from confluent_kafka import Consumer
consumer = Consumer({"bootstrap.servers": sys.argv[1], "group.id": "rollart.router",
                     "group.protocol": "consumer", "auto.offset.reset": "earliest"})
consumer.subscribe(["rollart.turns"])
while True:
    message = consumer.poll(0.2)
    if message is not None and message.error() is None:
        print(message.partition(), flush=True)
"""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalKafka]:
    """Apache Kafka with all topics, where KAFKA_HOME is set."""
    if not os.environ.get("KAFKA_HOME"):
        pytest.skip("KAFKA_HOME is not set")
    with LocalKafka(tmp_path_factory.mktemp("kafka"), settings=SETTINGS) as kafka:
        admin.ensure_topics(kafka.bootstrap, topics.plan(SETTINGS), settings=SETTINGS)
        assert admin.set_group_sessions(kafka.bootstrap, ["router"], settings=SETTINGS)
        yield kafka


@pytest.fixture(scope="module", params=["embedded", "local"])
def bootstrap(request: pytest.FixtureRequest) -> Iterator[str]:
    """A broker with all topics."""
    if request.param == "local":
        kafka: LocalKafka = request.getfixturevalue("local")
        yield kafka.bootstrap
        return
    with EmbeddedKafka(topics.plan(SETTINGS), prefix=SETTINGS.prefix) as mock:
        yield mock.bootstrap


def produce(bootstrap: str, value: bytes, *, partitions: int = 4) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for partition in range(partitions):
        producer.produce("rollart.turns", value, partition=partition)
    assert producer.flush(30) == 0


def values(consumer: Consumer, count: int, *, seconds: float = 60) -> list[bytes]:
    found: list[bytes] = []
    limit = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < limit:
        message = consumer.poll(0.2)
        value = message.value() if message is not None and message.error() is None else None
        if value is not None:
            found.append(value)
    return found


def member(bootstrap: str, group: str = "rollart.router") -> Consumer:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe(["rollart.turns"])
    return consumer


def until(condition: Callable[[], object], *, seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


def test_every_planned_topic_exists_with_its_partitions(bootstrap: str) -> None:
    found = admin.partition_counts(bootstrap)
    planned = {SETTINGS.prefix + topic.name: topic.partitions for topic in topics.plan(SETTINGS)}
    assert {name: found.get(name) for name in planned} == planned


def test_a_killed_member_loses_its_partitions_long_before_the_default_session_ends(bootstrap: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", MEMBER, bootstrap], stdout=subprocess.PIPE)
    assert process.stdout is not None
    produce(bootstrap, b"for the first")
    assert {process.stdout.readline() for _ in range(4)} == {b"0\n", b"1\n", b"2\n", b"3\n"}
    process.kill()
    process.wait()
    # The mock's default session is 30 s, that of Apache Kafka 45 s; uncommitted work returns after ours, 3 s.
    survivor = member(bootstrap)
    try:
        assert len(values(survivor, 4, seconds=25)) == 4
    finally:
        survivor.close()


def test_a_killed_local_kafka_comes_back_on_its_data_and_port_and_takes_more_partitions(
    local: LocalKafka,
) -> None:
    produce(local.bootstrap, b"durable")
    local.child.kill()
    local.child.reap()
    local.spawn()
    local.wait_ready()
    wider = SETTINGS.model_copy(update={"partitions": 6})
    admin.ensure_topics(local.bootstrap, topics.plan(wider), settings=wider)
    admin.ensure_topics(local.bootstrap, topics.plan(SETTINGS), settings=SETTINGS)
    until(lambda: admin.partition_counts(local.bootstrap)["rollart.turns"] == 6)
    too_short = SETTINGS.model_copy(update={"session_timeout_s": 0.1})
    assert not admin.set_group_sessions(local.bootstrap, ["router"], settings=too_short)
    reader = member(local.bootstrap, "rollart.reader")
    try:
        until(lambda: b"durable" in values(reader, 1))
    finally:
        reader.close()


def test_no_broker_is_told_with_its_address() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1:"):
        admin.partition_counts("127.0.0.1:1", timeout_s=0.5)


def test_local_kafka_without_home_jars_or_java_is_refused_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KAFKA_HOME", raising=False)
    with pytest.raises(Invalid, match="needs KAFKA_HOME"):
        kafka_home(SETTINGS)
    with pytest.raises(Invalid, match="libs/kafka"):
        kafka_home(SETTINGS.model_copy(update={"home": tmp_path}))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(Invalid, match="Java 17"):
        find_java()
    old = tmp_path / "bin" / "java"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    old.chmod(0o755)
    with pytest.raises(Invalid, match=r"11\.0\.2"):
        find_java()


def test_redis_never_evicts_and_keeps_its_data_over_a_kill(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as redis:
        assert ask(redis.url, "CONFIG", "GET", "maxmemory-policy") == "maxmemory-policy noeviction"
        assert ask(redis.url, "SET", "clé", "värde") == "OK"
        redis.child.kill()
        redis.child.reap()
        assert not answers(redis.url)
        redis.spawn()
        redis.wait_ready()
        assert ask(redis.url, "GET", "clé") == "värde"
        with pytest.raises(Unavailable, match="refuses"):
            ask(redis.url, "NOSUCHCOMMAND")
    assert not answers(redis.url)
    with EmbeddedRedis(tmp_path) as redis:
        assert ask(redis.url, "GET", "clé") == "värde"


def test_a_redis_url_of_another_kind_is_refused() -> None:
    with pytest.raises(Invalid, match="redis://host:port"):
        ask("http://localhost:6379", "PING")


def test_a_lock_is_refused_while_held_and_free_afterwards(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"):
        with pytest.raises(Conflict, match=rf"pid {os.getpid()}.*{tmp_path}"), locked(tmp_path / "lock"):
            pytest.fail("locked twice")
        waiter = threading.Thread(target=_lock_and_leave, args=(tmp_path,))
        waiter.start()
    waiter.join(20)
    assert (tmp_path / "waited").exists()


def _lock_and_leave(folder: Path) -> None:
    with locked(folder / "lock", wait_s=15):
        (folder / "waited").touch()


def test_a_leashed_child_ends_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from shared.embedded.process import Child\n"
        "child = Child(name='x', command=['sleep', '600'], log_path=Path(sys.argv[1]) / 'log')\n"
        "child.spawn(); print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)}
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    command = ["/bin/sh", "-c", "trap '' TERM; echo ready; while true; do sleep 0.1; done"]
    child = Child(name="stubborn", command=command, log_path=tmp_path / "log")
    child.spawn()
    until(lambda: "ready" in child.log_tail())
    child.stop(grace_s=0.2)
    assert child.returncode == -signal.SIGKILL


def test_a_free_port_is_free_and_one_in_use_is_not() -> None:
    port = free_port()
    assert port_is_free("127.0.0.1", port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert not port_is_free("127.0.0.1", port)


def test_the_embedded_broker_survives_signals_to_its_process() -> None:
    script = (
        "import os, signal; from shared.embedded.admin import partition_counts\n"
        "from shared.embedded.kafka import EmbeddedKafka\n"
        "signal.signal(signal.SIGUSR1, lambda *_: None)\n"
        "broker = EmbeddedKafka()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
        "for _ in range(5):\n"
        "    partition_counts(broker.bootstrap)\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "broker.stop(); print('stopped')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "stopped\n", done.stderr
