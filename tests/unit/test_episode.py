"""The turn loop: token in, token out; one terminal trajectory; tries of a turn."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from turn_wire import EOS, HE, HELLO, LLO, Wire, WireState, failed, generated, player_on, rollout, until

from services.environment.protocol import EnvironmentConfig, Split, Step
from services.environment.threads import DaemonPool
from shared.errors import Conflict
from shared.events import (
    Event,
    FinishReason,
    Handover,
    TrajectoryCompleted,
    TrajectoryStatus,
    TurnRequested,
)
from shared.supervisor import Supervisor

Answer = Callable[[TurnRequested], list[Event]]


class Echo:
    """Repeats what it hears; the episode ends with the action "end"."""

    blocking: ClassVar[bool] = False

    class Config(EnvironmentConfig):
        opening: int = 3
        answer: int = 3

    def __init__(self, config: Config) -> None:
        self.config = config
        self.actions: list[str] = []

    def reset(self, *, seed: int, split: Split) -> str:
        return "x" * self.config.opening

    def step(self, action: str) -> Step:
        return Step("y" * self.config.answer, 0.25, action == "end", False)

    def close(self) -> None:
        pass


ECHO = "test_episode:Echo"


async def play(folder: Path, answer: Answer, **changes: object) -> tuple[TrajectoryCompleted, Wire]:
    wire = Wire(answer)
    player, _ = player_on(wire, folder)
    completed = await player.play(rollout(ECHO, **changes), traceparent="")
    # As a consumer gets it.
    return TrajectoryCompleted.model_validate_json(completed.model_dump_json()), wire


def says(*ids: int, **changes: object) -> Answer:
    return lambda turn: [generated(turn, list(ids), **changes)]


async def test_sampled_ids_are_in_every_later_prompt_as_they_were_sampled(tmp_path: Path) -> None:
    completed, wire = await play(tmp_path, says(HE, LLO, EOS), max_turns=4)
    assert [m.content for m in completed.messages if m.role == "assistant"] == ["hello"] * 4
    assert HELLO not in completed.token_ids
    assert len(wire.turns) == 4
    for before, after in zip(wire.turns, wire.turns[1:], strict=False):
        assert after.prompt_ids[: len(before.prompt_ids) + 3] == [*before.prompt_ids, HE, LLO, EOS]


@pytest.mark.parametrize("seed", range(10))
async def test_random_answers_are_kept_verbatim_and_the_arrays_stay_aligned(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    sampled: list[int] = []
    logprobs: list[float] = []

    def answer(turn: TurnRequested) -> list[Event]:
        ids = [rng.randrange(EOS + 1) for _ in range(rng.randint(1, 6))]
        # Drawn log-probabilities too, so that a shift by one would show.
        values = [-rng.random() for _ in ids]
        sampled.extend(ids)
        logprobs.extend(values)
        return [generated(turn, ids, logprobs=values, versions=[(3, 1), (4, len(ids) - 1)])]

    completed, _ = await play(tmp_path, answer, max_turns=100, context_window=10**6)
    assert len(completed.turns) == 100
    length = len(completed.token_ids)
    assert [len(a) for a in (completed.mask, completed.logprobs, completed.versions)] == [length] * 3
    trained = [i for i, m in enumerate(completed.mask) if m]
    assert [completed.token_ids[i] for i in trained] == sampled
    assert [completed.logprobs[i] for i in trained] == logprobs
    assert {completed.versions[i] for i in trained} == {3, 4}
    assert all(completed.versions[i] == -1 for i, m in enumerate(completed.mask) if not m)
    assert trained == [i for turn in completed.turns for i in range(turn.start, turn.start + turn.sampled)]


async def test_the_last_version_of_the_start_is_asked_for_and_none_older_is_recorded(tmp_path: Path) -> None:
    completed, wire = await play(tmp_path, says(HE, EOS, versions=[(3, 1), (5, 1)]), max_turns=2)
    assert [turn.min_version for turn in wire.turns] == [3, 3]
    assert completed.start_version == 3


async def test_each_turn_says_where_it_may_run_and_which_workers_may_hold_its_kv(tmp_path: Path) -> None:
    def answer(turn: TurnRequested) -> list[Event]:
        handover = Handover(prefill_worker="p1", prefill_class="compute") if turn.turn < 2 else None
        return [generated(turn, [HE, EOS], worker_id=f"d{turn.turn}", handover=handover)]

    wish = {"affinity": "bandwidth", "prefill_affinity": "compute", "phases": "auto"}
    _, wire = await play(tmp_path, answer, max_turns=4, **wish)
    assert [(t.affinity, t.prefill_affinity, t.phases) for t in wire.turns] == [tuple(wish.values())] * 4
    held = [(turn.last_worker, turn.last_prefill_worker) for turn in wire.turns]
    assert held == [(None, None), ("d0", "p1"), ("d1", "p1"), ("d2", None)]


@pytest.mark.parametrize(("answer", "turns"), [(EOS, 0), (HE, 1)])
async def test_a_window_filled_by_the_observation_ends_the_episode_cleanly(
    tmp_path: Path, answer: int, turns: int
) -> None:
    opening = 88 if turns == 0 else 60
    completed, wire = await play(
        tmp_path, says(answer), config={"opening": opening, "answer": 60}, context_window=100
    )
    assert (completed.status, completed.reason) == (TrajectoryStatus.TRUNCATED, "context_exhausted")
    assert len(completed.turns) == len(wire.turns) == turns
    assert len(completed.token_ids) < 100
    assert completed.messages[-1].role == "user"


async def test_a_turn_cut_by_the_window_is_the_last_and_its_action_is_not_played(tmp_path: Path) -> None:
    completed, wire = await play(tmp_path, says(HE, finish_reason=FinishReason.CONTEXT))
    assert (completed.status, completed.reason) == (TrajectoryStatus.TRUNCATED, "context_exhausted")
    assert len(wire.turns) == 1
    assert [turn.finish_reason for turn in completed.turns] == [FinishReason.CONTEXT]
    assert [turn.reward for turn in completed.turns] == [0.0]


async def test_a_model_without_room_for_a_token_ends_the_episode_without_a_turn(tmp_path: Path) -> None:
    completed, _ = await play(tmp_path, says(finish_reason=FinishReason.CONTEXT))
    assert (completed.status, completed.reason) == (TrajectoryStatus.TRUNCATED, "context_exhausted")
    assert completed.turns == []
    assert set(completed.mask) == {0}


async def test_a_finished_episode_keeps_its_reward_however_long_its_last_answer_was(tmp_path: Path) -> None:
    ids = [ord(letter) - 32 for letter in "end"]
    completed, _ = await play(tmp_path, says(*ids, EOS), context_window=2000, config={"answer": 5000})
    assert (completed.status, completed.reason) == (TrajectoryStatus.FINISHED, "")
    assert [turn.reward for turn in completed.turns] == [0.25]


@pytest.mark.parametrize(("limit", "turns"), [(1, 2), (None, 4)])
async def test_an_episode_is_stale_at_the_turn_after_the_bound_and_never_without_one(
    tmp_path: Path, limit: int | None, turns: int
) -> None:
    state = WireState()
    wire = Wire(lambda turn: [generated(turn, [HE, EOS])])
    player, policies = player_on(wire, tmp_path, state=state)
    view = await policies.view("toy")
    answer = wire._answer

    def and_publish(turn: TurnRequested) -> list[Event]:
        view.version += 1
        return answer(turn)

    wire._answer = and_publish
    completed = await player.play(rollout(ECHO, max_staleness=limit, max_turns=4), traceparent="")
    assert len(completed.turns) == turns
    wanted = (TrajectoryStatus.TRUNCATED, "turn_limit")
    assert (completed.status, completed.reason) == (
        wanted if limit is None else (TrajectoryStatus.ABORTED, "stale")
    )
    assert completed.start_version == 3


async def test_an_error_of_generation_is_named_and_gives_no_reward(tmp_path: Path) -> None:
    completed, _ = await play(tmp_path, lambda turn: [failed(turn, "internal", retryable=False)])
    assert (completed.status, completed.reason) == (TrajectoryStatus.FAILED, "generation_internal")


async def test_a_retryable_failure_and_a_silent_try_are_asked_again_and_late_replies_dropped(
    tmp_path: Path,
) -> None:
    def answer(turn: TurnRequested) -> list[Event]:
        if turn.try_number == 0:
            return [failed(turn, "no_worker", retryable=True)]
        if turn.try_number == 1:
            return []
        earlier = turn.model_copy(update={"try_number": 1})
        return [generated(earlier, [HE, HE]), generated(turn, [LLO, EOS]), generated(turn, [HE])]

    wire = Wire(answer)
    player, _ = player_on(wire, tmp_path)
    player.turns._try_deadline_s = 0.3
    async with Supervisor() as supervisor:
        supervisor.start("sweep", player.turns._sweep)
        completed = await player.play(rollout(ECHO, max_turns=1), traceparent="")
    assert [turn.try_number for turn in wire.turns] == [0, 1, 2]
    assert [completed.token_ids[i] for i, m in enumerate(completed.mask) if m] == [LLO, EOS]
    assert player.turns.late_replies == 2
    assert player.turns._asked == {}
    assert all(turn.try_deadline <= turn.deadline for turn in wire.turns)
    assert wire.turns[2].try_deadline > wire.turns[1].try_deadline


async def test_an_unanswered_turn_fails_by_its_deadline(tmp_path: Path) -> None:
    wire = Wire(lambda turn: [])
    player, _ = player_on(wire, tmp_path)
    player.settings = player.settings.model_copy(update={"turn_deadline_s": 0.2})
    async with Supervisor() as supervisor:
        supervisor.start("sweep", player.turns._sweep)
        completed = await player.play(rollout(ECHO), traceparent="")
    assert (completed.status, completed.reason) == (TrajectoryStatus.FAILED, "generation_deadline_exceeded")


async def test_the_deadline_of_the_episode_aborts_it(tmp_path: Path) -> None:
    completed, _ = await play(tmp_path, lambda turn: [], seconds=0.2)
    assert (completed.status, completed.reason) == (TrajectoryStatus.ABORTED, "deadline")


async def test_the_same_turn_cannot_be_asked_twice_at_once(tmp_path: Path) -> None:
    wire = Wire(lambda turn: [])
    player, _ = player_on(wire, tmp_path)
    first = asyncio.create_task(player.play(rollout(ECHO), traceparent=""))
    await until(lambda: wire.turns)
    with pytest.raises(Conflict):
        await player.turns.ask(wire.turns[0])
    player.turns._on_replies([failed(wire.turns[0], "internal", retryable=False)])
    assert (await first).reason == "generation_internal"


@pytest.mark.parametrize("policy", ["unknown", "toy@x", "toy@"])
async def test_an_unknown_policy_fails_the_episode(tmp_path: Path, policy: str) -> None:
    completed, wire = await play(tmp_path, says(HE), policy=policy)
    assert (completed.status, completed.reason) == (TrajectoryStatus.FAILED, "generation_not_found")
    assert wire.turns == []


async def test_a_call_that_hangs_costs_the_pool_no_thread_and_its_thread_ends_with_it() -> None:
    pool = DaemonPool(1)
    release, entered = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        release.wait()

    hung = asyncio.create_task(pool.call(hang))
    await asyncio.to_thread(entered.wait)
    queued = asyncio.create_task(pool.call(lambda: None))
    await asyncio.sleep(0)
    queued.cancel()
    hung.cancel()
    await asyncio.gather(hung, queued, return_exceptions=True)
    assert await pool.call(lambda: 7) == 7
    assert pool.abandoned == 1
    before = threading.active_count()
    release.set()
    await until(lambda: pool.abandoned == 0)
    await until(lambda: threading.active_count() == before - 1)
    assert await pool.call(lambda: 8) == 8


@pytest.mark.parametrize(
    "error", [StopIteration(), SystemExit(2), asyncio.CancelledError(), ValueError("no")]
)
async def test_whatever_a_call_raises_comes_back(error: BaseException) -> None:
    def fail() -> None:
        raise error

    pool = DaemonPool(1)
    with pytest.raises((RuntimeError, SystemExit, ValueError)):
        await pool.call(fail)
    assert await pool.call(lambda: 1) == 1
