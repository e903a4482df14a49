"""The endpoints of outside agents. `docs/sessions.md` shows how they are used.

Each is there twice: for the present attempt at a session, and for one that the URL names. A client that
retries an episode names the next attempt; what still comes of the one before is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Path, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import JsonValue

from services.router.serving import Serving, serving
from services.router.sessions import answers
from services.router.sessions.bodies import (
    ChatRequest,
    CompletionRequest,
    EndSession,
    OpenSession,
    PostReward,
    parse,
)
from services.router.sessions.talk import Call, Sessions
from services.router.sessions.tree import Tree, Turn
from shared.errors import Conflict, RollArtError
from shared.events import TrajectoryStatus, TurnProgressed
from shared.service import read_json_body
from shared.state import SessionOutcome, SessionRecord

ROUTER = APIRouter(tags=["sessions"])
At = Annotated[Serving, Depends(serving)]
SessionPath = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
AttemptPath = Annotated[int, Path(ge=0, le=1_000_000)]
_S = "/sessions/{session_id}"
_A = "/sessions/{session_id}/attempts/{attempt}"
T = TypeVar("T")


@ROUTER.post("/sessions", status_code=201, summary="Open a session")
async def open_session(request: Request, at: At) -> dict[str, JsonValue]:
    """Body: `OpenSession`. One that is open already under this attempt is given as it is."""
    wanted = parse(OpenSession, await read_json_body(request))
    return _told(await at.sessions.open(wanted))


@ROUTER.get(_S, summary="A session, its turns and what it has become")
async def get_session(session_id: SessionPath, at: At) -> dict[str, JsonValue]:
    """Of the present attempt."""
    record, tree = await at.sessions.find(session_id)
    return _told(record) | {"turns": _turns(tree)}


@ROUTER.post(_S + "/reward", summary="Post the reward: the session becomes a trajectory")
async def reward(session_id: SessionPath, request: Request, at: At) -> dict[str, JsonValue]:
    """Body: `PostReward`."""
    return await _reward(at.sessions, session_id, None, request)


@ROUTER.post(_A + "/reward", summary="Post the reward of an attempt")
async def reward_attempt(
    session_id: SessionPath, attempt: AttemptPath, request: Request, at: At
) -> dict[str, JsonValue]:
    """Body: `PostReward`."""
    return await _reward(at.sessions, session_id, attempt, request)


@ROUTER.post(_S + "/end", summary="End a session, with or without a reward")
async def end(session_id: SessionPath, request: Request, at: At) -> dict[str, JsonValue]:
    """Body: `EndSession`."""
    return await _end(at.sessions, session_id, None, request)


@ROUTER.post(_A + "/end", summary="End an attempt")
async def end_attempt(
    session_id: SessionPath, attempt: AttemptPath, request: Request, at: At
) -> dict[str, JsonValue]:
    """Body: `EndSession`."""
    return await _end(at.sessions, session_id, attempt, request)


@ROUTER.delete(_S, summary="Give a session up: its trajectory is aborted")
async def delete(session_id: SessionPath, at: At) -> dict[str, JsonValue]:
    """What is being sampled for it is aborted too."""
    outcome = SessionOutcome(status=TrajectoryStatus.ABORTED, reason="cancelled")
    return _told(await at.sessions.end(session_id, None, outcome))


@ROUTER.get(_S + "/v1/models", summary="The policy of a session")
async def models(session_id: SessionPath, at: At) -> dict[str, JsonValue]:
    """In OpenAI's form."""
    record, _ = await at.sessions.find(session_id)
    model: JsonValue = {
        "id": record.policy,
        "object": "model",
        "created": int(record.created_at),
        "owned_by": "rollart",
    }
    return {"object": "list", "data": [model]}


@ROUTER.get(_A + "/v1/models", summary="The policy of a session")
async def models_of_attempt(session_id: SessionPath, attempt: AttemptPath, at: At) -> dict[str, JsonValue]:
    """In OpenAI's form."""
    return await models(session_id, at)


@ROUTER.post(_S + "/v1/chat/completions", response_model=None, summary="OpenAI chat completions")
async def chat(session_id: SessionPath, request: Request, at: At) -> Response:
    """Body: `ChatRequest`."""
    return await _call(at.sessions, session_id, None, request, ChatRequest)


@ROUTER.post(_A + "/v1/chat/completions", response_model=None, summary="The same in an attempt")
async def chat_in_attempt(
    session_id: SessionPath, attempt: AttemptPath, request: Request, at: At
) -> Response:
    """Body: `ChatRequest`."""
    return await _call(at.sessions, session_id, attempt, request, ChatRequest)


@ROUTER.post(_S + "/v1/completions", response_model=None, summary="OpenAI completions")
async def completions(session_id: SessionPath, request: Request, at: At) -> Response:
    """Body: `CompletionRequest`."""
    return await _call(at.sessions, session_id, None, request, CompletionRequest)


@ROUTER.post(_A + "/v1/completions", response_model=None, summary="The same in an attempt")
async def completions_in_attempt(
    session_id: SessionPath, attempt: AttemptPath, request: Request, at: At
) -> Response:
    """Body: `CompletionRequest`."""
    return await _call(at.sessions, session_id, attempt, request, CompletionRequest)


async def _reward(
    sessions: Sessions, session_id: str, attempt: int | None, request: Request
) -> dict[str, JsonValue]:
    posted = parse(PostReward, await read_json_body(request))
    outcome = SessionOutcome(
        status=TrajectoryStatus.FINISHED, reward=posted.reward, components=posted.components
    )
    return _told(await sessions.end(session_id, attempt, outcome))


async def _end(
    sessions: Sessions, session_id: str, attempt: int | None, request: Request
) -> dict[str, JsonValue]:
    wanted = parse(EndSession, await read_json_body(request))
    outcome = SessionOutcome(
        status=TrajectoryStatus(wanted.status), reason=wanted.reason, reward=wanted.reward
    )
    return _told(await sessions.end(session_id, attempt, outcome))


async def _call(
    sessions: Sessions,
    session_id: str,
    attempt: int | None,
    request: Request,
    kind: type[ChatRequest] | type[CompletionRequest],
) -> Response:
    """One call, whole or streamed. A client that leaves takes its sampling along."""
    wanted = parse(kind, await read_json_body(request))
    call = await sessions.place(session_id, attempt, wanted)
    if not wanted.stream:
        turn = await _while_there(request, asyncio.ensure_future(sessions.ask(call)))
        return JSONResponse(answers.completion(wanted, call, turn))
    stream = _Stream(sessions, call, answers.Chunks(wanted, call))
    # What goes wrong before the first token is an error response like any other.
    await _while_there(request, asyncio.ensure_future(stream.begin()), keep=stream.task)
    return StreamingResponse(stream.events(request), media_type="text/event-stream")


class _Stream:
    """A call whose tokens are told as they come."""

    def __init__(self, sessions: Sessions, call: Call, chunks: answers.Chunks) -> None:
        self._chunks = chunks
        self._news: list[TurnProgressed] = []
        self._changed = asyncio.Event()
        self.task = asyncio.ensure_future(sessions.ask(call, self._heard))
        self.task.add_done_callback(lambda _: self._changed.set())

    def _heard(self, news: TurnProgressed) -> None:
        self._news.append(news)
        self._changed.set()

    async def begin(self) -> None:
        """Return with the first tokens or the end. Raises what the call raises."""
        await self._changed.wait()
        if self.task.done():
            self.task.result()

    async def events(self, request: Request) -> AsyncIterator[str]:
        """Server-sent events to the end, or until the client leaves."""
        left = asyncio.ensure_future(_left(request))
        left.add_done_callback(lambda _: self._changed.set())
        try:
            for event in self._chunks.opening():
                yield event
            while not left.done():
                self._changed.clear()
                done = self.task.done()
                news, self._news = self._news, []
                for one in news:
                    for event in self._progress(one):
                        yield event
                if done:
                    break
                await self._changed.wait()
            else:
                return
            for event in self._end():
                yield event
        finally:
            left.cancel()
            self.task.cancel()

    def _progress(self, news: TurnProgressed) -> list[str]:
        at = len(self._chunks.token_ids)
        if news.start > at:
            return []  # some were lost; the end brings all
        return self._chunks.tokens(news.token_ids[at - news.start :], news.logprobs[at - news.start :])

    def _end(self) -> list[str]:
        try:
            turn: Turn = self.task.result()
        except RollArtError as error:
            return [answers.failure(error)]
        told = self._chunks.token_ids
        if turn.token_ids[: len(told)] != told:
            # Its worker was lost, and another one drew other tokens: those are what the session holds.
            message = "the worker was lost midway and the answer began anew: ask again without stream"
            return [answers.failure(Conflict(message))]
        return self._chunks.closing(turn)


async def _while_there(
    request: Request, work: asyncio.Future[T], *, keep: asyncio.Future[Turn] | None = None
) -> T:
    """Wait for work for as long as its client does: where that leaves, raises Conflict, which nobody reads.
    `keep` is what else is cancelled then, or where the work fails."""
    left = asyncio.ensure_future(_left(request))
    left.add_done_callback(lambda _: work.cancel())
    try:
        return await work
    except BaseException as error:
        if keep is not None:
            keep.cancel()
        if left.done() and isinstance(error, asyncio.CancelledError):
            raise Conflict("the client has left") from None
        raise
    finally:
        left.cancel()
        work.cancel()


async def _left(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _told(record: SessionRecord) -> dict[str, JsonValue]:
    """A session as its caller sees it."""
    path = f"/sessions/{record.session_id}"
    found: dict[str, JsonValue] = record.model_dump(mode="json")
    return found | {
        "base_url": f"{path}/v1",
        "attempt_base_url": f"{path}/attempts/{record.attempt}/v1",
    }


def _turns(tree: Tree) -> list[JsonValue]:
    return [turn.model_dump(mode="json", exclude={"key"}) for _, turn in sorted(tree.turns.items())]
