"""A service of a few lines and the scripts that run it, for the tests of the host and the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from services.launcher import Launcher
from shared.settings import Settings, load_settings

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "router", "reward")

TINY = """
import asyncio, contextlib, os, sys
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse
from shared.supervisor import Supervisor

def create_app(settings):
    @contextlib.asynccontextmanager
    async def lifespan(app):
        if os.environ.get("TINY") == "broken":
            print("the tiny cause", file=sys.stderr)
            raise RuntimeError("cannot start")
        if os.environ.get("TINY") == "slow":
            await asyncio.sleep(3600)
        async with app.state.supervisor as supervisor:
            supervisor.start("loop", lambda: loop(app))
            yield
        print("lifespan closed", flush=True)

    async def loop(app):
        await app.state.die.wait()
        raise RuntimeError("the loop died")

    app = FastAPI(lifespan=lifespan)
    app.state.supervisor, app.state.die = Supervisor(), asyncio.Event()

    @app.get("/readyz")
    async def readyz():
        return Response(status_code=200 if app.state.supervisor.ready else 503)

    @app.get("/die")
    async def die():
        app.state.die.set()

    @app.get("/environ")
    async def environ():
        return {"kafka": settings.kafka.bootstrap, "redis": settings.redis.url, "keys": settings.api_keys,
                "wait": settings.kafka.fetch_wait_ms, "base_url": app.state.base_url,
                "worker": f"{settings.generation.device_class}:{settings.generation.role}"}

    @app.get("/stream")
    async def stream():
        async def events():
            while True:
                yield b"data: x\\n\\n"
                await asyncio.sleep(0.05)
        return StreamingResponse(events())

    return app
"""

SERVE = """
import sys
from services import host
from shared.settings import load_settings
names = sys.argv[1].split(",")
sys.exit(host.serve(names, load_settings(), apps={name: "tiny:create_app" for name in host.APPS}))
"""

STACK = """
import asyncio, json, sys
from services.launcher import Launcher
from shared.settings import load_settings
async def main():
    command = lambda name: [sys.executable, sys.argv[1], name]
    async with Launcher(load_settings(), services=sys.argv[2].split(","), command=command) as stack:
        print(json.dumps(stack.pids), flush=True)
        await stack.wait()
try:
    asyncio.run(main())
except KeyboardInterrupt:
    sys.exit(130)
"""


@contextlib.contextmanager
def tiny_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder with the tiny service and its scripts; fails the test that leaves a process behind."""
    for name, text in (("tiny.py", TINY), ("serve.py", SERVE), ("stack.py", STACK)):
        (folder / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{folder}")
    monkeypatch.setenv("ROLLART_STATE_DIR", str(folder / "state"))
    monkeypatch.setenv("ROLLART_RUNS_DIR", str(folder / "runs"))
    yield folder
    left = running(folder)
    for process in left:
        process.kill()
    assert left == []


def running(folder: Path) -> list[psutil.Process]:
    """Live processes whose command line or environment names the folder."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
            zombie = process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if process.pid != os.getpid() and not zombie and any(str(folder) in word for word in words):
            found.append(process)
    return found


def until(condition: Callable[[], object], *, seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


async def until_ready(url: str, *, seconds: float = 60) -> None:
    async with asyncio.timeout(seconds), httpx.AsyncClient(trust_env=False) as client:
        while True:
            try:
                if (await client.get(f"{url}/readyz")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.02)


def stack(
    folder: Path, *, services: tuple[str, ...] = SERVICES, settings: Settings | None = None
) -> Launcher:
    return Launcher(
        settings or load_settings(),
        services=services,
        command=lambda name: [sys.executable, str(folder / "serve.py"), name],
    )


async def environ_of(launched: Launcher, service: str) -> dict[str, object]:
    async with httpx.AsyncClient(trust_env=False) as client:
        answer: dict[str, object] = (await client.get(f"{launched.urls[service]}/environ")).json()
        return answer
