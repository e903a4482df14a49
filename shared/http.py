"""The gateway's client. Used by the command line, the bench and tests.

Retries live here: a request that did not get through, or was answered 429, 502, 503 or 504, is sent again
with growing pauses (or after the server's `Retry-After`), where a repeat does no harm: reads, and creations
under an Idempotency-Key, which this client sends with every creation. Error bodies become the errors that the
server raised.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote

import httpx
import structlog
from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import from_json

from shared.api import (
    TERMINAL,
    Run,
    RunDetail,
    RunList,
    RunRequest,
    Task,
    TaskRequest,
    TrajectoryList,
    WorkerList,
)
from shared.errors import Internal, Problem, RollArtError, Unavailable, from_problem
from shared.events import TrajectoryScored
from shared.summary import Summary

M = TypeVar("M", bound=BaseModel)
log = structlog.get_logger()
_RETRYABLE = {429, 502, 503, 504}
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_SILENCE_S = 30.0
"""An event stream sends at least a comment every ten seconds."""


@dataclass(frozen=True)
class RunEvent:
    """One event of a run: a line of its `metrics.jsonl`, or `run`."""

    kind: str
    """`step`, `phase`, `warm_start`, `evaluation` or `run`."""
    event_id: str
    """Empty for `run`."""
    data: dict[str, JsonValue]

    @property
    def run(self) -> Run | None:
        """The run as it was then, of a `run` event."""
        return Run.model_validate(self.data) if self.kind == "run" else None


class ApiClient:
    """Speaks to one gateway. Methods raise the server's own errors, and Unavailable when it stays away."""

    def __init__(
        self,
        url: str,
        key: str,
        *,
        attempts: int = 6,
        timeout_s: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._attempts = attempts
        try:
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers={"Authorization": f"Bearer {key}"},
                timeout=timeout_s,
                transport=transport,
                trust_env=False,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise Unavailable(f"{url!r} is no address of a gateway: {error}") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def submit_run(
        self, recipe: str | dict[str, JsonValue], *, idempotency_key: str | None = None
    ) -> RunDetail:
        """Queue a run. Raises Invalid naming each wrong key below `recipe.`"""
        return await self._create("/v1/runs", RunRequest(recipe=recipe), RunDetail, idempotency_key)

    async def runs(self, *, limit: int = 100) -> list[Run]:
        """Newest first."""
        return _parse(await self._get("/v1/runs", limit=limit), RunList).runs

    async def run(self, run_id: str) -> RunDetail:
        """One run."""
        return _parse(await self._get(f"/v1/runs/{quote(run_id, safe='')}"), RunDetail)

    async def cancel_run(self, run_id: str) -> RunDetail:
        """Raises Conflict when it has ended already."""
        response = await self._request("POST", f"/v1/runs/{quote(run_id, safe='')}/cancel", repeatable=False)
        return _parse(response, RunDetail)

    async def summary(self, run_id: str) -> Summary:
        """Raises NotFound until the run has ended."""
        return _parse(await self._get(f"/v1/runs/{quote(run_id, safe='')}/summary"), Summary)

    async def submit_task(self, task: TaskRequest, *, idempotency_key: str | None = None) -> Task:
        """Roll out given seeds."""
        return await self._create("/v1/tasks", task, Task, idempotency_key)

    async def task(self, task_id: str, *, wait_s: float = 0.0) -> Task:
        """How far a task is; the server waits up to `wait_s` for its end."""
        return _parse(await self._get(f"/v1/tasks/{quote(task_id, safe='')}", wait_s=wait_s), Task)

    async def trajectory(self, trajectory_id: str) -> TrajectoryScored:
        """One trajectory with its reward."""
        response = await self._get(f"/v1/trajectories/{quote(trajectory_id, safe='/')}")
        return _parse(response, TrajectoryScored)

    async def trajectories(self, run_id: str, *, task: str | None = None, limit: int = 50) -> TrajectoryList:
        """The newest of a run."""
        path = f"/v1/runs/{quote(run_id, safe='')}/trajectories"
        query: dict[str, str | int | float] = {"limit": limit}
        if task:
            query["task"] = task
        return _parse(await self._get(path, **query), TrajectoryList)

    async def workers(self) -> WorkerList:
        """Live generation workers."""
        return _parse(await self._get("/v1/workers"), WorkerList)

    async def events(self, run_id: str, *, after: str = "") -> AsyncIterator[RunEvent]:
        """Every event of a run until it has ended, across lost connections; each numbered one once.

        Raises Unavailable when the gateway stays away.
        """
        failures = 0
        path = f"/v1/runs/{quote(run_id, safe='')}/events"
        while True:
            headers = {"Last-Event-ID": after} if after else {}
            try:
                timeout = httpx.Timeout(10.0, read=_SILENCE_S)
                async with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
                    if response.status_code != httpx.codes.OK:
                        await response.aread()
                        raise _error(response)
                    async for event in _parse_stream(response):
                        failures = 0
                        after = event.event_id or after
                        yield event
                        if event.run is not None and event.run.state in TERMINAL:
                            return
                # The server ended the stream without saying that the run did: it is being stopped.
                fault: Exception = Unavailable(f"{self.url} ended the event stream")
            except httpx.TransportError as error:
                fault = error
            except RollArtError as error:
                if not error.retryable:
                    raise
                fault = error
            failures += 1
            if failures >= self._attempts:
                raise self._away(fault) from fault
            log.debug("event stream interrupted", error=str(fault), failures=failures)
            await asyncio.sleep(_pause(failures, None))

    async def _create(self, path: str, body: BaseModel, answer: type[M], key: str | None) -> M:
        headers = {"Idempotency-Key": key or uuid.uuid4().hex, "Content-Type": "application/json"}
        content = body.model_dump_json(exclude_unset=True).encode()
        return _parse(await self._request("POST", path, content=content, headers=headers), answer)

    async def _get(self, path: str, **query: str | int | float) -> httpx.Response:
        return await self._request("GET", path, params=query)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str | int | float] | None = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = True,
    ) -> httpx.Response:
        attempt = 0
        while True:
            attempt += 1
            retry_after: str | None = None
            try:
                response = await self._http.request(
                    method, path, params=params or {}, content=content, headers=headers
                )
                if response.is_success:
                    return response
                fault: Exception = _error(response)
                retry_after = response.headers.get("Retry-After")
                again = repeatable and response.status_code in _RETRYABLE
            except httpx.ConnectError as error:
                fault, again = error, True
            except httpx.TransportError as error:
                fault, again = error, repeatable
            except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
                raise self._away(error) from error
            if not again or attempt >= self._attempts:
                if isinstance(fault, RollArtError):
                    raise fault
                raise self._away(fault) from fault
            await asyncio.sleep(_pause(attempt, retry_after))

    def _away(self, fault: Exception) -> Unavailable:
        reason = str(fault) or type(fault).__name__
        return Unavailable(f"no gateway answers at {self.url}: {reason}")


def _pause(attempt: int, retry_after: str | None) -> float:
    """Seconds before the next attempt."""
    grown = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * float(2**attempt)) * random.uniform(0.5, 1.0)
    try:
        asked = float(retry_after) if retry_after is not None else 0.0
    except ValueError:
        asked = 0.0
    return max(grown, min(asked, _LONGEST_PAUSE_S))


def _error(response: httpx.Response) -> RollArtError:
    try:
        return from_problem(Problem.model_validate_json(response.content))
    except ValidationError:
        text = response.text[:200] or response.reason_phrase
        kind = Unavailable if response.status_code in _RETRYABLE else Internal
        return kind(f"{response.request.url} answered {response.status_code}: {text}")


def _parse(response: httpx.Response, model: type[M]) -> M:
    try:
        return model.model_validate_json(response.content)
    except ValidationError as error:
        raise Internal(
            f"{response.request.url} sent no {model.__name__}: {error.errors()[0]['msg']}"
        ) from error


async def _parse_stream(response: httpx.Response) -> AsyncIterator[RunEvent]:
    """Events of a server-sent stream; comments and `retry` are left out, an event cut short too."""
    fields: dict[str, list[str]] = {}
    async for line in _lines(response):
        if line:
            name, _, value = line.partition(":")
            fields.setdefault(name, []).append(value.removeprefix(" "))
            continue
        if "data" in fields:
            data = from_json("\n".join(fields["data"]))
            event_id = fields.get("id", [""])[-1]
            yield RunEvent(kind=fields.get("event", ["message"])[-1], event_id=event_id, data=data)
        fields = {}


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Lines ended by a newline alone: a JSON text may hold other line separators of Unicode."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace")
