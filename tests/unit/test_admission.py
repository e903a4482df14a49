"""The ledger of training groups: budget, completion, staleness, conservation."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.training.admission import Admission, Group
from shared.errors import ConservationViolated
from shared.events import TrajectoryCompleted, TrajectoryScored, TrajectoryStatus
from shared.recipe import Recipe, Rollout, Task


def recipe(*, tasks: dict[str, float] | None = None, **rollout: object) -> Recipe:
    weights = tasks or {"a": 1.0}
    return Recipe(
        tasks={name: Task(environment="frozenlake", weight=weight) for name, weight in weights.items()},
        rollout=Rollout.model_validate({"groups_per_step": 2, "group_size": 2} | rollout),
    )


def scored(
    group: Group,
    member: int,
    *,
    reward: float | None = 1.0,
    start: int | None = None,
    attempt: int | None = None,
    reason: str = "",
) -> TrajectoryScored:
    attempt = group.prompt.attempt if attempt is None else attempt
    trajectory = TrajectoryCompleted(
        run_id="run",
        trajectory_id=f"{group.group_id}.{member}#{attempt}",
        group_id=group.group_id,
        member=member,
        attempt=attempt,
        task=group.prompt.task,
        purpose="train",
        split="train",
        seed=0,
        status=TrajectoryStatus.FINISHED if reward is not None else TrajectoryStatus.ABORTED,
        reason=reason,
        start_version=group.version if start is None else start,
        started_at=0.0,
        completed_at=1.0,
    )
    return TrajectoryScored(trajectory=trajectory, reward=reward, scored_at=1.0)


def nothing() -> None:
    pass


def complete(admission: Admission, group: Group, **kwargs: object) -> None:
    for member in range(2):
        admission.add(scored(group, member, **kwargs), nothing)  # type: ignore[arg-type]


def admit(**rollout: object) -> tuple[Admission, list[Group]]:
    admission = Admission(recipe(**rollout), run_id="run")
    return admission, admission.issue(version=0, now=0.0, steps_left=100)


def test_open_groups_never_exceed_the_budget() -> None:
    admission, groups = admit(max_staleness=2)
    assert len(groups) == admission.budget == 3 * 2
    assert admission.issue(version=0, now=0.0, steps_left=100) == []


def test_no_more_is_issued_than_the_steps_left_can_train() -> None:
    admission = Admission(recipe(max_staleness=3), run_id="run")
    assert len(admission.issue(version=0, now=0.0, steps_left=1)) == 2


@pytest.mark.parametrize(("start", "accepted"), [(5, True), (3, True), (2, False)])
def test_lag_equal_to_the_limit_is_accepted_and_one_more_is_stale(start: int, accepted: bool) -> None:
    admission, groups = admit(max_staleness=2)
    complete(admission, groups[0], start=start)
    dropped = admission.evict(version=5, now=1.0)
    assert [d.reason for d in dropped] == ([] if accepted else ["stale"])


def test_samples_that_went_stale_in_the_queue_are_dropped_at_consumption_and_issued_again() -> None:
    admission, groups = admit(max_staleness=2)
    complete(admission, groups[0], start=0)
    (dropped,) = admission.evict(version=5, now=1.0)
    assert (dropped.reason, dropped.given_up) == ("stale", False)
    (again,) = admission.issue(version=5, now=1.0, steps_left=100)
    assert (again.prompt.index, again.prompt.attempt) == (groups[0].prompt.index, 1)


def test_only_the_stale_episode_drops_not_its_group() -> None:
    admission = Admission(recipe(group_size=3, groups_per_step=1, max_staleness=1), run_id="run")
    group = admission.issue(version=0, now=0.0, steps_left=100)[0]
    for member, start in enumerate([0, 2, 2]):
        admission.add(scored(group, member, start=start), nothing)
    assert admission.evict(version=2, now=1.0) == []
    batch = admission.batch(version=2)
    assert batch is not None
    assert [s.trajectory.member for s in batch[group.group_id]] == [1, 2]


def test_a_batch_leaves_the_other_ready_groups_for_the_next_and_none_is_seen_twice() -> None:
    admission = Admission(recipe(groups_per_step=8, max_staleness=1), run_id="run")
    groups = admission.issue(version=0, now=0.0, steps_left=100)
    for group in groups[:10]:
        complete(admission, group)
    first = admission.batch(version=0)
    assert first is not None
    assert list(first) == [g.group_id for g in groups[:8]]
    admission.retire(list(first))
    assert admission.batch(version=1) is None
    for group in groups[10:16]:
        complete(admission, group)
    second = admission.batch(version=1)
    assert second is not None
    assert list(second)[:2] == [g.group_id for g in groups[8:10]]
    assert not set(first) & set(second)


def test_a_trajectory_delivered_three_times_counts_once() -> None:
    admission, groups = admit()
    acks: list[int] = []
    for _ in range(3):
        admission.add(scored(groups[0], 0), lambda: acks.append(1))
    assert len(groups[0].members) == 1
    assert admission.duplicates == 2
    assert len(acks) == 2, "duplicates are acknowledged, the one that counts is held"


def test_a_late_result_of_an_earlier_attempt_is_acknowledged_and_left_out() -> None:
    admission, groups = admit(max_staleness=1)
    complete(admission, groups[0], start=0)
    admission.evict(version=5, now=1.0)
    (again,) = admission.issue(version=5, now=1.0, steps_left=100)
    acks: list[int] = []
    admission.add(scored(again, 0, attempt=0), lambda: acks.append(1))
    assert again.members == {}
    assert (admission.late, len(acks)) == (1, 1)


def test_a_group_that_one_rollout_holds_up_is_completed_without_it_after_the_deadline() -> None:
    admission = Admission(recipe(group_size=3, groups_per_step=1), run_id="run")
    group = admission.issue(version=0, now=0.0, steps_left=100)[0]
    for member in range(2):
        admission.add(scored(group, member), nothing)
    assert admission.batch(version=0) is None
    assert [d.group.prompt.index for d in admission.evict(version=0, now=group.deadline + 1)] == [1]
    batch = admission.batch(version=0)
    assert batch is not None
    assert len(batch[group.group_id]) == 2


def test_a_prompt_that_always_fails_is_given_up_and_replaced_by_another_of_its_task() -> None:
    admission = Admission(recipe(group_retries=2, max_staleness=0, groups_per_step=1), run_id="run")
    for attempt in range(3):
        (group,) = admission.issue(version=0, now=0.0, steps_left=9)
        assert (group.prompt.index, group.prompt.attempt) == (0, attempt)
        complete(admission, group, reward=None, reason="environment_error")
        (dropped,) = admission.evict(version=0, now=1.0)
        assert dropped.reason == "environment_error"
    assert admission.given_up == ["run/a-0"]
    (replacement,) = admission.issue(version=0, now=0.0, steps_left=9)
    assert replacement.prompt.index == 1


def test_a_group_left_with_one_member_is_dropped_as_singleton() -> None:
    admission, groups = admit()
    admission.add(scored(groups[0], 0), nothing)
    admission.add(scored(groups[0], 1, reward=None, reason="environment_error"), nothing)
    assert [d.reason for d in admission.evict(version=0, now=1.0)] == ["singleton_group"]


def test_a_group_that_fails_after_the_last_eviction_is_in_no_batch() -> None:
    admission, groups = admit(groups_per_step=1, max_staleness=0)
    assert admission.evict(version=0, now=1.0) == []
    complete(admission, groups[0], reward=None, reason="environment_error")
    assert admission.batch(version=0) is None
    assert [d.reason for d in admission.evict(version=0, now=1.0)] == ["environment_error"]


def test_every_batch_holds_each_task_by_its_weight() -> None:
    admission = Admission(recipe(tasks={"slow": 1.0, "fast": 1.0}, groups_per_step=4), run_id="run")
    groups = admission.issue(version=0, now=0.0, steps_left=100)
    for group in groups:
        if group.prompt.task == "fast":
            complete(admission, group)
    assert admission.batch(version=0) is None, "four fast groups are no batch"
    for group in groups:
        if group.prompt.task == "slow":
            complete(admission, group)
    batch = admission.batch(version=0)
    assert batch is not None
    assert sorted(gid.split("/")[1].split("-")[0] for gid in batch) == ["fast", "fast", "slow", "slow"]


def test_open_groups_that_differ_from_the_record_are_reported() -> None:
    admission, groups = admit()
    admission.check({group.group_id for group in groups})
    with pytest.raises(ConservationViolated, match="run/a-0"):
        admission.check({group.group_id for group in groups[1:]})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_issued_is_trained_plus_dropped_plus_in_flight_whatever_happens(data: st.DataObject) -> None:
    admission = Admission(
        recipe(tasks={"a": 2.0, "b": 1.0}, groups_per_step=3, max_staleness=1, group_retries=1), run_id="run"
    )
    version, now = 0, 0.0
    for step in range(12):
        admission.issue(version=version, now=now, steps_left=12 - step)
        for group in list(admission.open.values()):
            for member in range(2):
                what = data.draw(st.sampled_from(["missing", "scored", "failed", "stale", "twice"]))
                if what == "missing":
                    continue
                reward = None if what == "failed" else 1.0
                start = version - 3 if what == "stale" else version
                for _ in range(1 + (what == "twice")):
                    admission.add(scored(group, member, reward=reward, start=start), nothing)
        now += data.draw(st.sampled_from([1.0, 200.0]))
        admission.evict(version=version, now=now)
        batch = admission.batch(version=version)
        if batch is not None:
            assert len(batch) == 3
            assert all(version - s.trajectory.start_version <= 1 for s in itertools.chain(*batch.values()))
            version += 1
            admission.retire(list(batch))
        admission.check(set(admission.open))
        assert len(admission.open) <= admission.budget
