"""Tasks roll out what was asked and nothing else; what was played is found again."""

from __future__ import annotations

import time
from urllib.parse import quote

import pytest
from served_gateway import (
    RECIPE,
    Served,
    bootstrap,
    fields,
    post,
    publish_policy,
    redis_url,
    scored,
    served,
    until,
)

from services.gateway import tasks
from shared import topics
from shared.api import TaskRequest
from shared.archive import TrajectoryArchive
from shared.bus import Bus, Delivery
from shared.events import RolloutRequested

__all__ = ["bootstrap", "redis_url", "served"]
pytestmark = pytest.mark.asyncio(loop_scope="module")


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

    await until(lambda: len(mine()) == 4)
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
    limit = time.monotonic() + 15
    while (found := await served.client.task(task.task_id, wait_s=1)).state != "finished":
        assert time.monotonic() < limit
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
    own: dict[str, object] = {"environment": "frozenlake", "seeds": [1], "policy": run_id}
    assert fields(await post(served, "/v1/tasks", own | {"config": {"sise": 1}})) == ["config.sise"]
    assert fields(await post(served, "/v1/tasks", own | {"environment": "frozen"})) == ["environment"]
    changes: list[tuple[dict[str, object], str]] = [
        ({"seeds": []}, "seeds"),
        ({"seeds": [1, 1]}, "(whole input)"),
        ({"seeds": [-1]}, "(whole input)"),
        ({"seeds": ["1"]}, "seeds.0"),
        ({"seeds": [True]}, "seeds.0"),
        ({"seeds": [10**30]}, "(whole input)"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"members": 0}, "members"),
        ({"max_turns": 1e308}, "max_turns"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"policy": "a/b"}, "policy"),
        ({"colour": 1}, "colour"),
        ({"max_tokens_per_turn": 512}, "max_tokens_per_turn"),
    ]
    for change, field in changes:
        assert field in fields(await post(served, "/v1/tasks", own | change)), change


async def test_what_has_not_ended_by_the_deadline_counts_as_lost(served: Served) -> None:
    request: dict[str, object] = {
        "environment": "frozenlake",
        "actor": "scripted",
        "skill": 0.5,
        "seeds": [1, 2],
    }
    task = await served.client.submit_task(TaskRequest.model_validate(request | {"deadline_s": 60}))
    assert (task.state, task.policy) == ("running", "")
    stored = await served.context.state.task(task.task_id)
    assert tasks.view(*stored, now=task.created_at + 61).lost == 0, "it may still be scored"
    late = tasks.view(*stored, now=task.created_at + 120)
    assert (late.state, late.lost, late.failures, late.reward_mean) == ("finished", 2, {"lost": 2}, None)


async def test_trajectories_of_a_run_are_found_and_listed_newest_first(served: Served) -> None:
    run_id = (await served.client.submit_run(RECIPE)).run_id
    archive = TrajectoryArchive(served.context.settings.runs_dir / run_id / "trajectories")
    for number in range(5):
        request = RolloutRequested(
            run_id=run_id,
            trajectory_id=f"{run_id}/lake-{number}.0#0",
            group_id=f"{run_id}/lake-{number}",
            member=0,
            task="lake",
            environment="frozenlake",
            seed=number,
            deadline=1.0,
        )
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
