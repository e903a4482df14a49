"""The event stream of one run. Called by `routes.runs`."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import cast

import structlog
from fastapi import Request
from fastapi.sse import format_sse_event
from pydantic_core import from_json

from services.gateway.service import Gateway
from shared.api import TERMINAL, Run

log = structlog.get_logger()
ID = re.compile(r"\d{1,19}(-\d{1,19})?")
_KEEP_ALIVE_S = 10.0
_LOOK_EVERY_S = 0.5

EXAMPLE = (
    'event: step\nid: 1712-0\ndata: {"kind":"step","step":1,"version":1,"reward":{"frozenlake":0.31}}\n\n'
    'event: run\ndata: {"run_id":"lake-3f2a91","state":"finished","step":40}\n\n'
)


async def follow(
    gateway: Gateway, run_id: str, *, after: str, request: Request
) -> AsyncGenerator[bytes, None]:
    """Chunks of the stream. Ends when the run has ended and every event was sent, when the client has
    left, and when the service is being stopped. Woken by Redis, at least once a second."""
    context = gateway.context
    documents = context.state.run_events(run_id, after=after)
    stopping = asyncio.create_task(context.supervisor.stopping.wait())
    shown = gateway.view(await context.state.run(run_id))
    looked = sent = time.monotonic()
    try:
        yield format_sse_event(comment="open", retry=1000)
        if shown.state not in TERMINAL:
            yield _run_chunk(shown)
        while (entry := await _next(documents, stopping)) is not None:
            event_id, document = entry
            now = time.monotonic()
            if document:
                yield _chunk(event_id, document)
                sent = now
            elif shown.state in TERMINAL:
                yield _run_chunk(shown)
                return
            elif await request.is_disconnected():
                return
            if shown.state not in TERMINAL and (not document or now - looked > _LOOK_EVERY_S):
                looked = now
                run = gateway.view(await context.state.run(run_id))
                if run != shown and run.state not in TERMINAL:
                    yield _run_chunk(run)
                    sent = now
                shown = run
            if now - sent > _KEEP_ALIVE_S:
                yield format_sse_event(comment="alive")
                sent = now
    finally:
        stopping.cancel()
        await cast("AsyncGenerator[tuple[str, str], None]", documents).aclose()
        log.debug("event stream closed", run_id=run_id)


async def _next(
    documents: AsyncIterator[tuple[str, str]], stopping: asyncio.Task[bool]
) -> tuple[str, str] | None:
    """The next entry; None once the service is being stopped."""

    async def read() -> tuple[str, str]:
        return await anext(documents)

    reading = asyncio.create_task(read())
    try:
        await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return None if stopping.done() else reading.result()
    finally:
        if not reading.done():
            reading.cancel()
            await asyncio.wait({reading})


def _chunk(event_id: str, document: str) -> bytes:
    try:
        kind = str(from_json(document).get("kind", "message"))
    except (ValueError, AttributeError):
        kind = "message"
    return format_sse_event(event=kind, data_str=document, id=event_id)


def _run_chunk(run: Run) -> bytes:
    return format_sse_event(event="run", data_str=run.model_dump_json())
