"""The training service with real services around it: every run ends, says how, and its books are closed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import pytest_asyncio
from fastapi import FastAPI
from pydantic import JsonValue
from run_environments import RELEASE
from turn_stack import TurnStack, turn_stack

from services.environment.app import create_app as create_environment
from services.generation.app import create_app as create_generation
from services.reward.app import create_app as create_reward
from services.router.app import create_app as create_router
from services.training.app import create_app as create_training
from services.training.metrics_log import read_metrics
from shared import recipe as recipes
from shared.api import TERMINAL
from shared.archive import TrajectoryArchive
from shared.embedded.kafka import EmbeddedKafka
from shared.records import StepRecord
from shared.service import Context
from shared.settings import Settings
from shared.state import RunRecord
from shared.summary import Summary, check_conservation, read_summary

pytestmark = pytest.mark.asyncio(loop_scope="module")

RECIPE: dict[str, JsonValue] = {
    "name": "small",
    "tasks": {"t": {"environment": "run_environments:Chance", "max_turns": 3, "max_tokens_per_turn": 2}},
    "tiny": {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "vocab_size": 300},
    "rollout": {"groups_per_step": 2, "group_size": 2, "context_window": 128, "deadline_s": 20},
    "training": {"steps": 2},
    "warm_start": {"episodes": 4, "steps": 1, "batch_size": 2},
    "evaluation": {"episodes": 2},
}


def small(**changes: JsonValue) -> dict[str, JsonValue]:
    """The recipe with keys of its sections changed."""
    made: dict[str, JsonValue] = json.loads(json.dumps(RECIPE))
    for section, value in changes.items():
        before = made.get(section)
        merged = isinstance(before, dict) and isinstance(value, dict) and section != "tasks"
        made[section] = {**before, **value} if merged else value  # type: ignore[dict-item]
    return made


def playing(environment: str = "Chance", **config: str) -> dict[str, JsonValue]:
    """Its tasks, of another environment."""
    return {
        "t": {
            "environment": f"run_environments:{environment}",
            "config": {**config},
            "max_turns": 3,
            "max_tokens_per_turn": 2,
        }
    }


class Lab:
    """Runs on one stack."""

    def __init__(self, stack: TurnStack) -> None:
        self.stack = stack
        self.state = stack.state
        self.runs_dir = stack.folder / "runs"
        self._made = 0

    def settings(self, name: str) -> Settings:
        sections: dict[str, dict[str, object]] = {"generation": {"engine": "torch", "cache_tokens": 4096}}
        return self.stack.settings(name, **sections).model_copy(update={"runs_dir": self.runs_dir})

    @asynccontextmanager
    async def training(self, name: str = "t1") -> AsyncIterator[Context]:
        async with serving(create_training(self.settings(name))) as context:
            yield context

    async def submit(self, recipe: dict[str, JsonValue], *, check: bool = True) -> str:
        self._made += 1
        run_id = f"small-{self._made}"
        text = recipes.validate(recipe).model_dump_json() if check else json.dumps(recipe)
        await self.state.create_run(
            RunRecord(run_id=run_id, state="queued", recipe=text, created_at=time.time())
        )
        return run_id

    async def reached(self, run_id: str, *phases: str, seconds: float = 40) -> RunRecord:
        """The run once it is in one of these phases or states."""
        async with asyncio.timeout(seconds):
            while True:
                record = await self.state.run(run_id)
                if record.state in phases or (record.state == "running" and record.phase in phases):
                    return record
                assert record.state not in TERMINAL, f"{record.state}: {record.error}"
                await asyncio.sleep(0.02)

    async def ended(self, run_id: str, *, seconds: float = 40) -> RunRecord:
        return await self.reached(run_id, *TERMINAL, seconds=seconds)

    def summary(self, run_id: str) -> Summary:
        """Of an ended run: on disk and closed, in agreement with everything else that the run left."""
        folder = self.runs_dir / run_id
        summary = read_summary(folder / "summary.json")
        check_conservation(summary.groups)
        assert summary.groups.in_flight == 0
        steps = [
            record for record in read_metrics(folder / "metrics.jsonl") if isinstance(record, StepRecord)
        ]
        assert summary.steps == len(steps)
        assert summary.tokens.trained == sum(step.tokens_trained for step in steps)
        lags = [(lag, count) for step in steps for lag, count in step.lag.items()]
        assert sum(summary.lag.histogram.values()) == sum(count for _, count in lags)
        assert summary.lag.max == max((int(lag) for lag, _ in lags), default=0)
        kept = [
            s for s in TrajectoryArchive(folder / "trajectories").iterate() if s.trajectory.purpose == "train"
        ]
        ids = {s.trajectory.trajectory_id for s in kept if s.reward is not None}
        late = summary.errors.get("late_trajectories", 0) + summary.errors.get("duplicate_trajectories", 0)
        assert 0 <= len(ids) - sum(task.episodes for task in summary.tasks.values()) <= late
        assert (folder / "report.html").stat().st_size > 1000
        return summary


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[Context]:
    async with app.router.lifespan_context(app):
        yield app.state.context


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(
    _embedded_broker: EmbeddedKafka, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Lab]:
    """All but training."""
    RELEASE.clear()
    folder = tmp_path_factory.mktemp("training")
    async with turn_stack(_embedded_broker, redis_url, folder) as stack, AsyncExitStack() as exits:
        lab = Lab(stack)
        for number, create in enumerate(
            (create_generation, create_router, create_reward, create_environment)
        ):
            await exits.enter_async_context(serving(create(lab.settings(f"s{number}"))))
        yield lab
        RELEASE.set()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(services: Lab) -> AsyncIterator[Lab]:
    """The whole stack."""
    async with services.training():
        yield services


async def test_a_restarted_trainer_fails_the_run_in_progress_and_serves_the_queue(services: Lab) -> None:
    # First in this module: `lab` starts a trainer that stays.
    async with services.training("t2"):
        run_id = await services.submit(small(training={"steps": 1_000_000}))
        waiting = await services.submit(small())
        await services.reached(run_id, "training")
    assert (await services.state.run(waiting)).state == "queued"
    async with services.training("t2"):
        assert "trainer was lost" in (await services.ended(run_id)).error
        assert (await services.ended(waiting)).state == "finished"
        services.summary(waiting)


@pytest.mark.parametrize(
    ("changes", "lag_max"),
    [
        ({"rollout": {"max_staleness": 0}}, 0),
        ({"rollout": {"group_size": 1}}, 1),
        ({"warm_start": {"steps": 0}}, 1),
        ({"evaluation": {"episodes": 0}}, 1),
        ({"rollout": {"groups_per_step": 1}, "training": {"steps": 1}}, 0),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
async def test_the_edges_of_a_recipe_train(lab: Lab, changes: dict[str, JsonValue], lag_max: int) -> None:
    run_id = await lab.submit(small(**changes))
    record = await lab.ended(run_id)
    assert (record.state, record.error) == ("finished", "")
    summary = lab.summary(run_id)
    steps = recipes.validate(small(**changes)).training.steps
    assert (summary.steps, summary.versions) == (steps, steps)
    assert summary.lag.max <= lag_max
    assert summary.errors == {}
    rewards = [
        reward for task in summary.tasks.values() for reward in (task.reward_before, task.reward_after)
    ]
    assert all((reward is None) == (changes.get("evaluation") is not None) for reward in rewards)


async def test_an_exported_model_starts_the_next_run(lab: Lab) -> None:
    first = await lab.submit(small())
    assert (await lab.ended(first)).state == "finished"
    folder = lab.runs_dir / first / "export"
    second = await lab.submit(small(model=str(folder), warm_start={"episodes": 0}))
    record = await lab.ended(second)
    assert (record.state, record.error) == ("finished", "")
    before, after = lab.summary(first), lab.summary(second)
    # The very same episodes of the very same weights, but for chance in sampling.
    assert before.tasks["t"].reward_after == after.tasks["t"].reward_before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tasks": playing(fails="scripted")}, "prepare: no episode succeeded (environment_error)"),
        ({"tasks": playing(fails="eval")}, "evaluation_before: no episode succeeded (environment_error)"),
        ({"tasks": playing(fails="train")}, "no group can be completed (environment_error: "),
        (
            {"tasks": playing("Waiting", waits="eval"), "rollout": {"deadline_s": 1}},
            "evaluation_before: no episode succeeded (deadline)",
        ),
        ({"model": "/no/such/folder"}, "'/no/such/folder'"),
        ({"model": "."}, "as a causal LM"),
        ({"training": {"algorithm": "no_such:Algorithm"}}, "no_such:Algorithm"),
    ],
)
async def test_a_run_that_cannot_go_on_fails_with_its_reason_and_closed_books(
    lab: Lab, changes: dict[str, JsonValue], said: str
) -> None:
    run_id = await lab.submit(small(**changes))
    record = await lab.ended(run_id)
    assert record.state == "failed"
    assert said in record.error
    summary = lab.summary(run_id)
    assert (summary.state, summary.steps) == ("failed", 0)
    assert Summary.model_validate_json(record.summary) == summary


async def test_a_recipe_that_the_trainer_cannot_load_fails_its_run_and_not_the_queue(lab: Lab) -> None:
    unknown = await lab.submit(small(tasks={"t": {"environment": "no_such_module:Env"}}), check=False)
    blocked = await lab.submit(small())
    lab.runs_dir.mkdir(exist_ok=True)
    (lab.runs_dir / blocked).write_text("a file where the folder should be")
    good = await lab.submit(small())
    assert "tasks.t.environment" in (await lab.ended(unknown)).error
    assert "ROLLART_RUNS_DIR" in (await lab.ended(blocked)).error
    assert (await lab.ended(good)).state == "finished"


async def test_results_that_cannot_be_written_fail_the_run_at_once(lab: Lab) -> None:
    run_id = await lab.submit(small(training={"steps": 10_000}))
    await lab.reached(run_id, "prepare", "warm_start", "evaluation_before")
    folder = lab.runs_dir / run_id / "trajectories"
    if folder.exists():
        folder.rename(folder.with_name("moved"))
    folder.write_text("")
    record = await lab.ended(run_id)
    assert record.state == "failed"
    assert "ROLLART_RUNS_DIR" in record.error


@pytest.mark.parametrize(
    ("phase", "changes"),
    [
        ("prepare", {"tasks": playing("Waiting", waits="scripted")}),
        ("warm_start", {"warm_start": {"steps": 1_000_000}}),
        ("evaluation_before", {"tasks": playing("Waiting", waits="eval")}),
        ("training", {"tasks": playing("Waiting", waits="train")}),
        ("training", {"training": {"steps": 1_000_000}}),
    ],
)
async def test_a_run_is_cancelled_in_any_phase_and_the_next_one_starts(
    lab: Lab, phase: str, changes: dict[str, JsonValue]
) -> None:
    run_id = await lab.submit(small(**changes))
    queued = await lab.submit(small(evaluation={"episodes": 0}))
    await lab.reached(run_id, phase)
    assert (await lab.state.run(queued)).state == "queued"
    await lab.state.abort_run(run_id, "cancelled")
    assert (await lab.ended(run_id, seconds=15)).state == "cancelled"
    summary = lab.summary(run_id)
    assert summary.state == "cancelled"
    assert set(summary.groups.dropped) <= {"cancelled", "stale"}
    RELEASE.set()
    try:
        assert (await lab.ended(queued)).state == "finished"
    finally:
        RELEASE.clear()


async def test_a_run_whose_trainer_is_gone_fails_and_one_that_waits_goes_on(services: Lab, lab: Lab) -> None:
    orphan = await lab.submit(small())
    await lab.state.update_run(orphan, state="running", phase="training")
    assert "trainer was lost" in (await lab.ended(orphan)).error
    assert await lab.state.aborted([orphan]) == {orphan: "failed"}


async def test_a_trainer_that_lost_its_lease_stops_and_writes_nothing_more(lab: Lab) -> None:
    run_id = await lab.submit(small(training={"steps": 1_000_000}))
    await lab.reached(run_id, "training")
    lease = f"trainer:{run_id}"
    owner = await lab.state.lease_owner(lease)
    assert owner is not None
    # As after its expiry: another one holds it.
    await lab.state.release_lease(lease, owner)
    assert await lab.state.acquire_lease(lease, "another", ttl_s=60)
    next_run = await lab.submit(small())
    assert (await lab.ended(next_run)).state == "finished"
    record = await lab.state.run(run_id)
    assert (record.state, record.error) == ("running", "")
    assert not (lab.runs_dir / run_id / "summary.json").exists()
    policy = await lab.state.policy(run_id)
    assert policy is not None
    assert policy[0].version <= record.step + 1
    await lab.state.release_lease(lease, "another")
    assert (await lab.ended(run_id)).state == "failed"
