"""Several generation workers in one stack of tiny services: each a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tiny_stack import environ_of, stack, tiny_folder, until, until_ready

from shared.embedded import admin
from shared.errors import Invalid
from shared.settings import LauncherSettings, Settings, load_settings

FLEET = {
    "generation-compute-prefill": "compute:prefill",
    "generation-bandwidth-decode-1": "bandwidth:decode",
    "generation-bandwidth-decode-2": "bandwidth:decode",
}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tiny_folder(tmp_path, monkeypatch) as folder:
        yield folder


def fleet(workers: str = "compute:prefill, bandwidth:decode*2", **generation: object) -> Settings:
    settings = load_settings()
    changes = {
        "launcher": LauncherSettings(workers=workers),
        "generation": settings.generation.model_copy(update=generation),
    }
    return settings.model_copy(update=changes)


async def test_each_worker_is_a_process_that_is_told_its_class_and_role_and_its_log_and_port_are_its_own(
    tiny: Path,
) -> None:
    async with stack(tiny, services=("router", "generation"), settings=fleet()) as launched:
        assert {one.name: one.worker for one in launched.workers} == FLEET
        assert set(launched.pids) == {"router", *FLEET, "redis"}
        assert len(set(launched.ports.values())) == 4
        for name, worker in FLEET.items():
            await until_ready(launched.urls[name])
            assert (await environ_of(launched, name))["worker"] == worker
            command = psutil.Process(launched.pids[name]).cmdline()[:1]
            assert command == [f"rollart serve generation {worker}"]
            assert (launched.log_dir / f"{name}.log").exists()
        found = admin.partition_counts(launched.bootstrap)
        for device_class in ("compute", "bandwidth"):
            for verb in ("generate", "prefill", "decode"):
                assert found[f"rollart.{verb}.{device_class}"] == 8
    for name in FLEET:
        assert "lifespan closed" in (launched.log_dir / f"{name}.log").read_text()


async def test_one_worker_of_several_that_is_killed_comes_back_as_the_same_and_alone(tiny: Path) -> None:
    async with stack(tiny, services=("generation",), settings=fleet()) as launched:
        before = launched.pids
        victim = "generation-bandwidth-decode-2"
        os.kill(before[victim], signal.SIGKILL)
        await asyncio.to_thread(until, lambda: launched.restarts and victim in launched.pids)
        await until_ready(launched.urls[victim])
        after = launched.pids
        assert [name for name in after if after[name] != before[name]] == [victim]
        assert (await environ_of(launched, victim))["worker"] == "bandwidth:decode"
        assert list(launched.restarts) == [victim]


async def test_a_port_for_kv_that_is_in_use_is_refused_before_anything_starts(tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = fleet("compute:prefill,bandwidth:decode", kv_port=port, max_policies=1)
        with pytest.raises(Invalid, match=rf"{port}.*GENERATION__KV_PORT"):
            async with stack(tiny, services=("generation",), settings=settings):
                pytest.fail("started on a port in use")
    assert not (tiny / "state" / "logs").exists()
