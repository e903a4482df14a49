"""Tasks: what a request means, its rollouts, and how far it is. Called by `routes.tasks`.

A task is a roll-out of given seeds outside any run. Its rollouts travel the same way as a run's, under
purpose `task`; nothing of it is trained.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, JsonValue

from services.gateway.bodies import invalid
from shared import recipe as recipes
from shared import registry, telemetry
from shared.api import Task, TaskRequest, TaskResult
from shared.bus import Bus
from shared.errors import NotFound
from shared.events import RewardSpec, RolloutRequested, Sampling
from shared.placement import Placement
from shared.recipe import Recipe
from shared.state import State, TaskRecord
from shared.topics import ROLLOUTS

PURPOSE = "task"
_SENT_TOGETHER = 256
_SCORING_S = 30.0
"""A trajectory that ends at the deadline still has to be scored and recorded."""


class Resolved(BaseModel):
    """A request with everything filled in, as it is remembered."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    task: str
    policy: str
    request: TaskRequest
    play: recipes.Task
    sampling: Sampling
    context_window: int
    deadline: float
    placement: Placement = Placement()


@dataclass(frozen=True)
class _Source:
    """Where defaults come from: a run's recipe, or none."""

    run_id: str = ""
    recipe: Recipe | None = None


async def resolve(state: State, request: TaskRequest) -> Resolved:
    """Fill a request in. Raises Invalid naming the field, NotFound for an unknown run or policy."""
    source = await _source(state, request)
    label, play = _play(request, source)
    policy = await _policy(state, request, source)
    rollout = source.recipe.rollout if source.recipe else recipes.Rollout()
    window = request.context_window or rollout.context_window
    if play.max_tokens_per_turn >= window:
        raise invalid("max_tokens_per_turn", f"must be below context_window ({window})")
    temperature = rollout.temperature if request.temperature is None else request.temperature
    sampling = Sampling(
        temperature=temperature, top_p=rollout.top_p, top_k=rollout.top_k, max_tokens=play.max_tokens_per_turn
    )
    return Resolved(
        task=label,
        policy=policy,
        request=request,
        play=play,
        sampling=sampling,
        context_window=window,
        deadline=time.time() + request.deadline_s,
        placement=_placement(request, source),
    )


def _placement(request: TaskRequest, source: _Source) -> Placement:
    """As the run's recipe says for a task of its own; a class in the request comes first."""
    if request.affinity is not None:
        return Placement(request.affinity, None, source.recipe.affinity.phases if source.recipe else None)
    if source.recipe is not None and request.environment is None:
        return source.recipe.placement(request.task or "")
    return Placement()


async def _source(state: State, request: TaskRequest) -> _Source:
    if request.run_id is not None:
        record = await state.run(request.run_id)
        return _Source(record.run_id, Recipe.model_validate_json(record.recipe))
    needs_policy = request.actor == "policy" and request.policy is None
    if not needs_policy and request.environment is not None:
        return _Source()
    for record in await state.runs():
        if await state.policy(record.run_id) is not None:
            return _Source(record.run_id, Recipe.model_validate_json(record.recipe))
    if needs_policy:
        raise NotFound('no run has a policy yet: submit a recipe, or set actor = "scripted"')
    raise NotFound("no run has a policy yet: name a run_id, or an environment in place of a task")


def _play(request: TaskRequest, source: _Source) -> tuple[str, recipes.Task]:
    """The task's label and how it is played."""
    if request.environment is not None:
        play = _own_environment(request, request.environment)
        label = request.task or request.environment.rpartition(":")[2].lower()
    else:
        known = source.recipe.tasks if source.recipe else {}
        label = request.task or ""
        if label not in known:
            raise invalid("task", f"run {source.run_id} has no task {label!r}; known: {', '.join(known)}")
        play = known[label]
        if request.reward is not None:
            _check_plugin("reward", request.reward, {}, "reward")
    changes: dict[str, object] = {
        key: value
        for key in ("max_turns", "max_tokens_per_turn")
        if (value := getattr(request, key)) is not None
    }
    if request.reward is not None:
        changes |= {"reward": request.reward, "reward_config": request.reward_config or {}}
    return label, play.model_copy(update=changes)


def _own_environment(request: TaskRequest, environment: str) -> recipes.Task:
    _check_plugin("environment", environment, request.config or {}, "config")
    reward = request.reward or "episode_return"
    _check_plugin("reward", reward, request.reward_config or {}, "reward_config")
    return recipes.Task(
        environment=environment,
        config=request.config or {},
        reward=reward,
        reward_config=request.reward_config or {},
    )


def _check_plugin(kind: registry.Kind, name: str, config: dict[str, JsonValue], field: str) -> None:
    registry.load(kind, name, field=kind)
    registry.configure(kind, name, config, field=field)


async def _policy(state: State, request: TaskRequest, source: _Source) -> str:
    if request.actor == "scripted":
        return ""
    policy = request.policy or source.run_id
    name, _, version = policy.partition("@")
    if await state.policy(name) is None:
        raise NotFound(
            f"no policy {name!r}: a policy has the name of its run, and exists once the run has a model"
        )
    if version:
        await state.policy_version(name, int(version))
    return policy


def rollouts(task_id: str, resolved: Resolved) -> Iterator[RolloutRequested]:
    """One rollout per seed and member, always the same ones for the same task."""
    request, play = resolved.request, resolved.play
    for seed in request.seeds:
        group_id = f"{task_id}/{seed}"
        for member in range(request.members):
            yield RolloutRequested(
                run_id=task_id,
                trajectory_id=f"{group_id}.{member}#0",
                group_id=group_id,
                member=member,
                task=resolved.task,
                environment=play.environment,
                config=play.config,
                seed=seed,
                split=request.split,
                purpose=PURPOSE,
                actor=request.actor,
                skill=request.skill if request.actor == "scripted" else 0.0,
                policy=resolved.policy,
                sampling=resolved.sampling,
                max_turns=play.max_turns,
                context_window=resolved.context_window,
                deadline=resolved.deadline,
                affinity=resolved.placement.affinity,
                prefill_affinity=resolved.placement.prefill_affinity,
                phases=resolved.placement.phases,
                reward=RewardSpec(scorer=play.reward, config=play.reward_config),
            )


async def start(state: State, bus: Bus, task_id: str, resolved: Resolved) -> TaskRecord:
    """Publish the rollouts, then remember the task.

    In this order: where this process dies between, a repeat of the request publishes the same ids again,
    and the first result of an id counts.
    """
    requests = list(rollouts(task_id, resolved))
    for first in range(0, len(requests), _SENT_TOGETHER):
        await asyncio.gather(*(_send(bus, item) for item in requests[first : first + _SENT_TOGETHER]))
    record = TaskRecord(
        task_id=task_id,
        request=resolved.model_dump_json(),
        trajectory_ids=[item.trajectory_id for item in requests],
        created_at=time.time(),
    )
    await state.create_task(record)
    return record


async def _send(bus: Bus, request: RolloutRequested) -> None:
    await bus.send(
        ROLLOUTS,
        request,
        key=request.trajectory_id,
        run_id=request.run_id,
        traceparent=telemetry.root_traceparent(request.trajectory_id),
        purpose=PURPOSE,
    )


def view(record: TaskRecord, raw_results: dict[str, str], *, now: float) -> Task:
    """How far a task is."""
    resolved = Resolved.model_validate_json(record.request)
    results = [TaskResult.model_validate_json(raw) for raw in raw_results.values()]
    results.sort(key=lambda result: (result.seed, result.member))
    total = len(record.trajectory_ids)
    late = now > resolved.deadline + _SCORING_S
    lost = total - len(results) if late else 0
    rewards = [result.reward for result in results if result.reward is not None]
    failures = Counter(result.reason or result.status for result in results if result.reward is None)
    if lost:
        failures["lost"] += lost
    return Task(
        task_id=record.task_id,
        state="finished" if len(results) + lost >= total else "running",
        task=resolved.task,
        environment=resolved.play.environment,
        policy=resolved.policy,
        created_at=record.created_at,
        total=total,
        done=len(results),
        lost=lost,
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        failures=dict(failures),
        results=results,
        trajectory_ids=record.trajectory_ids,
    )
