"""The front door takes what is right once, names what is wrong, and lets go of who leaves."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
import pytest_asyncio
import uvicorn
from fastapi import FastAPI

from services.gateway import app as gateway_app
from services.gateway import service as gateway_service
from shared import topics
from shared.api import TaskRequest
from shared.archive import TrajectoryArchive
from shared.bus import Bus, Delivery
from shared.embedded.kafka import EmbeddedKafka
from shared.embedded.redis import EmbeddedRedis
from shared.errors import Conflict, Invalid, NotFound
from shared.events import PolicyPublished, RolloutRequested, TrajectoryCompleted, TrajectoryScored
from shared.http import ApiClient, RunEvent
from shared.service import Context
from shared.settings import KafkaSettings, RedisSettings, Settings
from shared.state import WorkerRecord

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = "a-key"
RECIPE = {
    "name": "lake",
    "tasks": {"lake": {"environment": "frozenlake", "max_turns": 9}},
    "training": {"steps": 7},
}


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    kafka = KafkaSettings(partitions=2, reply_partitions=2)
    with EmbeddedKafka(topics.plan(kafka), prefix=kafka.prefix, session_timeout_s=1.0) as broker:
        yield broker.bootstrap


class Served:
    """A gateway on a real port, and the doors to what is behind it."""

    def __init__(self, app: FastAPI, server: uvicorn.Server) -> None:
        self.app, self.server = app, server
        port = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.raw = httpx.AsyncClient(
            base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False
        )
        self.client = ApiClient(self.url, KEY)

    @property
    def context(self) -> Context:
        context = self.app.state.context
        assert isinstance(context, Context)
        return context


@asynccontextmanager
async def serve(settings: Settings) -> AsyncIterator[Served]:
    app = gateway_app.create_app(settings)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="on", http="h11"))
    server.capture_signals = _no_signals  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(server.serve())
    while not server.started:
        assert not task.done(), "the gateway did not start"
        await asyncio.sleep(0.01)
    served = Served(app, server)
    try:
        async with served.raw, served.client:
            yield served
    finally:
        app.state.supervisor.drain()
        server.should_exit = True
        await task


class _no_signals:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def settings_of(folder: Path, redis_url: str, bootstrap: str) -> Settings:
    return Settings(
        ROLLART_STATE_DIR=folder / "state",
        ROLLART_RUNS_DIR=folder / "runs",
        ROLLART_API_KEYS=KEY,
        kafka=KafkaSettings(bootstrap=bootstrap, partitions=2, reply_partitions=2, fetch_wait_ms=5),
        redis=RedisSettings(url=redis_url, prefix=f"{folder.name}:"),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    redis_url: str, bootstrap: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    async with serve(settings_of(tmp_path_factory.mktemp("gateway"), redis_url, bootstrap)) as it:
        yield it


async def post(served: Served, path: str, body: object, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await served.raw.post(path, content=content, headers=headers)


def fields(response: httpx.Response) -> list[str]:
    assert response.status_code == 422, response.text
    return [item["field"] for item in response.json()["error"]["fields"]]


async def publish_policy(served: Served, name: str, version: int) -> None:
    state = served.context.state
    assert await state.acquire_lease(f"trainer:{name}", "me", ttl_s=60)
    record = PolicyPublished(
        policy=name, version=version, step=version, uri="weights", digest="0", published_at=1.0
    )
    await state.publish_policy(record, model_uri="model", lease=f"trainer:{name}", owner="me")


def scored(request: RolloutRequested, reward: float | None, reason: str = "") -> TrajectoryScored:
    return TrajectoryScored(
        trajectory=TrajectoryCompleted(
            run_id=request.run_id, trajectory_id=request.trajectory_id, group_id=request.group_id,
            member=request.member, attempt=0, task=request.task, purpose=request.purpose, split=request.split,
            seed=request.seed, policy=request.policy, status="finished" if reward is not None else "failed",
            started_at=1.0, completed_at=2.0,
        ),
        reward=reward, reason=reason, scored_at=3.0,
    )  # fmt: skip


async def test_a_run_is_queued_listed_and_shown_with_its_recipe(served: Served) -> None:
    response = await post(served, "/v1/runs", {"recipe": RECIPE})
    assert response.status_code == 201, response.text
    made = response.json()
    assert made["run_id"].startswith("lake-")
    assert made["state"] == "queued"
    assert made["steps"] == 7
    assert response.headers["Location"] == f"/v1/runs/{made['run_id']}"
    assert made["recipe"]["rollout"]["max_staleness"] == 1
    queued = await served.context.state.oldest_run(frozenset({"queued"}))
    assert queued is not None
    assert queued.run_id == made["run_id"]
    assert (await served.client.runs(limit=1))[0].run_id == made["run_id"]
    assert (await served.client.run(made["run_id"])).recipe == made["recipe"]
    with pytest.raises(NotFound, match="no summary"):
        await served.client.summary(made["run_id"])


async def test_a_recipe_by_name_is_found_and_an_unknown_one_is_told_the_known(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    text = '[tasks.lake]\nenvironment = "frozenlake"\n'
    (tmp_path / "recipes" / "mine.toml").write_text('name = "mine"\n' + text)
    monkeypatch.chdir(tmp_path)
    assert (await served.client.submit_run("mine")).run_id.startswith("mine-")
    for name in ("nein", "../etc/passwd", "", "mine.toml"):
        response = await post(served, "/v1/runs", {"recipe": name})
        assert fields(response) == ["recipe"]
        assert "mine" in response.json()["error"]["message"]


def _with(path: str, value: str) -> bytes:
    """The recipe with raw JSON text at a dotted path."""
    marked: dict[str, object] = json.loads(json.dumps(RECIPE))
    inner: dict[str, object] = marked
    *parents, last = path.split(".")
    for parent in parents:
        inner = inner.setdefault(parent, {})  # type: ignore[assignment]
    inner[last] = "@@"
    return json.dumps({"recipe": marked}).replace('"@@"', value).encode()


BAD = [
    (_with("training.learning_rat", "5e-5"), "recipe.training.learning_rat"),
    (_with("learning_rate", "5e-5"), "recipe.learning_rate"),
    (_with("rollout.learning_rate", "5e-5"), "recipe.rollout.learning_rate"),
    *((_with("training.learning_rate", v), "recipe.training.learning_rate")
      for v in ('"NaN"', "-1", "0", "1e308", "true", '""', "null", "[]", "1" + "0" * 30)),
    *((_with("training.steps", v), "recipe.training.steps") for v in ("1.5", "0", '"3"', "false", "1" + "0" * 30)),
    *((_with("training.learning_rate", v), "(body)")
      for v in ("NaN", "Infinity", "-Infinity", "1e999", "1" * 5000, "01")),
    (_with("name", r'"\ud800"'), "recipe.name"),
    (_with("model", r'"a\u0000b"'), "recipe.model"),
    (_with("model", r'"\udfff"'), "recipe.model"),
    (_with("model", '""'), "recipe.model"),
    (_with("tasks.lake.config.size", r'"\ud800"'), "recipe.tasks.lake.config.size"),
    (_with("tasks.lake.config.size", "NaN"), "(body)"),
    (_with("tasks.lake.config.sise", "4"), "recipe.tasks.lake.config.sise"),
    (_with("tasks.lake.environment", '"frozenlak"'), "recipe.tasks.lake.environment"),
    (_with("tasks.lake.environment", '"no.such:Thing"'), "recipe.tasks.lake.environment"),
    (_with("tasks.lake.reward", '"nope"'), "recipe.tasks.lake.reward"),
    (_with("training.algorithm", '"nope"'), "recipe.training.algorithm"),
    (b'{"recipe": {}, "recipe": {}}', "recipe"),
    (b'{"recipe": {}, "extra": 1}', "extra"),
    (b'{"recipe": 1}', "recipe.str"),
    (b"{}", "recipe"),
    (b"[]", "(body)"),
    (b"", "(body)"),
    (b"\xff\xfe", "(body)"),
    (b'{"recipe": "\xed\xa0\x80"}', "(body)"),
    (b'{"recipe": ' + b"[" * 100_000, "(body)"),
    (b'{"recipe": ' + b'{"a":' * 500 + b"1" + b"}" * 501, "recipe"),
]  # fmt: skip


async def test_each_wrong_input_is_refused_by_name_and_nothing_is_stored(served: Served) -> None:
    before = await served.client.runs()
    for body, field in BAD:
        response = await post(served, "/v1/runs", body)
        assert field in fields(response), (body[:200], response.text)
    big = await post(served, "/v1/runs", b'{"recipe": "' + "😀".encode() * 1_250_000 + b'"}')
    assert big.status_code == 422
    assert await served.client.runs() == before


async def test_text_of_any_script_is_kept_unchanged(served: Served) -> None:
    name = "/models/😀‮ Zürich"
    made = await served.client.submit_run(RECIPE | {"model": name})
    assert (await served.client.run(made.run_id)).recipe["model"] == name


async def test_no_key_or_a_wrong_one_opens_nothing_but_health(served: Served) -> None:
    for given in ({}, {"Authorization": "Bearer nope"}, {"Authorization": f"Basic {KEY}"}):
        async with httpx.AsyncClient(base_url=served.url, headers=given, trust_env=False) as stranger:
            for path in ("/v1/runs", "/v1/runs/x/events", "/v1/workers", "/v1/tasks/x", "/v1/trajectories/x"):
                response = await stranger.get(path)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "unauthorized"
            assert (await stranger.get("/healthz")).status_code == 200


async def test_one_key_makes_one_run_however_often_it_is_sent(served: Served) -> None:
    before = len(await served.client.runs())
    sent = [post(served, "/v1/runs", {"recipe": RECIPE}, **{"Idempotency-Key": "k"}) for _ in range(8)]
    responses = await asyncio.gather(*sent)
    assert sorted(r.status_code for r in responses) == [200] * 7 + [201]
    assert len({r.json()["run_id"] for r in responses}) == 1
    assert len(await served.client.runs()) == before + 1
    other = await post(served, "/v1/runs", {"recipe": RECIPE | {"seed": 1}}, **{"Idempotency-Key": "k"})
    assert other.status_code == 409
    same_key_elsewhere = await post(
        served, "/v1/tasks", {"environment": "frozenlake", "actor": "scripted", "seeds": [1]},
        **{"Idempotency-Key": "k"},
    )  # fmt: skip
    assert same_key_elsewhere.status_code == 409
    assert (await post(served, "/v1/runs", {"recipe": RECIPE})).status_code == 201
    assert (await post(served, "/v1/runs", {"recipe": RECIPE}, **{"Idempotency-Key": ""})).status_code == 422


async def test_a_run_whose_maker_died_is_made_by_the_next_request(served: Served) -> None:
    body = json.dumps({"recipe": RECIPE}).encode()
    state = served.context.state
    assert await state.claim_idempotency("dead", b"POST /v1/runs\n" + body, "lake-dead00") == "lake-dead00"
    response = await post(served, "/v1/runs", body, **{"Idempotency-Key": "dead"})
    assert response.status_code == 201
    assert response.json()["run_id"] == "lake-dead00"


async def test_a_full_disk_refuses_runs_and_names_the_folder(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await served.client.runs()
    monkeypatch.setattr(gateway_service, "MIN_FREE_BYTES", 1 << 60)
    response = await post(served, "/v1/runs", {"recipe": RECIPE})
    assert response.status_code == 507
    assert "ROLLART_RUNS_DIR" in response.json()["error"]["message"]
    assert await served.client.runs() == before


async def test_cancelling_ends_a_queued_run_marks_a_running_one_and_refuses_an_ended_one(
    served: Served,
) -> None:
    state = served.context.state
    queued = await served.client.submit_run(RECIPE)
    assert (await served.client.cancel_run(queued.run_id)).state == "cancelled"
    with pytest.raises(Conflict, match="cancelled already"):
        await served.client.cancel_run(queued.run_id)
    running = await served.client.submit_run(RECIPE)
    await state.update_run(running.run_id, state="running")
    assert (await served.client.cancel_run(running.run_id)).state == "running"
    assert await state.aborted([running.run_id]) == {running.run_id: "cancelled"}
    with pytest.raises(NotFound):
        await served.client.cancel_run("nope-000000")


async def _collect(client: ApiClient, run_id: str, into: list[RunEvent], *, after: str = "") -> None:
    async for event in client.events(run_id, after=after):
        into.append(event)


async def _until(condition: object, timeout_s: float = 10.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, "the condition did not come true"
        await asyncio.sleep(0.01)


async def test_events_come_in_order_resume_without_repeats_and_end_with_the_run(served: Served) -> None:
    state = served.context.state
    run_id = (await served.client.submit_run(RECIPE)).run_id
    for step in (1, 2):
        await state.append_run_event(run_id, json.dumps({"kind": "step", "step": step, "text": "a\u2028b"}))
    seen: list[RunEvent] = []
    following = asyncio.create_task(_collect(served.client, run_id, seen))
    await _until(lambda: sum(e.kind == "step" for e in seen) == 2)
    await state.update_run(run_id, state="running", phase="train", step=2)
    await _until(lambda: any(e.run is not None and e.run.phase == "train" for e in seen))
    await state.append_run_event(run_id, json.dumps({"kind": "phase", "phase": "train"}))
    await state.append_run_event(run_id, json.dumps({"kind": "step", "step": 3}))
    await state.update_run(run_id, state="finished", step=3)
    await asyncio.wait_for(following, 10)
    lines = [(e.kind, e.data.get("step")) for e in seen if e.kind != "run"]
    assert lines == [("step", 1), ("step", 2), ("phase", None), ("step", 3)]
    assert seen[0].kind == "run"
    assert seen[-1].run is not None
    assert seen[-1].run.state == "finished"
    assert next(e for e in seen if e.kind == "step").data["text"] == "a\u2028b"

    resumed: list[RunEvent] = []
    second = [e for e in seen if e.kind == "step"][1]
    await _collect(served.client, run_id, resumed, after=second.event_id)
    assert [e.kind for e in resumed] == ["phase", "step", "run"]
    bad = await served.raw.get(f"/v1/runs/{run_id}/events", headers={"Last-Event-ID": 'x"y'})
    assert fields(bad) == ["Last-Event-ID"]
    with pytest.raises(NotFound):
        await _collect(served.client, "nope-000000", [])


async def test_a_client_that_leaves_frees_its_stream_and_shutdown_waits_for_none(
    redis_url: str, bootstrap: str, tmp_path: Path
) -> None:
    ended: list[bool] = []

    def streams() -> int:
        return sum("_next.<locals>.read" in repr(task.get_coro()) for task in asyncio.all_tasks())

    async with serve(settings_of(tmp_path, redis_url, bootstrap)) as served:
        run_id = (await served.client.submit_run(RECIPE)).run_id
        leaver = asyncio.create_task(_collect(served.client, run_id, []))
        await _until(lambda: streams() == 1)
        leaver.cancel()
        await _until(lambda: streams() == 0)

        async def hold() -> None:
            async with served.raw.stream("GET", f"/v1/runs/{run_id}/events", timeout=30) as response:
                async for _ in response.aiter_bytes():
                    pass
                ended.append(True)

        holder = asyncio.create_task(hold())
        await _until(lambda: streams() == 1)
        served.app.state.supervisor.drain()
        await asyncio.wait_for(holder, 5)
    assert ended == [True]
    assert streams() == 0


async def test_a_task_is_rolled_out_recorded_and_never_mixed_with_training(served: Served) -> None:
    run_id = (await served.client.submit_run(RECIPE)).run_id
    await publish_policy(served, run_id, 3)
    requests: list[Delivery] = []
    bus: Bus = served.context.bus
    bus.subscribe([topics.ROLLOUTS], group=f"environment-{run_id}", handler=requests.extend)
    body = {"task": "lake", "seeds": [5, 9], "members": 2, "temperature": 0, "policy": f"{run_id}@3"}
    task = await served.client.submit_task(TaskRequest.model_validate(body), idempotency_key="once")
    again = await served.client.submit_task(TaskRequest.model_validate(body), idempotency_key="once")
    assert again.task_id == task.task_id

    def mine() -> list[Delivery]:
        return [d for d in requests if getattr(d.event, "run_id", "") == task.task_id]

    await _until(lambda: len(mine()) == 4)
    asked = [d.event for d in mine() if isinstance(d.event, RolloutRequested)]
    assert {r.trajectory_id for r in asked} == {f"{task.task_id}/{s}.{m}#0" for s in (5, 9) for m in (0, 1)}
    assert {r.group_id for r in asked} == {f"{task.task_id}/5", f"{task.task_id}/9"}
    one = asked[0]
    assert (one.purpose, one.policy, one.max_turns, one.environment) == (
        "task",
        f"{run_id}@3",
        9,
        "frozenlake",
    )
    assert one.sampling.temperature == 0
    assert one.max_staleness is None
    assert mine()[0].headers["purpose"] == b"task"
    assert mine()[0].traceparent
    rewards = {(5, 0): 1.0, (5, 1): 0.0, (9, 0): None, (9, 1): 0.5}
    for request in asked:
        reward = rewards[request.seed, request.member]
        event = scored(request, reward, "" if reward is not None else "timeout")
        for purpose in ("train", "task", "task"):
            bus.publish(
                topics.SAMPLES, event, key=event.trajectory.group_id, run_id=task.task_id, purpose=purpose
            )
    until = time.monotonic() + 15
    while (found := await served.client.task(task.task_id, wait_s=1)).state != "finished":
        assert time.monotonic() < until
    assert (found.total, found.done, found.lost) == (4, 4, 0)
    assert found.reward_mean == pytest.approx(0.5)
    assert found.failures == {"timeout": 1}
    assert [(r.seed, r.member, r.reward) for r in found.results] == [
        (*k, v) for k, v in sorted(rewards.items())
    ]
    shown = await served.client.trajectory(f"{task.task_id}/9.1#0")
    assert shown.reward == 0.5


async def test_what_a_task_names_must_exist(served: Served) -> None:
    lake = {"task": "lake", "seeds": [1]}
    run_id = (await served.client.submit_run(RECIPE)).run_id
    assert (await post(served, "/v1/tasks", lake | {"run_id": run_id})).status_code == 404
    await publish_policy(served, run_id, 3)
    assert (await post(served, "/v1/tasks", lake | {"policy": "nope"})).status_code == 404
    assert (await post(served, "/v1/tasks", lake | {"policy": f"{run_id}@4"})).status_code == 404
    assert (await post(served, "/v1/tasks", lake | {"run_id": "nope"})).status_code == 404
    assert fields(await post(served, "/v1/tasks", {"task": "sea", "seeds": [1]})) == ["task"]
    own = {"environment": "frozenlake", "seeds": [1], "policy": run_id}
    assert fields(await post(served, "/v1/tasks", own | {"config": {"sise": 1}})) == ["config.sise"]
    assert fields(await post(served, "/v1/tasks", own | {"environment": "frozen"})) == ["environment"]
    for change, field in [
        ({"seeds": []}, "seeds"), ({"seeds": [1, 1]}, "(whole input)"), ({"seeds": [-1]}, "(whole input)"),
        ({"seeds": ["1"]}, "seeds.0"), ({"seeds": [True]}, "seeds.0"), ({"seeds": [10**30]}, "(whole input)"),
        ({"temperature": -1}, "temperature"), ({"temperature": "1"}, "temperature"), ({"members": 0}, "members"),
        ({"max_turns": 1e308}, "max_turns"), ({"deadline_s": 0}, "deadline_s"), ({"policy": "a/b"}, "policy"),
        ({"colour": 1}, "colour"), ({"max_tokens_per_turn": 512}, "max_tokens_per_turn"),
    ]:  # fmt: skip
        assert field in fields(await post(served, "/v1/tasks", own | change)), change


async def test_what_has_not_ended_by_the_deadline_counts_as_lost(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = {
        "environment": "frozenlake",
        "actor": "scripted",
        "skill": 0.5,
        "seeds": [1, 2],
        "deadline_s": 1,
    }
    task = await served.client.submit_task(TaskRequest.model_validate(request))
    assert (task.state, task.policy) == ("running", "")
    monkeypatch.setattr("services.gateway.tasks._SCORING_S", -1.0)
    found = await served.client.task(task.task_id)
    assert (found.state, found.lost, found.failures, found.reward_mean) == ("finished", 2, {"lost": 2}, None)


async def test_trajectories_of_a_run_are_found_and_listed_newest_first(served: Served) -> None:
    run_id = (await served.client.submit_run(RECIPE)).run_id
    archive = TrajectoryArchive(served.context.settings.runs_dir / run_id / "trajectories")
    for number in range(5):
        request = RolloutRequested(
            run_id=run_id, trajectory_id=f"{run_id}/lake-{number}.0#0", group_id=f"{run_id}/lake-{number}",
            member=0, task="lake", environment="frozenlake", seed=number, deadline=1.0,
        )  # fmt: skip
        event = scored(request, float(number))
        late = event.trajectory.model_copy(update={"completed_at": float(number)})
        archive.append(event.model_copy(update={"trajectory": late}))
    archive.flush()
    listed = await served.client.trajectories(run_id, task="lake", limit=3)
    assert [brief.seed for brief in listed.trajectories] == [4, 3, 2]
    assert (await served.client.trajectories(run_id, task="other")).trajectories == []
    shown = await served.client.trajectory(f"{run_id}/lake-3.0#0")
    assert shown.reward == 3.0
    for bad in (f"{run_id}/lake-9.0#0", "../x", "nope", "\0", "x/../../y", "a" * 5000):
        response = await served.raw.get(f"/v1/trajectories/{quote(bad, safe='')}")
        assert response.status_code == 404, bad
        assert response.json()["error"]["code"] == "not_found"


async def test_workers_are_shown_as_they_reported_themselves(served: Served) -> None:
    worker = WorkerRecord(
        worker_id="w1", role="both", device_class="bandwidth", gpu_model="H20", url="http://w1", partitions=[0],
        running=3, waiting=1, kv_usage=0.5, policies={"p": 4}, updated_at=1.0,
    )  # fmt: skip
    await served.context.state.report_worker(worker, ttl_s=30)
    shown = (await served.client.workers()).workers
    assert [item.model_dump() for item in shown] == [worker.model_dump()]


async def test_the_documentation_has_every_endpoint_with_its_errors_and_examples(served: Served) -> None:
    document = (await served.raw.get("/openapi.json")).json()
    assert (await served.raw.get("/docs")).status_code == 200
    for path, method in [
        ("/v1/runs", "post"), ("/v1/runs", "get"), ("/v1/runs/{run_id}", "get"), ("/v1/tasks", "post"),
        ("/v1/runs/{run_id}/cancel", "post"), ("/v1/runs/{run_id}/events", "get"), ("/v1/workers", "get"),
        ("/v1/runs/{run_id}/summary", "get"), ("/v1/runs/{run_id}/trajectories", "get"),
        ("/v1/tasks/{task_id}", "get"), ("/v1/trajectories/{trajectory_id}", "get"),
    ]:  # fmt: skip
        operation = document["paths"][path][method]
        assert operation["summary"]
        assert operation["description"]
        assert operation["responses"]["401"]["content"]["application/json"]["schema"]["$ref"].endswith(
            "Problem"
        )
    examples = document["paths"]["/v1/tasks"]["post"]["requestBody"]["content"]["application/json"][
        "examples"
    ]
    for example in examples.values():
        TaskRequest.model_validate(example["value"])
    for example in document["paths"]["/v1/runs"]["post"]["requestBody"]["content"]["application/json"][
        "examples"
    ].values():
        if isinstance(example["value"]["recipe"], dict):
            await served.client.submit_run(example["value"]["recipe"])


async def test_errors_are_rebuilt_by_the_client_with_their_fields(served: Served) -> None:
    with pytest.raises(Invalid) as caught:
        await served.client.submit_run({"tasks": {}})
    assert [problem.field for problem in caught.value.fields] == ["recipe.tasks"]
