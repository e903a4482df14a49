"""What is rolled out, and what has come back: the budget of open groups and the buffer of samples.

A group is issued only while `open < (α + 1) · groups_per_step`; it closes when it was trained and its
version published, or dropped by a reason. `issued = trained + dropped + in flight` holds at every moment.
Pure bookkeeping: no clock but what it is given, no broker.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from shared.errors import ConservationViolated, Internal
from shared.events import TrajectoryScored
from shared.recipe import Recipe
from shared.summary import Groups, check_conservation

GRACE_S = 15.0
"""After the episodes' own deadline: for the way back through reward and broker."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of one task: what a group's members share."""

    task: str
    index: int
    attempt: int = 0
    """How often it was issued before."""
    failures: int = 0
    """How many of these attempts failed for another reason than staleness."""


@dataclass
class Group:
    """An open group."""

    group_id: str
    prompt: Prompt
    version: int
    """Policy version when it was issued."""
    deadline: float
    members: dict[int, TrajectoryScored] = field(default_factory=dict)
    acks: list[Callable[[], None]] = field(default_factory=list)
    complete: bool = False
    order: int = 0
    """Issue order: the oldest complete group is consumed first."""

    def fresh(self, version: int, max_staleness: int) -> list[TrajectoryScored]:
        """Members with a reward and a lag within the bound at this version."""
        return [
            scored
            for scored in self.members.values()
            if scored.reward is not None and version - scored.trajectory.start_version <= max_staleness
        ]


@dataclass(frozen=True)
class Dropped:
    """A group that left without being trained."""

    group: Group
    reason: str
    given_up: bool
    """Its prompt will not be issued again."""


class RoundRobin:
    """Smooth weighted round robin: every prefix of the sequence holds each name nearly by its weight."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._credit = dict.fromkeys(weights, 0.0)

    def next(self) -> str:
        """The next name."""
        for name, weight in self._weights.items():
            self._credit[name] += weight
        chosen = max(self._credit, key=lambda name: self._credit[name])
        self._credit[chosen] -= sum(self._weights.values())
        return chosen


class Admission:
    """The ledger of one run's training groups."""

    def __init__(self, recipe: Recipe, *, run_id: str) -> None:
        self._recipe = recipe
        self._run_id = run_id
        self._rollout = recipe.rollout
        self._min_members = min(2, recipe.rollout.group_size)
        self._again: deque[Prompt] = deque()
        self._next_index: dict[str, int] = dict.fromkeys(recipe.tasks, 0)
        weights = {name: task.weight for name, task in recipe.tasks.items()}
        self._issue_turn = RoundRobin(weights)
        self._batch_turn = RoundRobin(weights)
        self._quota: Counter[str] = Counter()
        self._order = itertools.count()
        self.open: dict[str, Group] = {}
        self.issued = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.given_up: list[str] = []
        """Ids of prompts that failed for good."""
        self.late = 0
        """Trajectories of groups that were closed before they came."""
        self.duplicates = 0
        self.failures_in_a_row = 0

    @property
    def budget(self) -> int:
        """Open groups at most."""
        return (self._rollout.max_staleness + 1) * self._rollout.groups_per_step

    def issue(self, *, version: int, now: float, steps_left: int) -> list[Group]:
        """New groups up to the budget, and to what the steps that are left can train."""
        limit = min(self.budget, steps_left * self._rollout.groups_per_step)
        made = []
        while len(self.open) < limit:
            prompt = self._again.popleft() if self._again else self._next_prompt()
            group_id = f"{self._run_id}/{prompt.task}-{prompt.index}"
            if group_id in self.open:
                raise Internal(f"group {group_id} is open twice")
            group = Group(
                group_id=group_id,
                prompt=prompt,
                version=version,
                deadline=now + self._rollout.deadline_s + GRACE_S,
                order=next(self._order),
            )
            self.open[group_id] = group
            self.issued += 1
            made.append(group)
        return made

    def _next_prompt(self) -> Prompt:
        return self._fresh_prompt(self._issue_turn.next())

    def _fresh_prompt(self, task: str) -> Prompt:
        index = self._next_index[task]
        self._next_index[task] = index + 1
        return Prompt(task, index)

    def add(self, scored: TrajectoryScored, ack: Callable[[], None]) -> Group | None:
        """A trajectory has come. Returns its group if this completed it.

        A duplicate, or one of an attempt that was closed, is acknowledged, counted and left out.
        """
        trajectory = scored.trajectory
        group = self.open.get(trajectory.group_id)
        if group is None or group.prompt.attempt != trajectory.attempt or group.complete:
            self.late += 1
            ack()
            return None
        if trajectory.member in group.members:
            self.duplicates += 1
            ack()
            return None
        group.members[trajectory.member] = scored
        group.acks.append(ack)
        if len(group.members) < self._rollout.group_size:
            return None
        group.complete = True
        return group

    def evict(self, *, version: int, now: float) -> list[Dropped]:
        """Drop what can no longer be trained: too few members with a reward, or too stale, or overdue.

        Eager: called at every new version and before a batch is formed.
        """
        dropped = []
        for group in list(self.open.values()):
            reason = self._fault(group, version, now)
            if reason:
                dropped.append(self._drop(group, reason))
        return dropped

    def _fault(self, group: Group, version: int, now: float) -> str:
        if not group.complete:
            if now < group.deadline:
                return ""
            # Overdue: what has come is a group of its own, if it is enough.
            group.complete = True
        if len(group.fresh(version, self._rollout.max_staleness)) >= self._min_members:
            return ""
        rewarded = [scored for scored in group.members.values() if scored.reward is not None]
        if len(rewarded) >= self._min_members or any(
            scored.trajectory.reason == "stale" for scored in group.members.values()
        ):
            return "stale"
        if len(group.members) < self._rollout.group_size:
            return "deadline"
        if len(rewarded) == 1:
            return "singleton_group"
        reasons = Counter(scored.trajectory.reason or scored.reason for scored in group.members.values())
        return reasons.most_common(1)[0][0]

    def _drop(self, group: Group, reason: str) -> Dropped:
        prompt = group.prompt
        failed = reason != "stale"
        failures = prompt.failures + failed
        given_up = failed and failures > self._rollout.group_retries
        self._close(group)
        self.dropped[reason] += 1
        if given_up:
            self.given_up.append(group.group_id)
            self._again.append(self._fresh_prompt(prompt.task))
        else:
            self._again.append(Prompt(prompt.task, prompt.index, prompt.attempt + 1, failures))
        self.failures_in_a_row += failed
        return Dropped(group, reason, given_up)

    def batch(self, *, version: int) -> Mapping[str, list[TrajectoryScored]] | None:
        """A batch, if it is complete: group id → members within the staleness bound.

        Every batch holds each task by its weight, and of each task the oldest complete groups: a slow task is
        neither starved by fast ones nor trained in batches of its own.
        """
        if not self._quota:
            self._quota = Counter(self._batch_turn.next() for _ in range(self._rollout.groups_per_step))
        chosen: list[Group] = []
        for task, wanted in self._quota.items():
            usable = [g for g in self.open.values() if g.prompt.task == task and self._usable(g, version)]
            if len(usable) < wanted:
                return None
            chosen += sorted(usable, key=lambda group: group.order)[:wanted]
        self._quota = Counter()
        chosen.sort(key=lambda group: group.order)
        return {group.group_id: group.fresh(version, self._rollout.max_staleness) for group in chosen}

    def _usable(self, group: Group, version: int) -> bool:
        """Complete, with members enough that can still be trained; what is not goes at the next eviction."""
        return group.complete and len(group.fresh(version, self._rollout.max_staleness)) >= self._min_members

    def retire(self, group_ids: list[str]) -> list[Callable[[], None]]:
        """Close trained groups whose version is published. Returns the acknowledgements they owe."""
        owed = []
        for group_id in group_ids:
            group = self.open[group_id]
            self._close(group)
            self.trained += 1
            owed += group.acks
        self.failures_in_a_row = 0
        return owed

    def drop_all(self, reason: str) -> list[Dropped]:
        """The run ends: nothing stays open."""
        dropped = []
        for group in list(self.open.values()):
            self._close(group)
            self.dropped[reason] += 1
            dropped.append(Dropped(group, reason, True))
        return dropped

    def _close(self, group: Group) -> None:
        del self.open[group.group_id]

    def groups(self) -> Groups:
        """The ledger's sums."""
        return Groups(
            issued=self.issued, trained=self.trained, dropped=dict(self.dropped), in_flight=len(self.open)
        )

    def check(self, recorded_open: set[str]) -> None:
        """Conservation, and agreement with the open groups on record. Raises ConservationViolated."""
        check_conservation(self.groups())
        if recorded_open != set(self.open):
            raise ConservationViolated(
                f"open groups on record differ from the ledger's: only on record "
                f"{sorted(recorded_open - set(self.open))[:5]}, only in the ledger "
                f"{sorted(set(self.open) - recorded_open)[:5]}"
            )

    def ledger(self) -> dict[str, JsonValue]:
        """For the checkpoint: what a resumed run needs to go on without loss or repetition."""
        return {
            "next_index": {**self._next_index},
            "again": [[p.task, p.index, p.attempt, p.failures] for p in self._again],
            "open": [[g.prompt.task, g.prompt.index, g.prompt.attempt, g.prompt.failures]
                     for g in self.open.values()],
            "issued": self.issued,
            "trained": self.trained,
            "dropped": {**self.dropped},
        }  # fmt: skip
