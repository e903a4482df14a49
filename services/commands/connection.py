"""Where client commands find a gateway: options, environment, or the stack that runs on this machine.

`up` and `run` leave address and key of their stack in `<state folder>/stack.json`, readable by its owner
alone, and remove it when they end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from shared.errors import Invalid, Unavailable
from shared.settings import Settings, load_settings

if TYPE_CHECKING:
    from services.launcher import Launcher
    from shared.http import ApiClient


class Stack(BaseModel):
    """`stack.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    pid: int
    url: str
    key: str
    bootstrap: str
    redis_url: str
    store: str
    runs_dir: Path


def _path(settings: Settings) -> Path:
    return settings.state_dir / "stack.json"


@contextmanager
def announced(launcher: Launcher) -> Iterator[Stack]:
    """The file exists as long as the `with` lasts."""
    stack = Stack(
        pid=os.getpid(),
        url=launcher.urls["gateway"],
        key=launcher.api_key,
        bootstrap=launcher.bootstrap,
        redis_url=launcher.redis_url,
        store=launcher.settings.store_uri,
        runs_dir=launcher.settings.runs_dir,
    )
    path = _path(launcher.settings)
    scratch = path.with_suffix(f".{stack.pid}")
    scratch.unlink(missing_ok=True)
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(stack.model_dump_json(indent=2))
    scratch.replace(path)
    try:
        yield stack
    finally:
        path.unlink(missing_ok=True)


def running_stack(settings: Settings) -> Stack | None:
    """The stack that runs on this machine with this state folder."""
    try:
        stack = Stack.model_validate_json(_path(settings).read_bytes())
        os.kill(stack.pid, 0)
    except (OSError, ValidationError):
        return None
    return stack


def open_client(url: str, key: str) -> ApiClient:
    """A client of the gateway that the options name, or of the stack on this machine.

    Raises Unavailable when there is none, Invalid when an address comes without a key.
    """
    from shared.http import ApiClient

    if url:
        if not key:
            raise Invalid("--url needs --key (or ROLLART_KEY): one of the gateway's ROLLART_API_KEYS")
        return ApiClient(url, key)
    stack = running_stack(load_settings())
    if stack is None:
        raise Unavailable(
            "no stack runs here: start one with `rollart up`, or name a gateway with --url and --key"
        )
    return ApiClient(stack.url, key or stack.key)


def attached(settings: Settings) -> Settings:
    """Settings whose `embedded` and `local` addresses are those of the stack on this machine.

    Raises Invalid when they need one and none runs.
    """
    kafka, redis = settings.kafka, settings.redis
    own_broker, own_redis = kafka.bootstrap in ("embedded", "local"), redis.url == "embedded"
    if not own_broker and not own_redis:
        return settings
    stack = running_stack(settings)
    if stack is None:
        name = "KAFKA__BOOTSTRAP" if own_broker else "REDIS__URL"
        raise Invalid(
            f"{name}: its server is started by `rollart up`, and none runs here: start one, or set {name} to "
            "the address of a running server"
        )
    changes: dict[str, object] = {}
    if own_broker:
        wait = 5 if kafka.bootstrap == "embedded" and kafka.fetch_wait_ms is None else kafka.fetch_wait_ms
        changes["kafka"] = kafka.model_copy(update={"bootstrap": stack.bootstrap, "fetch_wait_ms": wait})
    if own_redis:
        changes["redis"] = redis.model_copy(update={"url": stack.redis_url})
    changes |= {"store": settings.store or stack.store, "api_keys": settings.api_keys or stack.key}
    return settings.model_copy(update=changes)
