"""Every rollout request ends in exactly one trajectory, whatever the environment does."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import odd_environments
import pytest
import pytest_asyncio
from odd_environments import Calm
from turn_stack import EOS, TurnStack, turn_stack, until, whole_path

from shared.embedded.kafka import EmbeddedKafka
from shared.events import TrajectoryCompleted, TrajectoryStatus
from shared.service import Context

pytestmark = pytest.mark.asyncio(loop_scope="module")
LOOP = {"scope": "module", "loop_scope": "module"}


@pytest_asyncio.fixture(**LOOP)  # type: ignore[call-overload]
async def stack(
    _embedded_broker: EmbeddedKafka, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TurnStack]:
    async with turn_stack(_embedded_broker, redis_url, tmp_path_factory.mktemp("turns")) as made:
        yield made


@pytest_asyncio.fixture(**LOOP)  # type: ignore[call-overload]
async def services(stack: TurnStack) -> AsyncIterator[dict[str, Context]]:
    odd_environments.RELEASE.clear()
    async with whole_path(stack, environment={"threads": 2}) as contexts:
        yield contexts
        odd_environments.RELEASE.set()


def aligned(trajectory: TrajectoryCompleted) -> None:
    length = len(trajectory.token_ids)
    assert [len(a) for a in (trajectory.mask, trajectory.logprobs, trajectory.versions)] == [length] * 3
    sampled = [version for version, m in zip(trajectory.versions, trajectory.mask, strict=True) if m]
    assert sum(turn.sampled for turn in trajectory.turns) == len(sampled)
    assert all(version >= trajectory.start_version for version in sampled)


ERROR = ("failed", "environment_error")
PLACES = ("init", "reset", "step")


async def test_whatever_an_environment_raises_fails_its_own_episode_alone(
    stack: TurnStack, services: dict[str, Context]
) -> None:
    cases = [
        stack.ask(f"odd_environments:{kind}", config={"where": where, "error": error})
        for kind in ("Calm", "CalmThread")
        for where in PLACES
        for error in odd_environments.ERRORS
    ]
    beside = stack.ask("odd_environments:OneStep")
    ends = await stack.ended(*cases)
    assert {(end.status.value, end.reason) for end in ends} == {ERROR}
    for end in ends:
        aligned(end)
    (calm,) = await stack.ended(beside)
    assert calm.status is TrajectoryStatus.FINISHED
    assert [turn.reward for turn in calm.turns] == [0.5]
    samples = stack.samples
    await until(lambda: all(case in samples for case in (*cases, beside)))
    assert {samples[case][0].reward for case in cases} == {None}
    assert samples[beside][0].reward == 0.5
    assert services["e1"].counters["episode_environment_error"] >= len(cases)


async def test_a_failure_to_close_changes_nothing(stack: TurnStack, services: dict[str, Context]) -> None:
    before = len(Calm.closed)
    asked = [
        stack.ask(f"odd_environments:{kind}", config={"where": "close", "error": error})
        for kind in ("Calm", "CalmThread")
        for error in odd_environments.ERRORS
    ]
    ends = await stack.ended(*asked)
    assert {(end.status.value, end.reason) for end in ends} == {("truncated", "turn_limit")}
    await until(lambda: len(Calm.closed) - before == len(asked))


async def test_what_is_no_text_and_no_reward_fails_the_episode(
    stack: TurnStack, services: dict[str, Context]
) -> None:
    kinds = ["none", "bytes", "surrogate", "nan", "inf", "text_reward", "step_surrogate", "tuple", "number"]
    ends = await stack.ended(*(stack.ask("odd_environments:Value", config={"where": k}) for k in kinds))
    assert {(end.status.value, end.reason) for end in ends} == {ERROR}


@pytest.mark.parametrize(
    ("environment", "changes", "reason"),
    [
        ("frozen_lake", {}, "environment_unknown_plugin"),
        ("odd_environments:Missing", {}, "environment_unknown_plugin"),
        ("no_such_module:Class", {}, "environment_unknown_plugin"),
        ("guess_number", {"config": {"hihgest": 3}}, "environment_invalid"),
        ("guess_number", {"config": {"guesses": -1}}, "environment_invalid"),
        ("odd_environments:NoScript", {}, "environment_error"),
        ("odd_environments:NoScriptAtAll", {"actor": "scripted"}, "environment_not_scripted"),
        ("odd_environments:ERRORS", {}, "environment_unknown_plugin"),
        ("guess_number", {"policy": "nobody"}, "generation_not_found"),
        ("guess_number", {"policy": "toy@77"}, "generation_not_found"),
        ("guess_number", {"policy": "toy@x"}, "generation_not_found"),
    ],
)
async def test_what_cannot_be_played_fails_by_its_reason(
    stack: TurnStack,
    services: dict[str, Context],
    environment: str,
    changes: dict[str, object],
    reason: str,
) -> None:
    (end,) = await stack.ended(stack.ask(environment, **changes))
    assert (end.status.value, end.reason) == ("failed", reason)
    assert end.token_ids == []


async def test_scripted_play_has_messages_and_no_tokens(
    stack: TurnStack, services: dict[str, Context]
) -> None:
    end, broken = await stack.ended(
        stack.ask("odd_environments:CalmThread", actor="scripted", policy=""),
        stack.ask("odd_environments:Calm", actor="scripted", config={"where": "scripted", "error": "stop"}),
    )
    assert (end.status.value, end.reason) == ("truncated", "turn_limit")
    assert [m.role for m in end.messages] == ["user", "assistant"] * 3 + ["user"]
    assert end.token_ids == end.mask == end.logprobs == end.versions == []
    assert (broken.status.value, broken.reason) == ERROR


async def test_an_action_that_cannot_be_read_is_an_observation_and_its_tokens_stay_trained(
    stack: TurnStack, services: dict[str, Context]
) -> None:
    (end,) = await stack.ended(stack.ask("odd_environments:Strict"))
    assert (end.status.value, end.reason) == ("truncated", "turn_limit")
    assert all("cannot read" in m.content for m in end.messages[2::2])
    # The instant engine says 1, 2, 3, … of which 4 are asked for.
    sampled = [token for token, m in zip(end.token_ids, end.mask, strict=True) if m]
    assert sampled == [1, 2, 3, 4] * 3
    aligned(end)


async def test_a_group_shares_its_episode_and_neighbours_do_not_disturb_it(
    stack: TurnStack, services: dict[str, Context]
) -> None:
    members = [stack.ask("frozenlake", seed=5, max_turns=1) for _ in range(4)]
    noise = [stack.ask("frozenlake", max_turns=1) for _ in range(4)]
    ends = await stack.ended(*members)
    assert len({end.messages[0].content for end in ends}) == 1
    others = await stack.ended(*noise)
    assert len({end.messages[0].content for end in (*others, ends[0])}) > 1


async def test_context_is_clipped_and_a_full_window_ends_the_episode(
    stack: TurnStack, services: dict[str, Context]
) -> None:
    (end,) = await stack.ended(
        stack.ask("odd_environments:Calm", sampling={"max_tokens": 20}, context_window=50, max_turns=9)
    )
    assert (end.status.value, end.reason) == ("truncated", "context_exhausted")
    assert len(end.token_ids) <= 50
    assert end.turns[-1].finish_reason.value in ("context", "length")


async def test_an_environment_that_hangs_frees_its_slot_and_delays_no_other(
    stack: TurnStack, services: dict[str, Context]
) -> None:
    # As many as there are threads would stop all others, were the threads not replaced.
    hung = [stack.ask("odd_environments:Hangs", seconds=1.5) for _ in range(2)]
    await until(lambda: services["e1"].status()["episodes"] == 2)
    asked = [stack.ask("odd_environments:CalmThread", seconds=20) for _ in range(7)]
    ends = await stack.ended(*hung, seconds=6)
    assert {(end.status.value, end.reason) for end in ends} == {("aborted", "deadline")}
    others = await stack.ended(*asked)
    assert {end.reason for end in others} == {"turn_limit"}
    assert services["e1"].status()["episodes"] == 0


async def test_a_rollout_already_past_its_deadline_is_aborted(
    stack: TurnStack, services: dict[str, Context]
) -> None:
    (end,) = await stack.ended(stack.ask("odd_environments:Calm", seconds=-5))
    assert (end.status.value, end.reason) == ("aborted", "deadline")


async def test_the_same_request_twice_at_once_is_played_once(
    stack: TurnStack, services: dict[str, Context]
) -> None:
    odd_environments.RELEASE.clear()
    first = stack.ask("odd_environments:Hangs", trajectory_id="twice.0#0", seconds=1.5)
    stack.ask("odd_environments:Hangs", trajectory_id="twice.0#0", seconds=1.5)
    later = stack.ask("odd_environments:Calm", trajectory_id="after.0#0")
    end, _ = await stack.ended(first, later)
    assert (end.status.value, end.reason) == ("aborted", "deadline")
    await until(lambda: services["e1"].status()["episodes"] == 0)
    assert len(stack.trajectories[first]) == 1


async def test_tokens_are_of_the_policy(stack: TurnStack, services: dict[str, Context]) -> None:
    (end,) = await stack.ended(stack.ask("odd_environments:Calm", max_turns=1))
    assert 0 <= min(end.token_ids) <= max(end.token_ids) <= EOS
    assert end.started_at <= end.completed_at <= time.time()
