"""A reward is a finite number within its scorer's bounds, or none at all, whatever a scorer does."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from pydantic import JsonValue

from services.reward.scoring import Scoring
from shared.events import RewardSpec, TrajectoryCompleted, TrajectoryScored, TrajectoryStatus, TurnRecord
from shared.settings import RewardSettings

HERE = "scorers_that_misbehave"


def trajectory(
    scorer: str = "episode_return",
    config: dict[str, JsonValue] | None = None,
    *,
    rewards: tuple[float, ...] = (0.0, 1.0),
    status: TrajectoryStatus = TrajectoryStatus.FINISHED,
    seed: int = 0,
) -> TrajectoryCompleted:
    return TrajectoryCompleted(
        run_id="r", trajectory_id="r/1.0#0", group_id="r/1", member=0, attempt=0, task="t", purpose="train",
        split="train", seed=seed, status=status, started_at=1.0, completed_at=2.0,
        turns=[TurnRecord(start=0, sampled=1, reward=reward) for reward in rewards],
        reward=RewardSpec(scorer=scorer, config=config or {}),
    )  # fmt: skip


def score(given: TrajectoryCompleted, **settings: float) -> TrajectoryScored:
    with closing(Scoring(RewardSettings.model_validate(settings))) as scoring:
        return asyncio.run(scoring.score(given))


def own_children() -> list[psutil.Process]:
    """Children that score; those of other tests' fixtures are none of ours."""
    found = psutil.Process().children(recursive=True)
    return [child for child in found if "services.reward.child" in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("scorer", "config", "rewards", "expected"),
    [
        ("episode_return", {}, (0.0, 1.0), 1.0),
        ("episode_return", {}, (), 0.0),
        ("episode_return", {"minimum": -1.0, "turn_cost": 0.25}, (0.0, 1.0), 0.5),
        ("episode_return", {"maximum": 3.0}, (0.1,) * 10, 1.0),
        ("success", {}, (0.0, 1.0), 1.0),
        ("success", {}, (0.0, 0.5), 0.0),
        ("success", {"threshold": 0.5}, (0.0, 0.5), 1.0),
    ],
)
def test_built_in_scorers_give_the_return_and_whether_it_was_enough(
    scorer: str, config: dict[str, JsonValue], rewards: tuple[float, ...], expected: float
) -> None:
    scored = score(trajectory(scorer, config, rewards=rewards))
    assert scored.reward == pytest.approx(expected, abs=1e-12)
    assert scored.reason == ""


@pytest.mark.parametrize(
    ("status", "reason"),
    [(TrajectoryStatus.FAILED, "environment_failed"), (TrajectoryStatus.ABORTED, "aborted")],
)
def test_a_trajectory_that_did_not_end_by_itself_has_no_reward(status: TrajectoryStatus, reason: str) -> None:
    scored = score(trajectory(status=status))
    assert (scored.reward, scored.reason) == (None, reason)


def test_a_truncated_trajectory_keeps_its_reward_and_a_real_failure_is_zero() -> None:
    assert score(trajectory(status=TrajectoryStatus.TRUNCATED)).reward == 1.0
    assert score(trajectory(rewards=(0.0,))).reward == 0.0


@pytest.mark.parametrize("scorer", [f"{HERE}:Emit", f"{HERE}:EmitApart"])
def test_only_finite_values_in_bounds_are_rewards_in_the_service_and_in_a_child(scorer: str) -> None:
    cases = {
        "nan": "not_finite", "inf": "not_finite", "-inf": "not_finite", "-0.5": "out_of_range",
        "1.5": "out_of_range", "abc": "scorer_failed", "none": "not_applicable",
    }  # fmt: skip

    async def grade_all() -> dict[str, TrajectoryScored]:
        return {
            value: await scoring.score(trajectory(scorer, {"value": value})) for value in [*cases, "0.25"]
        }

    with closing(Scoring(RewardSettings())) as scoring:
        scored = asyncio.run(grade_all())
    assert scored.pop("0.25").reward == 0.25
    assert {value: item.reason for value, item in scored.items()} == cases
    assert all(item.reward is None for item in scored.values())


def test_a_component_that_is_not_finite_gives_no_reward_and_valid_json() -> None:
    scored = score(trajectory(f"{HERE}:Emit", {"part": "nan"}))
    assert (scored.reward, scored.reason) == (None, "not_finite")
    assert TrajectoryScored.model_validate_json(scored.model_dump_json()) == scored


def test_a_turn_reward_that_is_not_a_number_gives_no_reward() -> None:
    for scorer in ("episode_return", "success"):
        assert score(trajectory(scorer, rewards=(math.nan,))).reason == "not_finite"


@pytest.mark.parametrize(
    ("scorer", "config", "reason"),
    [
        ("episode_retrun", {}, "unknown_scorer"),
        ("no.such.module:Thing", {}, "unknown_scorer"),
        ("episode_return", {"minimun": 0.0}, "scorer_failed"),
        ("episode_return", {"minimum": 2.0}, "scorer_failed"),
        (f"{HERE}:Path", {}, "unknown_scorer"),
        (f"{HERE}:Exits", {}, "scorer_failed"),
    ],
)
def test_a_scorer_that_cannot_be_had_is_a_reason_not_an_exception(
    scorer: str, config: dict[str, JsonValue], reason: str
) -> None:
    scored = score(trajectory(scorer, config))
    assert (scored.reward, scored.reason) == (None, reason)


def test_a_spinning_scorer_is_killed_at_its_limit_and_the_next_gradings_are_normal(tmp_path: Path) -> None:
    scorer, config = f"{HERE}:Misbehave", {"folder": str(tmp_path)}
    results: list[TrajectoryScored] = []

    async def grade() -> None:
        for seed in (0, 1, *[0] * 100):
            results.append(await scoring.score(trajectory(scorer, config, seed=seed)))  # noqa: PERF401

    with closing(Scoring(RewardSettings(timeout_s=0.5))) as scoring:
        thread = threading.Thread(target=lambda: asyncio.run(grade()))
        thread.start()
        thread.join()
    assert results[1].reason == "timeout"
    assert [item.reward for item in (results[0], *results[2:])] == [0.5] * 101
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    # results[2] waits for the fresh process.
    assert max(item.score_s for item in results[3:]) < results[1].score_s
    assert own_children() == []


def test_a_child_that_dies_or_raises_costs_one_reward_only() -> None:
    async def grade() -> list[TrajectoryScored]:
        return [await scoring.score(trajectory(f"{HERE}:Misbehave", seed=seed)) for seed in (2, 3, 0)]

    with closing(Scoring(RewardSettings())) as scoring:
        dead, raised, good = asyncio.run(grade())
    assert (dead.reward, dead.reason) == (raised.reward, raised.reason) == (None, "scorer_failed")
    assert good.reward == 0.5


def test_closing_ends_a_grading_in_progress_and_leaves_no_child(tmp_path: Path) -> None:
    async def grade() -> TrajectoryScored:
        given = trajectory(f"{HERE}:Misbehave", {"folder": str(tmp_path)}, seed=1)
        task = asyncio.create_task(scoring.score(given))
        while not (tmp_path / "pid").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.to_thread(scoring.close)
        return await task

    started = time.monotonic()
    with closing(Scoring(RewardSettings(timeout_s=60))) as scoring:
        scored = asyncio.run(grade())
    assert (scored.reward, scored.reason) == (None, "scorer_failed")
    assert time.monotonic() - started < 50
    assert own_children() == []
