"""Kafka on this machine: librdkafka's mock cluster in this process, or an Apache Kafka as a child.

`EmbeddedKafka` is what `KAFKA__BOOTSTRAP=embedded` means, `LocalKafka` is `local`. Called by
`services.launcher`, `services.doctor`, the bench and tests.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import confluent_kafka.cimpl

from shared.embedded.process import Child, free_port, port_is_free
from shared.errors import Internal, Invalid
from shared.settings import KafkaSettings
from shared.topics import TopicPlan

_PRODUCER = 0
_TOPIC_EXISTS = 36

_LOG4J = """\
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = [%d] %p %m (%c)%n
rootLogger.level = WARN
rootLogger.appenderRef.console.ref = console
"""


def _library() -> ctypes.CDLL:
    """librdkafka as confluent-kafka carries it, with the signatures of `rdkafka_mock.h` we use."""
    library = ctypes.CDLL(confluent_kafka.cimpl.__file__)
    pointer, number, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    signatures: dict[str, tuple[object, list[object]]] = {
        "rd_kafka_conf_new": (pointer, []),
        "rd_kafka_conf_set": (number, [pointer, text, text, text, ctypes.c_size_t]),
        "rd_kafka_new": (pointer, [number, pointer, text, ctypes.c_size_t]),
        "rd_kafka_destroy": (None, [pointer]),
        "rd_kafka_mock_cluster_new": (pointer, [pointer, number]),
        "rd_kafka_mock_cluster_destroy": (None, [pointer]),
        "rd_kafka_mock_cluster_bootstraps": (text, [pointer]),
        "rd_kafka_mock_topic_create": (number, [pointer, text, number, number]),
        "rd_kafka_mock_set_group_consumer_session_timeout_ms": (None, [pointer, number]),
        "rd_kafka_mock_set_group_consumer_heartbeat_interval_ms": (None, [pointer, number]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class EmbeddedKafka:
    """Mock cluster of one broker inside this process: keeps 5 MB per partition, in memory, and no longer
    than `stop` or the end of the process. Other processes use it as any broker."""

    def __init__(
        self,
        topics: Sequence[TopicPlan] = (),
        *,
        prefix: str = "",
        session_timeout_s: float = 3.0,
        heartbeat_s: float = 1.0,
    ) -> None:
        self._library = _library()
        self._prefix = prefix
        # Its thread takes an interrupted poll for the end, and then the cluster cannot even be stopped.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._client, self._cluster = self._start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._library.rd_kafka_mock_set_group_consumer_session_timeout_ms(
            self._cluster, int(session_timeout_s * 1000)
        )
        self._library.rd_kafka_mock_set_group_consumer_heartbeat_interval_ms(
            self._cluster, int(heartbeat_s * 1000)
        )
        self.bootstrap: str = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        self.create_topics(topics)

    def _start(self) -> tuple[int, int]:
        error = ctypes.create_string_buffer(512)
        conf = self._library.rd_kafka_conf_new()
        self._library.rd_kafka_conf_set(conf, b"log_level", b"3", error, 512)
        client: int | None = self._library.rd_kafka_new(_PRODUCER, conf, error, 512)
        if not client:
            raise Internal(f"cannot start the embedded Kafka: {error.value.decode()}")
        cluster: int | None = self._library.rd_kafka_mock_cluster_new(client, 1)
        if not cluster:
            raise Internal("cannot start the embedded Kafka: no mock cluster")
        return client, cluster

    def create_topics(self, topics: Sequence[TopicPlan]) -> None:
        """Create what is missing. A topic that exists keeps its partitions."""
        for topic in topics:
            name = (self._prefix + topic.name).encode()
            code = self._library.rd_kafka_mock_topic_create(self._cluster, name, topic.partitions, 1)
            if code not in (0, _TOPIC_EXISTS):
                raise Internal(f"the embedded Kafka refuses topic {topic.name!r}: error {code}")

    def stop(self) -> None:
        """End the broker; its messages are gone. Idempotent."""
        if self._cluster:
            self._library.rd_kafka_mock_cluster_destroy(self._cluster)
            self._library.rd_kafka_destroy(self._client)
            self._cluster = self._client = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class LocalKafka:
    """Apache Kafka of `KAFKA_HOME`, one KRaft node on loopback ports with its data in `folder`.

    It ends with the process that started it and comes back on its data and port.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: KafkaSettings,
        log_path: Path | None = None,
    ) -> None:
        self.folder = folder.absolute()
        self._libs = kafka_home(settings) / "libs"
        self._java = find_java()
        self._session_ms = int(settings.session_timeout_s * 1000)
        self.port, self._controller_port = self._ports()
        self.child = Child(
            name="kafka",
            command=["/bin/sh", "-c", self._script()],
            log_path=log_path or self.folder / "kafka.log",
            lock_path=self.folder / "lock",
        )

    @property
    def bootstrap(self) -> str:
        """`127.0.0.1:port`"""
        return f"127.0.0.1:{self.port}"

    def spawn(self) -> None:
        """Write the configuration, format the data folder on first use and start; returns at once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "log4j2.properties").write_text(_LOG4J)
        lines = "".join(f"{key}={value}\n" for key, value in self._properties().items())
        (self.folder / "server.properties").write_text(lines)
        (self.folder / "ports").write_text(f"{self.port} {self._controller_port}")
        self.child.spawn()

    def wait_ready(self, deadline_s: float = 60.0) -> None:
        """Block until it accepts connections. Raises Unavailable with the end of its log."""
        self.child.wait_until(self._listens, deadline_s=deadline_s)

    def stop(self) -> None:
        """Clean end, data kept. Idempotent."""
        self.child.stop(grace_s=20)

    def __enter__(self) -> Self:
        self.spawn()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def _ports(self) -> tuple[int, int]:
        """Those of the last start where they are free: the quorum's own records name them."""
        try:
            broker, controller = map(int, (self.folder / "ports").read_text().split())
        except (OSError, ValueError):
            broker = controller = 0
        if broker and port_is_free("127.0.0.1", broker) and port_is_free("127.0.0.1", controller):
            return broker, controller
        broker = free_port()
        return broker, free_port(avoid=[broker])

    def _properties(self) -> dict[str, str | int]:
        address, controller = f"127.0.0.1:{self.port}", f"127.0.0.1:{self._controller_port}"
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.bootstrap.servers": controller,
            "listeners": f"PLAINTEXT://{address},CONTROLLER://{controller}",
            "advertised.listeners": f"PLAINTEXT://{address}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": f"{self.folder}/data",
            "auto.create.topics.enable": "false",
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 4,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "group.initial.rebalance.delay.ms": 0,
            "group.consumer.min.session.timeout.ms": 1000,
            "group.consumer.min.heartbeat.interval.ms": 500,
            "group.consumer.max.session.timeout.ms": max(60_000, self._session_ms),
            "group.consumer.session.timeout.ms": self._session_ms,
            "group.consumer.heartbeat.interval.ms": heartbeat_ms(self._session_ms),
            "log.cleaner.dedupe.buffer.size": 16 * 2**20,
            "log.segment.bytes": 64 * 2**20,
            "log.retention.bytes": 2**30,
            "log.retention.hours": 72,
        }

    def _script(self) -> str:
        """Format unless an earlier format completed, then become the broker."""
        heap = os.environ.get("KAFKA_HEAP_OPTS", "-Xms128m -Xmx512m")
        # The quick compiler alone: ready in half the time, and no slower within the first million messages.
        tuning = os.environ.get("KAFKA_JVM_PERFORMANCE_OPTS", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1")
        log4j = shlex.quote(f"-Dlog4j2.configurationFile={self.folder}/log4j2.properties")
        java = f"{shlex.quote(self._java)} {heap} {tuning} {log4j} -cp {shlex.quote(f'{self._libs}/*')}"
        config = shlex.quote(f"{self.folder}/server.properties")
        # Not base64: an id that begins with "-" would be taken for an option.
        cluster = uuid.uuid4().hex[:22]
        done, data = shlex.quote(f"{self.folder}/formatted"), shlex.quote(f"{self.folder}/data")
        return (
            f"if [ ! -f {done} ]; then rm -rf {data}; "
            f"{java} kafka.tools.StorageTool format -t '{cluster}' -c {config} --standalone && : > {done} "
            f"|| exit 1; fi; exec {java} kafka.Kafka {config}"
        )


def heartbeat_ms(session_ms: int) -> int:
    """Three heartbeats in a session or more; within what a broker takes."""
    return min(5000, max(500, session_ms // 3))


def kafka_home(settings: KafkaSettings) -> Path:
    """The unpacked Apache Kafka. Raises Invalid naming the variable and the fix."""
    home = settings.home or (Path(os.environ["KAFKA_HOME"]) if os.environ.get("KAFKA_HOME") else None)
    if home is None:
        raise Invalid(
            "KAFKA__BOOTSTRAP=local needs KAFKA_HOME: the folder of an unpacked Apache Kafka 4 "
            "(https://kafka.apache.org/downloads), or use KAFKA__BOOTSTRAP=embedded"
        )
    if not any((home / "libs").glob("kafka_2.13-*.jar")):
        raise Invalid(f"KAFKA_HOME={home} holds no libs/kafka_2.13-*.jar: unpack an Apache Kafka 4 there")
    return home.absolute()


def find_java() -> str:
    """The `java` of JAVA_HOME or PATH. Raises Invalid when there is none, or one older than 17."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    if java is None:
        raise Invalid(
            "KAFKA__BOOTSTRAP=local needs Java 17 or newer: install a JRE or set JAVA_HOME, or use "
            "KAFKA__BOOTSTRAP=embedded"
        )
    answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=30)
    found = re.search(r'version "(\d+)', answer.stderr + answer.stdout)
    if found is None or int(found.group(1)) < 17:
        raise Invalid(f"Apache Kafka 4 needs Java 17 or newer, {java} is {answer.stderr.strip()!r}")
    return java
