"""A process of services: its exit code tells how it ended, and nothing holds up its end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tiny_stack import tiny_folder, until

from services.doctor import checks
from shared.settings import HttpSettings, KafkaSettings, RedisSettings, Settings


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tiny_folder(tmp_path, monkeypatch) as folder:
        yield folder


def start_serve(
    folder: Path, services: str = "router", **environ: str
) -> tuple[subprocess.Popen[bytes], str]:
    """A host process without a launcher, ready; and the base URL of its first service."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (folder / "serve.log").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(folder / "serve.py"), services],
            env=os.environ | {"HTTP__PORT": str(port)} | environ,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    until(lambda: answers_http(url) or process.poll() is not None)
    assert process.poll() is None, (folder / "serve.log").read_text()
    return process, url


def answers_http(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_dead_loop_ends_its_process_with_exit_code_1(tiny: Path) -> None:
    process, url = start_serve(tiny)
    httpx.get(f"{url}/die", trust_env=False)
    assert process.wait(20) == 1
    assert "lifespan closed" in (tiny / "serve.log").read_text()


def test_sigterm_with_an_open_event_stream_exits_0_within_the_grace(tiny: Path) -> None:
    process, url = start_serve(tiny)
    with httpx.stream("GET", f"{url}/stream", trust_env=False) as stream:
        next(stream.iter_raw())
        process.terminate()
        assert process.wait(10) == 0
    assert "lifespan closed" in (tiny / "serve.log").read_text()


def test_a_second_signal_ends_a_process_that_is_still_stopping(tiny: Path) -> None:
    process, url = start_serve(tiny, HTTP__GRACE_S="600")
    with httpx.stream("GET", f"{url}/stream", trust_env=False) as stream:
        next(stream.iter_raw())
        process.terminate()
        until(lambda: not answers_http(url))
        process.terminate()
        assert process.wait(10) == 1
    assert "lifespan closed" not in (tiny / "serve.log").read_text()


def test_services_of_one_process_stop_together_when_one_dies(tiny: Path) -> None:
    process, url = start_serve(tiny, "generation,gateway,router")
    httpx.get(f"{url}/die", trust_env=False)
    assert process.wait(20) == 1
    assert (tiny / "serve.log").read_text().count("lifespan closed") == 3


def test_serving_on_a_port_in_use_is_refused_by_name(tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, str(tiny / "serve.py"), "router"],
            env=os.environ | {"HTTP__PORT": str(port)},
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    assert done.returncode != 0
    assert f"127.0.0.1:{port}" in done.stderr


def test_the_doctor_names_what_is_wrong_and_the_fix(tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = Settings(
            kafka=KafkaSettings(bootstrap="127.0.0.1:1"),
            redis=RedisSettings(url="redis://127.0.0.1:1"),
            http=HttpSettings(port=port),
        )
        found = {check.name: check for check in checks(settings)}
    assert {name for name, check in found.items() if not check.ok} == {"kafka", "redis", "port"}
    assert "KAFKA__BOOTSTRAP=embedded" in found["kafka"].fix
    assert "HTTP__PORT" in found["port"].fix
    assert "127.0.0.1:1" in found["redis"].detail
    assert all(check.fix for check in found.values() if not check.ok)
