"""Outside agents over HTTP, with OpenAI's own client, to the trajectories that come of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import odd_engines
import openai
import pytest
import pytest_asyncio
from served_app import address, serving
from turn_stack import LETTERS, TurnStack, turn_stack, until

from services.router.app import create_app
from shared.embedded.kafka import EmbeddedKafka
from shared.events import CONTEXT_VERSION, TrajectoryCompleted

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = "a-key"
SIX = [1, 2, 3, 4, 5, 6]
TEXT = "".join(LETTERS[i] for i in SIX)
LOGPROBS = [-0.1234567 * i for i in SIX]


@pytest_asyncio.fixture(loop_scope="module")
async def stack(
    _embedded_broker: EmbeddedKafka, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TurnStack]:
    async with turn_stack(_embedded_broker, redis_url, tmp_path_factory.mktemp("sessions")) as made:
        yield made


class Agent:
    """An outside agent: OpenAI's client, and plain HTTP for what is ours."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False, timeout=30
        )

    def openai(self, session: str, attempt: int | None = None) -> openai.AsyncOpenAI:
        part = "" if attempt is None else f"/attempts/{attempt}"
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/sessions/{session}{part}/v1",
            api_key=KEY,
            max_retries=0,
            http_client=httpx.AsyncClient(trust_env=False, timeout=30),
        )

    async def post(self, path: str, **body: object) -> dict[str, Any]:
        answer = await self.http.post(path, json=body)
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def refused(self, path: str, **body: object) -> tuple[int, dict[str, Any]]:
        # As JSON that is ASCII: it can say what UTF-8 cannot.
        answer = await self.http.post(path, content=json.dumps(body))
        return answer.status_code, answer.json()["error"]


@asynccontextmanager
async def agent(
    stack: TurnStack, *, engine: str = "instant", name: str = "r1", **router: object
) -> AsyncIterator[Agent]:
    """A router on a real port, and a worker and a reward service behind it."""
    async with (
        stack.serving("generation", f"g-{name}", generation={"engine": engine}),
        stack.serving("reward", f"s-{name}"),
        serving(create_app(_settings(stack, name, router))) as server,
    ):
        await stack.workers_of(f"g-{name}")
        one = Agent(address(server))
        async with one.http:
            yield one


def _settings(stack: TurnStack, name: str, router: dict[str, object]) -> Any:
    settings = stack.settings(name, router=router)
    return settings.model_copy(update={"api_keys": KEY})


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def chat(client: openai.AsyncOpenAI, messages: Sequence[Any], **more: Any) -> Any:
    return await client.chat.completions.create(
        model="toy", messages=list(messages), **{"max_tokens": 6, **more}
    )


def sampled(trajectory: TrajectoryCompleted) -> list[list[int]]:
    """The tokens of each turn, out of the flat arrays."""
    return [trajectory.token_ids[t.start : t.start + t.sampled] for t in trajectory.turns]


async def test_a_conversation_becomes_one_trajectory_of_exactly_what_was_sampled(stack: TurnStack) -> None:
    async with agent(stack) as one:
        opened = await one.post("/sessions", session_id="walk", policy="toy", task="lake", group_id="g/1")
        assert (opened["attempt"], opened["base_url"]) == (0, "/sessions/walk/v1")
        client = one.openai("walk")
        messages: list[Any] = [user("hello")]
        prompt = 0
        for turn in range(3):
            answer = await chat(client, messages, logprobs=True, extra_body={"return_token_ids": True})
            choice = answer.choices[0]
            assert (choice.message.content, choice.finish_reason) == (TEXT, "length")
            assert choice.model_extra["token_ids"] == SIX
            ids = answer.model_extra["prompt_token_ids"]
            assert len(ids) == answer.usage.prompt_tokens > prompt
            prompt = len(ids)
            assert [c.logprob for c in choice.logprobs.content] == pytest.approx(LOGPROBS)
            messages += [choice.message, user(f"and then {turn}?")]
        ended = await one.post("/sessions/walk/reward", reward=0.75, components={"style": 0.5})
        assert ended["trajectory_ids"] == ["g/1.0#0"]
        # The same again is fine, another reward is not.
        assert (await one.post("/sessions/walk/reward", reward=0.75, components={"style": 0.5})) == ended
        status, error = await one.refused("/sessions/walk/reward", reward=1)
        assert (status, error["code"]) == (409, "conflict")
        assert "0.75" in error["message"]
        with pytest.raises(openai.ConflictError):
            await chat(client, messages)
        (done,) = await stack.ended("g/1.0#0")
        assert (done.task, done.status, done.run_id) == ("lake", "finished", "sessions")
        assert sampled(done) == [SIX] * 3
        assert done.token_ids[: len(ids)] == ids
        assert sum(done.mask) == 18
        at = done.turns[1].start
        assert done.logprobs[at : at + 6] == pytest.approx(LOGPROBS)
        assert done.versions[at - 1 : at + 6] == [CONTEXT_VERSION, *[1] * 6]
        assert [m.role for m in done.messages] == ["user", "assistant"] * 3
        await until(lambda: "g/1.0#0" in stack.samples)
        assert (stack.samples["g/1.0#0"][0].reward, stack.samples["g/1.0#0"][0].components) == (
            0.75,
            {"style": 0.5},
        )


async def test_histories_that_part_become_trajectories_that_share_no_trained_token(stack: TurnStack) -> None:
    async with agent(stack) as one:
        client = one.openai("fork")
        # Opened by its first call.
        first = (await chat(client, [user("go")])).choices[0].message
        for way in ("left", "right"):
            await chat(client, [user("go"), first, user(way)])
        await chat(client, [user("another matter")])
        ended = await one.post("/sessions/fork/end", reward=1)
        ids = ended["trajectory_ids"]
        assert ids == [f"sessions/fork.0{branch}#0" for branch in ("", "b2", "b3")]
        main, right, other = await stack.ended(*ids)
        assert [sum(one.mask) for one in (main, right, other)] == [12, 6, 6]
        assert [len(one.turns) for one in (main, right, other)] == [2, 1, 1]
        assert right.token_ids[: main.turns[1].start - 20] == main.token_ids[: main.turns[1].start - 20]


async def test_completions_take_text_and_token_ids(stack: TurnStack) -> None:
    async with agent(stack) as one:
        client = one.openai("raw")
        more = {"model": "toy", "max_tokens": 6, "extra_body": {"return_token_ids": True}}
        text = await client.completions.create(prompt="abc", logprobs=1, **more)
        assert text.choices[0].text == TEXT
        assert text.choices[0].logprobs.token_logprobs == pytest.approx(LOGPROBS)
        ids = text.model_extra["prompt_token_ids"]
        longer = [*ids, *SIX, 7, 8]
        second = await client.completions.create(prompt=longer, **more)
        assert second.model_extra["prompt_token_ids"] == longer
        third = await client.completions.create(prompt="abc" + TEXT + "xy", **more)
        ended = await one.post("/sessions/raw/end")
        first, other = await stack.ended(*ended["trajectory_ids"])
        assert first.token_ids == [*longer, *SIX]
        assert other.token_ids[:9] == [*ids, *SIX]
        assert third.usage.prompt_tokens == 11
        await until(lambda: first.trajectory_id in stack.samples)
        sample = stack.samples[first.trajectory_id][0]
        assert (sample.reward, sample.reason) == (None, "not_applicable")


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_a_stream_tells_tokens_as_they_come_and_the_same_as_the_whole(
    kind: str, stack: TurnStack
) -> None:
    name = f"stream-{kind}"
    async with agent(stack, engine="odd_engines:Dripping", name=name) as one:
        client = one.openai(name)
        options = {"include_usage": True}
        extra = {"return_token_ids": True}
        chunks: list[Any] = []
        common: dict[str, Any] = {
            "model": "toy", "max_tokens": 90, "stream": True, "stream_options": options, "extra_body": extra,
        }  # fmt: skip
        if kind == "chat":
            stream: Any = await client.chat.completions.create(messages=[user("go")], **common)  # type: ignore[list-item]
        else:
            stream = await client.completions.create(prompt="go", **common)
        chunks += [chunk async for chunk in stream]
        told = [c.choices[0] for c in chunks if c.choices]
        texts = [(one.delta.content or "") if kind == "chat" else one.text for one in told]
        ids = [i for one in told for i in (one.model_extra.get("token_ids") or [])]
        assert len([text for text in texts if text]) > 2
        assert ids == [1 + i % 95 for i in range(90)]
        assert "".join(texts) == "".join(LETTERS[i] for i in ids)
        assert told[-1].finish_reason == "length"
        assert chunks[-1].usage.completion_tokens == 90
        assert chunks[0].model_extra["prompt_token_ids"]
        ended = await one.post(f"/sessions/{name}/reward", reward=1)
        (done,) = await stack.ended(*ended["trajectory_ids"])
        assert sampled(done) == [ids]


@pytest.mark.parametrize("stream", [False, True])
async def test_generation_ends_soon_after_its_client_has_left(stream: bool, stack: TurnStack) -> None:
    name = f"left-{stream}"
    odd_engines.Endless.aborted.clear()
    async with agent(stack, engine="odd_engines:Endless", name=name) as one:
        await one.post("/sessions", session_id=name, policy="toy")
        body = {"messages": [user("go")], "max_tokens": 50, "stream": stream}
        asking = asyncio.create_task(one.http.post(f"/sessions/{name}/v1/chat/completions", json=body))
        limit = time.monotonic() + 20
        while not any(worker.running + worker.waiting for worker in await stack.state.workers()):
            assert time.monotonic() < limit
            await asyncio.sleep(0.02)
        asking.cancel()
        left = time.monotonic()
        await until(lambda: odd_engines.Endless.aborted)
        assert time.monotonic() - left < 2.5
        found = (await one.http.get(f"/sessions/{name}")).json()
        assert (found["state"], found["turns"]) == ("open", [])


async def test_a_full_router_answers_429_and_takes_another_when_one_has_ended(stack: TurnStack) -> None:
    async with agent(stack, max_sessions=2) as one:
        for name in ("a", "b"):
            await one.post("/sessions", session_id=name, policy="toy")
        answer = await one.http.post("/sessions", json={"session_id": "c", "policy": "toy"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "capacity_reached")
        assert int(answer.headers["Retry-After"]) >= 1
        with pytest.raises(openai.RateLimitError):
            await chat(one.openai("c"), [user("go")])
        # Those that are open go on.
        assert (await chat(one.openai("a"), [user("go")])).choices[0].message.content == TEXT
        assert (await one.http.delete("/sessions/b")).json()["state"] == "ended"
        assert (await chat(one.openai("c"), [user("go")])).choices[0].message.content == TEXT
        for name in ("a", "c"):
            await one.http.delete(f"/sessions/{name}")


async def test_the_attempt_in_the_url_keeps_retries_apart(stack: TurnStack) -> None:
    async with agent(stack) as one:
        first, second = one.openai("again", 0), one.openai("again", 1)
        await chat(first, [user("go")])
        await chat(second, [user("go")])
        with pytest.raises(openai.ConflictError, match="replaced by"):
            await chat(first, [user("go")])
        status, error = await one.refused("/sessions/again/attempts/0/reward", reward=1)
        assert (status, "replaced by attempt 1" in error["message"]) == (409, True)
        await one.post("/sessions/again/attempts/1/reward", reward=1)
        old, new = await stack.ended("sessions/again.0#0", "sessions/again.0#1")
        assert (old.status, old.reason) == ("aborted", "replaced")
        assert (new.status, new.attempt, sum(new.mask)) == ("finished", 1, 6)


async def test_a_prompt_that_fills_the_window_is_refused_with_both_numbers(stack: TurnStack) -> None:
    async with agent(stack) as one:
        await one.post("/sessions", session_id="small", policy="toy", context_window=64)
        path = "/sessions/small/v1/completions"
        for length in (64, 65, 640):
            status, error = await one.refused(path, prompt=[1] * length)
            assert (status, error["code"]) == (422, "invalid")
            assert f"{length} tokens" in error["message"]
            assert "context window 64" in error["message"]
        last = await one.post(path, prompt=[1] * 63, max_tokens=5)
        assert (last["usage"]["completion_tokens"], last["choices"][0]["finish_reason"]) == (1, "length")
        await one.http.delete("/sessions/small")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    ({"messages": [user("x")], "n": 2}, "n:"),
    ({"messages": [user("x")], "temperature": -1}, "temperature"),
    ({"messages": [user("x")], "frequency_penalty": 1}, "frequency_penalty"),
    ({"messages": [user("x")], "stop": ["two tokens"]}, "stop"),
    ({"messages": [user("x")], "response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [user("\ud800")]}, "Invalid JSON"),
]


async def test_a_call_that_cannot_be_served_is_refused_by_name(stack: TurnStack) -> None:
    async with agent(stack) as one:
        for body, named in REFUSED:
            status, error = await one.refused("/sessions/odd/v1/chat/completions", model="toy", **body)
            assert (status, error["code"]) == (422, "invalid")
            assert named in error["message"]


async def test_who_has_no_key_or_names_nothing_that_exists_is_told_so(stack: TurnStack) -> None:
    async with agent(stack) as one:
        bare = await one.http.post("/sessions", json={}, headers={"Authorization": ""})
        assert bare.status_code == 401
        assert (await one.refused("/sessions", policy="nobody"))[0] == 404
        assert (await one.refused("/sessions/none/reward", reward=1))[0] == 404
        assert (await one.refused("/sessions/none/v1/chat/completions", messages=[user("x")]))[0] == 404
        assert (await one.refused("/sessions/in valid/end"))[0] == 422
        assert (await one.refused("/sessions", policy="toy", session_id="../x"))[0] == 422


async def test_what_nobody_touches_is_ended_and_what_a_router_left_half_ended_is_finished(
    stack: TurnStack,
) -> None:
    async with agent(stack, session_idle_s=0.3) as one:
        await chat(one.openai("idle"), [user("go")])
        await until(lambda: "sessions/idle.0#0" in stack.trajectories)
        (done,) = await stack.ended("sessions/idle.0#0")
        assert (done.status, done.reason, sum(done.mask)) == ("aborted", "idle", 6)


async def test_a_session_goes_on_at_another_router(stack: TurnStack) -> None:
    async with agent(stack) as one, serving(create_app(_settings(stack, "r2", {}))) as server:
        two = Agent(address(server))
        async with two.http:
            answer = (await chat(one.openai("both"), [user("go")])).choices[0].message
            await chat(two.openai("both"), [user("go"), answer, user("on")])
            ended = await two.post("/sessions/both/reward", reward=1)
            (done,) = await stack.ended(*ended["trajectory_ids"])
            assert sampled(done) == [SIX, SIX]
