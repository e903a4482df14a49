"""A service on a real port, in the loop of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[uvicorn.Server]:
    """Started; leaving drains and stops it."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="on", http="h11"))
    server.capture_signals = _no_signals  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve())
    while not server.started:
        assert not task.done(), "the service did not start"
        await asyncio.sleep(0.01)
    try:
        yield server
    finally:
        app.state.supervisor.drain()
        server.should_exit = True
        await task


def address(server: uvicorn.Server) -> str:
    """Where it is reached."""
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


class _no_signals:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
