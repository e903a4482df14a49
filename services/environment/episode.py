"""The only turn loop: plays one episode and describes it as one terminal trajectory, whatever happens.

Token in, token out: text is tokenised once, sampled ids are kept verbatim, history only grows.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
from pydantic import BaseModel

from services.environment.guard import EnvironmentBroke, checked_step, checked_text, guarded, opened
from services.environment.protocol import Demonstrator, Environment
from services.environment.threads import DaemonPool
from shared import metrics, registry, telemetry
from shared.errors import DeadlineExceeded, RollArtError
from shared.events import (
    CONTEXT_VERSION,
    FinishReason,
    Message,
    RolloutRequested,
    Sampling,
    TrajectoryCompleted,
    TrajectoryStatus,
    TurnGenerated,
    TurnRecord,
    TurnRequested,
)
from shared.policies import Policies, PolicyView
from shared.settings import EnvironmentSettings
from shared.turns import TurnClient

_LOG = structlog.get_logger()
_CLOSE_S = 5.0
"""A blocking environment that takes longer to close is left to itself."""
_CLOSERS = 2
T = TypeVar("T")


class _Ended(Exception):
    """The episode is over; the normal way out of the turn loop."""

    def __init__(self, status: TrajectoryStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(slots=True)
class _Record:
    """The trajectory as it grows. Arrays aligned, shape (T,)."""

    token_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    def add_context(self, ids: list[int]) -> None:
        self.token_ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [CONTEXT_VERSION] * len(ids)

    def add_sampled(self, turn: TurnGenerated) -> None:
        self.token_ids += turn.token_ids
        self.mask += [1] * len(turn.token_ids)
        self.logprobs += turn.logprobs
        for version, count in turn.versions:
            self.versions += [version] * count


class EpisodePlayer:
    """Plays rollouts of one process."""

    def __init__(
        self, turns: TurnClient, policies: Policies, pool: DaemonPool, settings: EnvironmentSettings
    ) -> None:
        self.turns = turns
        self.policies = policies
        self.pool = pool
        self.settings = settings
        self._configs: dict[str, tuple[type[Environment], BaseModel]] = {}
        # Apart from those that play: one that hangs in `close` holds up nothing but other ends.
        self._closers = DaemonPool(_CLOSERS)
        self._closing: set[asyncio.Task[None]] = set()
        self.aborted: dict[str, str] = {}
        """Runs whose episodes end now, and why: their tasks are cancelled."""

    async def play(self, rollout: RolloutRequested, *, traceparent: str) -> TrajectoryCompleted:
        """One episode. Raises nothing but CancelledError, when this process stops."""
        started = time.time()
        episode = Episode(rollout, self)
        span = telemetry.span("episode", traceparent)
        episode.traceparent = telemetry.traceparent_of(span, traceparent)
        limit = asyncio.timeout(max(rollout.deadline - started, 0.001))
        try:
            async with limit:
                await episode.run()
            raise AssertionError("an episode ends by raising")
        except _Ended as end:
            status, reason = end.status, end.reason
        except asyncio.CancelledError:
            if rollout.run_id not in self.aborted:
                raise
            status, reason = TrajectoryStatus.ABORTED, self.aborted[rollout.run_id]
        except Exception as error:
            late = isinstance(error, DeadlineExceeded) and time.time() >= rollout.deadline
            if limit.expired() or late:
                status, reason = TrajectoryStatus.ABORTED, "deadline"
            else:
                status, reason = TrajectoryStatus.FAILED, _reason(error)
                _LOG.warning(
                    "episode failed", trajectory=rollout.trajectory_id, reason=reason, exc_info=error
                )
        finally:
            episode.close()
            span.end()
        metrics.EPISODES.labels(rollout.task, status.value, reason).inc()
        return episode.completed(status, reason, started)

    def environment(self, rollout: RolloutRequested) -> Environment:
        """A fresh instance. Raises UnknownPlugin or Invalid."""
        key = f"{rollout.environment}\n{sorted(rollout.config.items())!r}"
        known = self._configs.get(key)
        if known is None:
            known = self._configs[key] = registry.configure(
                "environment", rollout.environment, rollout.config
            )
        kind, config = known
        instance: Environment = kind(config)  # type: ignore[call-arg]
        return instance

    def close_in_thread(self, close: Callable[[], None], *, task: str) -> None:
        """Close a blocking environment without waiting for it."""
        closing = asyncio.create_task(self._close(close, task))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close(self, close: Callable[[], None], task: str) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._closers.call(close)
        except Exception as error:
            _LOG.warning("environment did not close", task=task, error=repr(error))

    async def stop(self, *, within_s: float) -> None:
        """Let environments that are being closed finish."""
        if self._closing:
            await asyncio.wait(self._closing, timeout=within_s)


def _reason(error: Exception) -> str:
    """Why a trajectory failed, as a word to count by."""
    if isinstance(error, EnvironmentBroke):
        return error.reason
    return f"generation_{error.code}" if isinstance(error, RollArtError) else "internal_error"


class Episode:
    """One episode in progress."""

    def __init__(self, rollout: RolloutRequested, player: EpisodePlayer) -> None:
        self.traceparent = ""
        self._rollout = rollout
        self._player = player
        self._record = _Record()
        self._environment: Environment | None = None
        self._blocking = False
        self._start_version = 0
        self._reset_s = 0.0
        self._last_worker: str | None = None
        self._last_prefill_worker: str | None = None

    async def run(self) -> None:
        """Reset, then turns until the end. Always raises: `_Ended` or an error."""
        rollout = self._rollout
        self._environment = environment = opened(lambda: self._player.environment(rollout))
        self._blocking = guarded(lambda: bool(environment.blocking))
        began = time.perf_counter()
        observation = await self._call(
            lambda: checked_text(environment.reset(seed=rollout.seed, split=rollout.split))
        )
        self._reset_s = time.perf_counter() - began
        metrics.ENV_RESET_SECONDS.labels(rollout.task).observe(self._reset_s)
        if rollout.actor == "scripted":
            await self._run_scripted(environment, observation)
        else:
            await self._run_policy(environment, observation)

    async def _run_policy(self, environment: Environment, observation: str) -> None:
        policy = await self._player.policies.view(self._rollout.policy)
        self._start_version = policy.version
        tokenizer = policy.tokenizer
        self._observe(observation, tokenizer.opening_ids(observation))
        sampling = self._rollout.sampling.model_copy(update={"stop_token_ids": tuple(tokenizer.end_ids)})
        for number in range(self._rollout.max_turns):
            self._check_fresh(policy)
            action, generated = await self._act(policy, sampling, number)
            if generated.finish_reason is FinishReason.CONTEXT:
                raise _Ended(TrajectoryStatus.TRUNCATED, "context_exhausted")
            observation = await self._step(environment, action)
            ended = generated.token_ids[-1] in tokenizer.end_ids
            self._observe(observation, tokenizer.turn_ids(observation, ended=ended))
        raise _Ended(TrajectoryStatus.TRUNCATED, "turn_limit")

    def _observe(self, observation: str, ids: list[int]) -> None:
        """One more user message. One that leaves no room for an answer ends the episode, untokenised."""
        self._record.messages.append(Message(role="user", content=observation))
        if len(self._record.token_ids) + len(ids) >= self._rollout.context_window:
            raise _Ended(TrajectoryStatus.TRUNCATED, "context_exhausted")
        self._record.add_context(ids)

    def _check_fresh(self, policy: PolicyView) -> None:
        limit = self._rollout.max_staleness
        if limit is not None and policy.version - self._start_version > limit:
            raise _Ended(TrajectoryStatus.ABORTED, "stale")

    async def _act(self, policy: PolicyView, sampling: Sampling, number: int) -> tuple[str, TurnGenerated]:
        rollout, record = self._rollout, self._record
        began = time.perf_counter()
        turns = self._player.turns
        deadline = min(rollout.deadline, time.time() + self._player.settings.turn_deadline_s)
        turn = TurnRequested(
            run_id=rollout.run_id,
            trajectory_id=rollout.trajectory_id,
            attempt=rollout.attempt,
            turn=number,
            task=rollout.task,
            policy=rollout.policy,
            prompt_ids=record.token_ids,
            sampling=sampling,
            context_window=rollout.context_window,
            min_version=self._start_version,
            deadline=deadline,
            try_deadline=turns.try_deadline(deadline),
            asker=turns.asker,
            reply_partition=turns.partition,
            last_worker=self._last_worker,
            last_prefill_worker=self._last_prefill_worker,
            affinity=rollout.affinity,
            prefill_affinity=rollout.prefill_affinity,
            phases=rollout.phases,
        )
        generated = await turns.ask(turn, traceparent=self.traceparent)
        wait_s = time.perf_counter() - began
        metrics.TURN_SECONDS.labels(rollout.task).observe(wait_s)
        self._last_worker = generated.worker_id
        handover = generated.handover
        self._last_prefill_worker = handover.prefill_worker if handover else None
        if not generated.token_ids:
            # The model's own window is smaller than the rollout's, and full.
            raise _Ended(TrajectoryStatus.TRUNCATED, "context_exhausted")
        action = policy.tokenizer.action_text(generated.token_ids)
        record.messages.append(Message(role="assistant", content=action))
        record.turns.append(
            TurnRecord(
                start=len(record.token_ids),
                sampled=len(generated.token_ids),
                finish_reason=generated.finish_reason,
                worker_id=generated.worker_id,
                device_class=generated.device_class,
                cached_tokens=generated.cached_tokens,
                wait_s=wait_s,
            )
        )
        record.add_sampled(generated)
        return action, generated

    async def _step(self, environment: Environment, action: str) -> str:
        """The next observation; raises `_Ended` where there is none."""
        began = time.perf_counter()
        step = await self._call(lambda: checked_step(environment.step(action)))
        env_s = time.perf_counter() - began
        metrics.ENV_STEP_SECONDS.labels(self._rollout.task).observe(env_s)
        turns = self._record.turns
        turns[-1] = turns[-1].model_copy(update={"reward": step.reward, "env_s": env_s})
        if step.terminated:
            raise _Ended(TrajectoryStatus.FINISHED, "")
        if step.truncated:
            raise _Ended(TrajectoryStatus.TRUNCATED, "environment_limit")
        return step.observation

    async def _run_scripted(self, environment: Environment, observation: str) -> None:
        rollout, record = self._rollout, self._record
        if not isinstance(environment, Demonstrator):
            message = f"environment {rollout.environment!r} has no scripted play"
            raise EnvironmentBroke(message, reason="environment_not_scripted")
        rng = random.Random(f"{rollout.trajectory_id}/{rollout.seed}")
        record.messages.append(Message(role="user", content=observation))
        for _ in range(rollout.max_turns):
            action = await self._call(
                lambda: checked_text(environment.scripted_action(rng, skill=rollout.skill))
            )
            record.messages.append(Message(role="assistant", content=action))
            record.turns.append(TurnRecord(start=0, sampled=0))
            observation = await self._step(environment, action)
            record.messages.append(Message(role="user", content=observation))
            await asyncio.sleep(0)
        raise _Ended(TrajectoryStatus.TRUNCATED, "turn_limit")

    async def _call(self, function: Callable[[], T]) -> T:
        """Blocking environments run in threads, others right here."""
        if self._blocking:
            return await self._player.pool.call(lambda: guarded(function))
        return guarded(function)

    def close(self) -> None:
        """Release the environment; a failure to do so is logged, not raised."""
        environment = self._environment
        if environment is None:
            return
        if self._blocking:
            self._player.close_in_thread(lambda: guarded(environment.close), task=self._rollout.task)
            return
        try:
            guarded(environment.close)
        except EnvironmentBroke as error:
            _LOG.warning("environment did not close", task=self._rollout.task, error=repr(error))

    def completed(self, status: TrajectoryStatus, reason: str, started: float) -> TrajectoryCompleted:
        """The terminal event."""
        rollout, record = self._rollout, self._record
        sampled = [version for version in record.versions if version != CONTEXT_VERSION]
        return TrajectoryCompleted.model_construct(
            run_id=rollout.run_id,
            trajectory_id=rollout.trajectory_id,
            group_id=rollout.group_id,
            member=rollout.member,
            attempt=rollout.attempt,
            task=rollout.task,
            purpose=rollout.purpose,
            split=rollout.split,
            seed=rollout.seed,
            policy=rollout.policy,
            status=status,
            reason=reason,
            token_ids=record.token_ids,
            mask=record.mask,
            logprobs=record.logprobs,
            versions=record.versions,
            start_version=min([self._start_version, *sampled]),
            sampling=rollout.sampling,
            turns=record.turns,
            messages=record.messages,
            reward=rollout.reward,
            reset_s=self._reset_s,
            started_at=started,
            completed_at=time.time(),
        )
