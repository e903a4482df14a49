"""Group-relative advantages: keyed by id, exact where exactness is promised."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.training.algorithms.advantages import group_advantages, rewards_by_group
from services.training.algorithms.grpo import Grpo
from shared.errors import Internal
from shared.events import TrajectoryCompleted, TrajectoryScored
from shared.recipe import Training

Rewards = dict[str, dict[str, float | None]]


def named(groups: dict[str, list[float | None]]) -> Rewards:
    return {g: {f"{g}.{i}": r for i, r in enumerate(rewards)} for g, rewards in groups.items()}


def values(rewards: Rewards, group: str, **options: bool) -> list[float]:
    result = group_advantages(rewards, **options)
    return [result.by_trajectory[name] for name in rewards[group] if name in result.by_trajectory]


def scored(group: str, trajectory: str, reward: float | None) -> TrajectoryScored:
    completed = TrajectoryCompleted(
        run_id="r", trajectory_id=trajectory, group_id=group, member=0, attempt=0, task="t", purpose="train",
        split="train", seed=0, status="finished", started_at=0.0, completed_at=1.0,
    )  # fmt: skip
    return TrajectoryScored(trajectory=completed, reward=reward, scored_at=2.0)


def test_all_equal_group_is_exactly_zero_and_leaves_the_others_alone() -> None:
    rewards = named({"equal": [1.0] * 4, "mixed": [0.0, 1.0, 0.0, 1.0]})
    result = group_advantages(rewards)
    assert values(rewards, "equal") == [0.0] * 4
    assert result.zero_variance == {"equal"}
    assert values(rewards, "mixed") == values(named({"mixed": [0.0, 1.0, 0.0, 1.0]}), "mixed")
    assert values(rewards, "mixed") == pytest.approx([-1, 1, -1, 1], abs=1e-5)


def test_equal_rewards_that_do_not_sum_exactly_still_give_zero() -> None:
    assert values(named({"g": [0.1] * 3}), "g", normalize_std=False) == [0.0] * 3


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1.0, 0.0], [1.0, -1.0]), ([1.0, 0.0, 0.0, 0.0], [1.732051, -0.577350, -0.577350, -0.577350])],
)
def test_standard_deviation_is_that_of_the_population(rewards: list[float], expected: list[float]) -> None:
    assert values(named({"g": list(rewards)}), "g") == pytest.approx(expected, abs=1e-5)


def test_singleton_gets_zero_and_is_counted_as_singleton_only() -> None:
    rewards = named({"pair": [1.0, 3.0], "single": [5.0]})
    result = group_advantages(rewards)
    assert values(rewards, "pair") + values(rewards, "single") == pytest.approx([-1, 1, 0], abs=1e-5)
    assert result.singletons == {"single"}
    assert not result.zero_variance


def test_uneven_groups_each_have_mean_zero() -> None:
    rewards = named({"a": [1.0, 2.0, 3.0, 4.0], "b": [10.0, 12.0], "c": [5.0, 6.0, 7.0]})
    for group in rewards:
        assert sum(values(rewards, group, normalize_std=False)) == 0.0
    assert values(rewards, "b", normalize_std=False) == [-1.0, 1.0]


def test_equal_group_of_three_between_groups_of_four_is_exactly_zero() -> None:
    rewards = named({"a": [0.0, 1.0, 0.0, 1.0], "b": [5.0] * 3, "c": [1.0, 0.0, 0.0, 0.0]})
    assert values(rewards, "b") == [0.0, 0.0, 0.0]


def test_missing_rewards_are_outside_the_statistics() -> None:
    rewards = named({"g": [1.0, None, 3.0], "alone": [2.0, None], "none": [None, None]})
    result = group_advantages(rewards)
    assert values(rewards, "g") == pytest.approx([-1.0, 1.0], abs=1e-5)
    assert "g.1" not in result.by_trajectory
    assert result.singletons == {"alone"}
    assert "none" not in result.zero_variance


def test_a_rollout_in_several_segments_counts_once_in_the_baseline() -> None:
    rewards = rewards_by_group([scored("g", "A", 1.0), scored("g", "A", 1.0), scored("g", "B", 0.5)])
    result = group_advantages(rewards, normalize_std=False)
    assert result.by_trajectory == {"A": 0.25, "B": -0.25}


def test_two_rewards_for_one_trajectory_are_refused() -> None:
    with pytest.raises(Internal, match="two rewards"):
        rewards_by_group([scored("g", "A", 1.0), scored("g", "A", 0.0)])


def test_recipe_switches_the_standard_deviation_off() -> None:
    rewards = named({"g": [0.0, 4.0]})
    assert Grpo(Training(normalize_std=False)).advantages(rewards).by_trajectory == {"g.0": -2.0, "g.1": 2.0}


reward = st.one_of(st.none(), st.floats(-100, 100))
batches = st.dictionaries(st.text("abc", min_size=1), st.lists(reward, max_size=6), max_size=5).map(named)


@settings(max_examples=50)
@given(batches, st.randoms(use_true_random=False))
def test_order_of_arrival_changes_nothing(rewards: Rewards, rng: random.Random) -> None:
    rows = [(g, t, r) for g, members in rewards.items() for t, r in members.items()]
    rng.shuffle(rows)
    shuffled = rewards_by_group(scored(g, t, r) for g, t, r in rows)
    assert group_advantages(shuffled) == group_advantages(rewards)


@settings(max_examples=50)
@given(batches)
def test_each_group_sums_to_zero_and_each_rewarded_trajectory_has_one_advantage(rewards: Rewards) -> None:
    for group, members in rewards.items():
        found = values(rewards, group)
        assert len(found) == sum(r is not None for r in members.values())
        assert sum(found) == pytest.approx(0.0, abs=1e-6)
