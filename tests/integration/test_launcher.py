"""A stack of tiny services: all start, the dead come back, and nothing is ever left running."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from tiny_stack import SERVICES, environ_of, running, stack, tiny_folder, until, until_ready

from services.launcher import Launcher
from services.processes import environment
from shared import topics
from shared.embedded import admin
from shared.embedded.kafka import EmbeddedKafka
from shared.embedded.process import Child, RestartPolicy
from shared.embedded.redis import EmbeddedRedis, answers, ask
from shared.errors import Conflict, Internal, Invalid, Unavailable
from shared.settings import (
    HttpSettings,
    KafkaSettings,
    RedisSettings,
    Settings,
    load_settings,
)
from shared.topics import TopicPlan


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tiny_folder(tmp_path, monkeypatch) as folder:
        yield folder


def start_stack(folder: Path, services: str = "gateway,router", **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(folder / "stack.py"), str(folder / "serve.py"), services],
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        text=True,
    )


def pids_of(launcher: subprocess.Popen[str]) -> dict[str, int]:
    """Of a stack of `start_stack`, once it is ready."""
    assert launcher.stdout is not None
    for line in launcher.stdout:
        if line.startswith("{"):
            found: dict[str, int] = json.loads(line)
            return found
    raise AssertionError(f"the launcher ended with {launcher.wait()}")


async def kill_for_ever(launched: Launcher, service: str) -> None:
    while True:
        if service in launched.pids:
            os.kill(launched.pids[service], signal.SIGKILL)
        await asyncio.sleep(0.02)


async def test_every_child_gets_the_addresses_and_a_clean_stop_leaves_no_process(tiny: Path) -> None:
    async with stack(tiny) as launched:
        assert set(launched.pids) == {*SERVICES, "redis"}
        assert psutil.Process(launched.pids["router"]).cmdline()[:1] == ["rollart serve router"]
        for name in SERVICES:
            assert await environ_of(launched, name) == {
                "kafka": launched.bootstrap,
                "redis": launched.redis_url,
                "wait": 5,
                "keys": launched.api_key,
                "base_url": launched.urls[name],
                "worker": "bandwidth:both",
            }
        assert admin.partition_counts(launched.bootstrap)["rollart.turns"] == 8
    assert running(tiny) == []
    assert "lifespan closed" in (launched.log_dir / "gateway.log").read_text()
    await launched.stop()


async def test_a_service_that_is_killed_or_loses_a_loop_comes_back_at_its_address_and_is_recorded(
    tiny: Path,
) -> None:
    async with stack(tiny) as launched:
        before = launched.pids
        os.kill(before["router"], signal.SIGKILL)
        await asyncio.to_thread(until, lambda: launched.restarts)
        await until_ready(launched.urls["router"])
        after = launched.pids
        assert after["router"] != before["router"]
        assert {name: after[name] for name in after if name != "router"} == {
            name: before[name] for name in before if name != "router"
        }
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.get(f"{launched.urls['router']}/die")
        await asyncio.to_thread(until, lambda: len(launched.restarts["router"]) == 2)
        await until_ready(launched.urls["router"])
        assert list(launched.restarts) == ["router"]


async def test_a_killed_redis_comes_back_with_its_data(tiny: Path) -> None:
    async with stack(tiny, services=("router",)) as launched:
        ask(launched.redis_url, "SET", "policy", "7")
        os.kill(launched.pids["redis"], signal.SIGKILL)
        await asyncio.to_thread(until, lambda: launched.restarts and answers(launched.redis_url))
        assert ask(launched.redis_url, "GET", "policy") == "7"


async def test_a_service_that_dies_while_starting_is_named_with_its_last_words(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY", "broken")
    with pytest.raises(Unavailable, match="the tiny cause"):
        async with stack(tiny, services=("router",)):
            pytest.fail("a broken stack was entered")
    assert running(tiny) == []


async def test_a_port_in_use_is_refused_by_name_before_anything_starts(tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = load_settings().model_copy(update={"http": HttpSettings(port=port)})
        with pytest.raises(Invalid, match=rf"{port}.*HTTP__PORT"):
            async with stack(tiny, settings=settings):
                pytest.fail("started on a port in use")
    assert not (tiny / "state" / "logs").exists()


async def test_a_full_disk_is_refused_by_folder_before_anything_starts(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.launcher.MIN_FREE_BYTES", 10**18)
    with pytest.raises(Invalid, match=rf"MB free at {tiny / 'state'}.*ROLLART_STATE_DIR"):
        async with stack(tiny):
            pytest.fail("started on a full disk")
    assert not (tiny / "state" / "logs").exists()


@pytest.mark.parametrize("name", ["ROLLART_STATE_DIR", "ROLLART_RUNS_DIR"])
async def test_a_folder_that_cannot_be_written_is_refused_by_its_variable_before_anything_starts(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tiny / "file").write_text("")
    monkeypatch.setenv(name, str(tiny / "file" / "folder"))
    with pytest.raises(Invalid, match=name):
        async with stack(tiny):
            pytest.fail("started without a folder to write to")
    assert not (tiny / "state" / "logs").exists()


@pytest.mark.skipif(not os.environ.get("KAFKA_HOME"), reason="KAFKA_HOME is not set")
async def test_a_killed_local_kafka_comes_back_with_its_topics_at_its_address(tiny: Path) -> None:
    settings = load_settings().model_copy(update={"kafka": KafkaSettings(bootstrap="local", partitions=2)})
    async with stack(tiny, services=("router",), settings=settings) as launched:
        assert set(launched.pids) == {"router", "kafka", "redis"}
        assert (await environ_of(launched, "router"))["kafka"] == launched.bootstrap
        before = admin.partition_counts(launched.bootstrap)
        assert before["rollart.turns"] == 2
        os.kill(launched.pids["kafka"], signal.SIGKILL)
        await asyncio.to_thread(until, lambda: launched.restarts)
        assert admin.partition_counts(launched.bootstrap, timeout_s=60) == before


async def test_a_second_stack_in_the_same_folder_is_refused_and_the_first_goes_on(tiny: Path) -> None:
    async with stack(tiny, services=("router",)) as first:
        with pytest.raises(Conflict, match="ROLLART_STATE_DIR"):
            async with stack(tiny, services=("router",)):
                pytest.fail("two stacks in one folder")
        await until_ready(first.urls["router"])
    async with stack(tiny, services=("router",)):
        pass


async def test_a_broker_and_redis_of_others_are_used_and_left_running(tiny: Path, tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "theirs") as redis, EmbeddedKafka() as kafka:
        plan_settings = KafkaSettings(bootstrap=kafka.bootstrap, partitions=4, reply_partitions=4)
        kafka.create_topics(_plan(plan_settings))
        settings = load_settings().model_copy(
            update={"kafka": plan_settings, "redis": RedisSettings(url=redis.url)}
        )
        async with stack(tiny, services=("router",), settings=settings) as launched:
            assert set(launched.pids) == {"router"}
            answer = await environ_of(launched, "router")
            assert (answer["kafka"], answer["redis"]) == (kafka.bootstrap, redis.url)
            assert answer["wait"] is None
        assert answers(redis.url)
        assert "rollart.turns" in admin.partition_counts(kafka.bootstrap)


def _plan(settings: KafkaSettings) -> list[TopicPlan]:
    return [dataclasses.replace(topic, name=settings.prefix + topic.name) for topic in topics.plan(settings)]


async def test_a_child_that_keeps_dying_fails_the_stack(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RestartPolicy, "LIMIT", 2)
    with pytest.raises(Internal, match="router ended by signal 9"):
        async with stack(tiny, services=("router",)) as launched:
            await kill_for_ever(launched, "router")


@pytest.mark.parametrize("moment", ["redis.log", "gateway.log"])
def test_an_interrupt_while_starting_leaves_no_process(tiny: Path, moment: str) -> None:
    launcher = start_stack(tiny, TINY="slow")
    until(lambda: (tiny / "state" / "logs" / moment).exists())
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(30) == 130
    assert running(tiny) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_running_launcher_brings_all_down(tiny: Path, number: signal.Signals) -> None:
    launcher = start_stack(tiny)
    assert set(pids_of(launcher)) == {"gateway", "router", "redis"}
    launcher.send_signal(number)
    assert launcher.wait(30) == 130
    assert running(tiny) == []


def test_no_child_outlives_a_launcher_that_is_killed_and_its_folder_is_free_again(tiny: Path) -> None:
    launcher = start_stack(tiny)
    assert pids_of(launcher)
    launcher.kill()
    launcher.wait()
    until(lambda: running(tiny) == [], seconds=20)
    launcher = start_stack(tiny)
    assert pids_of(launcher)
    launcher.terminate()
    assert launcher.wait(30) == 130


def test_a_stopped_service_outlives_neither_its_launcher_nor_the_grace(tiny: Path) -> None:
    launcher = start_stack(tiny, HTTP__GRACE_S="1")
    os.kill(pids_of(launcher)["router"], signal.SIGSTOP)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(30) == 130
    assert running(tiny) == []


def test_a_second_signal_ends_a_stack_that_waits_for_a_stopped_service(tiny: Path) -> None:
    launcher = start_stack(tiny, HTTP__GRACE_S="600")
    pids = pids_of(launcher)
    os.kill(pids["router"], signal.SIGSTOP)
    launcher.send_signal(signal.SIGINT)
    until(lambda: not psutil.pid_exists(pids["gateway"]))
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(30) == 130
    assert running(tiny) == []


async def interrupted_twice(folder: Path) -> None:
    async with asyncio.timeout(30), stack(folder, services=("router",)) as launched:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await launched.wait()
        except asyncio.CancelledError:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()


async def test_a_second_signal_also_ends_what_the_body_does_about_the_first(tiny: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        await interrupted_twice(tiny)
    assert running(tiny) == []


def test_settings_survive_the_way_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(
        kafka=KafkaSettings(bootstrap="a:1", fetch_wait_ms=7, partitions=3),
        http=HttpSettings(grace_s=2.5),
    )
    for name, value in environment(settings).items():
        monkeypatch.setenv(name, value)
    assert load_settings() == settings


def test_restarts_come_at_once_then_slower_then_end() -> None:
    policy = RestartPolicy()
    delays = [policy.delay(1.0) for _ in range(11)]
    assert delays == [0, 0, 0, 0.5, 1, 2, 4, 8, 16, 30, None]
    assert policy.delay(RestartPolicy.HEALTHY_S) == 0


def test_a_child_can_be_started_again_and_its_end_is_told(tmp_path: Path) -> None:
    child = Child(name="echo", command=["/bin/sh", "-c", "echo hello; exit 3"], log_path=tmp_path / "log")
    for count in (1, 2):
        child.spawn()
        with pytest.raises(Unavailable, match="exit code 3") as raised:
            child.wait_until(lambda: False, deadline_s=10)
        assert raised.value.message.count("hello") == count
