"""What a session has become: one trajectory for each end of its tree."""

from __future__ import annotations

import time

from services.router.sessions.tree import Tree, Turn
from shared.events import (
    CONTEXT_VERSION,
    RewardSpec,
    TrajectoryCompleted,
    TrajectoryStatus,
    TurnRecord,
)
from shared.state import SessionRecord

SCORER = "posted"


def branch_id(record: SessionRecord, branch: int) -> str:
    """Trajectory of a branch: the first has the plain name."""
    suffix = f"b{branch}" if branch else ""
    return f"{record.group_id}.{record.member}{suffix}#{record.attempt}"


def trajectories(record: SessionRecord, tree: Tree) -> list[TrajectoryCompleted]:
    """One for each end, in the order of their branches; of a session without a turn an empty, aborted one.

    A token is trained once: what two branches share belongs to the earlier one and is context in the other.
    """
    ends = sorted(tree.ends(), key=lambda turn: (turn.branch, turn.number))
    if not ends:
        return [_trajectory(record, tree, None, set())]
    told: set[int] = set()
    return [_trajectory(record, tree, end, told) for end in ends]


def _trajectory(record: SessionRecord, tree: Tree, end: Turn | None, told: set[int]) -> TrajectoryCompleted:
    """Up to an end. `told`: turns that were part of another; those of this one are added."""
    token_ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    turns = []
    path = tree.path(end)
    for turn in path:
        own = turn.number not in told and end is not None and turn.draw == end.draw
        count = len(turn.token_ids)
        token_ids += turn.context_ids
        mask += [0] * len(turn.context_ids)
        logprobs += [0.0] * len(turn.context_ids)
        versions += [CONTEXT_VERSION] * len(turn.context_ids)
        if own:
            told.add(turn.number)
            turns.append(_turn_record(turn, start=len(token_ids)))
        token_ids += turn.token_ids
        mask += [int(own)] * count
        logprobs += turn.logprobs if own else [0.0] * count
        drawn = [version for version, number in turn.versions for _ in range(number)]
        versions += drawn if own else [CONTEXT_VERSION] * count
    outcome = record.outcome
    assert outcome is not None
    status, reason = outcome.status, outcome.reason
    if end is None and status is not TrajectoryStatus.ABORTED:
        status, reason = TrajectoryStatus.ABORTED, "empty"
    return TrajectoryCompleted(
        run_id=record.run_id,
        trajectory_id=branch_id(record, end.branch if end is not None else 0),
        group_id=record.group_id,
        member=record.member,
        attempt=record.attempt,
        task=record.task,
        purpose="task",
        split="train",
        seed=0,
        policy=record.policy,
        status=status,
        reason=reason,
        token_ids=token_ids,
        mask=mask,
        logprobs=logprobs,
        versions=versions,
        start_version=record.start_version,
        sampling=end.sampling if end is not None else record.sampling,
        turns=turns,
        messages=[message for turn in path for message in turn.messages],
        reward=RewardSpec(
            scorer=SCORER, config={"reward": outcome.reward, "components": dict(outcome.components)}
        ),
        started_at=record.created_at,
        completed_at=time.time(),
    )


def _turn_record(turn: Turn, *, start: int) -> TurnRecord:
    return TurnRecord(
        start=start,
        sampled=len(turn.token_ids),
        finish_reason=turn.finish_reason,
        worker_id=turn.worker_id,
        device_class=turn.device_class,
        cached_tokens=turn.cached_tokens,
        wait_s=turn.wait_s,
    )
