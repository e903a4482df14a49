"""The front door takes what is right once, names what is wrong, and lets go of who leaves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from served_gateway import (
    KEY,
    RECIPE,
    Served,
    bootstrap,
    fields,
    post,
    redis_url,
    serve,
    served,
    settings_of,
    until,
)

from services.gateway.service import Gateway
from shared.api import TaskRequest
from shared.errors import Conflict, Invalid, NotFound, StorageFull
from shared.http import ApiClient, RunEvent
from shared.state import WorkerRecord

__all__ = ["bootstrap", "redis_url", "served"]
pytestmark = pytest.mark.asyncio(loop_scope="module")


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
    *(
        (_with("training.learning_rate", v), "recipe.training.learning_rate")
        for v in ('"NaN"', "-1", "0", "1e308", "true", '""', "null", "[]", "1" + "0" * 30)
    ),
    *(
        (_with("training.steps", v), "recipe.training.steps")
        for v in ("1.5", "0", '"3"', "false", "1" + "0" * 30)
    ),
    *(
        (_with("training.learning_rate", v), "(body)")
        for v in ("NaN", "Infinity", "-Infinity", "1e999", "1" * 5000, "01")
    ),
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
]


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
        served,
        "/v1/tasks",
        {"environment": "frozenlake", "actor": "scripted", "seeds": [1]},
        **{"Idempotency-Key": "k"},
    )
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


async def test_a_full_disk_takes_no_run_and_names_the_folder(served: Served) -> None:
    gateway = Gateway(served.context, min_free_bytes=1 << 60)
    with pytest.raises(StorageFull, match="set ROLLART_RUNS_DIR") as caught:
        gateway.check_room()
    assert (caught.value.status, caught.value.retryable) == (507, False)
    Gateway(served.context, min_free_bytes=1).check_room()


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
        into += [event]


async def test_events_come_in_order_resume_without_repeats_and_end_with_the_run(served: Served) -> None:
    state = served.context.state
    run_id = (await served.client.submit_run(RECIPE)).run_id
    for step in (1, 2):
        await state.append_run_event(run_id, json.dumps({"kind": "step", "step": step, "text": "a\u2028b"}))
    seen: list[RunEvent] = []
    following = asyncio.create_task(_collect(served.client, run_id, seen))
    await until(lambda: sum(e.kind == "step" for e in seen) == 2)
    await state.update_run(run_id, state="running", phase="train", step=2)
    await until(lambda: any(e.run is not None and e.run.phase == "train" for e in seen))
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
        await until(lambda: streams() == 1)
        leaver.cancel()
        await until(lambda: streams() == 0)

        async def hold() -> None:
            async with served.raw.stream("GET", f"/v1/runs/{run_id}/events", timeout=30) as response:
                async for _ in response.aiter_bytes():
                    pass
                ended.append(True)

        holder = asyncio.create_task(hold())
        await until(lambda: streams() == 1)
        served.app.state.supervisor.drain()
        await asyncio.wait_for(holder, 5)
    assert ended == [True]
    assert streams() == 0


async def test_workers_are_shown_as_they_reported_themselves(served: Served) -> None:
    worker = WorkerRecord(
        worker_id="w1",
        role="both",
        device_class="bandwidth",
        gpu_model="H20",
        url="http://w1",
        partitions=[0],
        running=3,
        waiting=1,
        kv_usage=0.5,
        policies={"p": 4},
        kv_leases=2,
        updated_at=1.0,
    )
    await served.context.state.report_worker(worker, ttl_s=30)
    shown = (await served.client.workers()).workers
    # What it measured of each task is summed up by the router's `/v1/affinity`.
    assert [item.model_dump() for item in shown] == [worker.model_dump(exclude={"tasks"})]


async def test_the_documentation_has_every_endpoint_with_its_errors_and_examples(served: Served) -> None:
    document = (await served.raw.get("/openapi.json")).json()
    assert (await served.raw.get("/docs")).status_code == 200
    for path, method in [
        ("/v1/runs", "post"),
        ("/v1/runs", "get"),
        ("/v1/runs/{run_id}", "get"),
        ("/v1/tasks", "post"),
        ("/v1/runs/{run_id}/cancel", "post"),
        ("/v1/runs/{run_id}/events", "get"),
        ("/v1/workers", "get"),
        ("/v1/runs/{run_id}/summary", "get"),
        ("/v1/runs/{run_id}/trajectories", "get"),
        ("/v1/tasks/{task_id}", "get"),
        ("/v1/trajectories/{trajectory_id}", "get"),
    ]:
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
