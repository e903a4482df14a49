"""Split turns under faults: silent and killed prefill and decode workers, and a killed router."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from turn_stack import TurnStack, turn_stack, until

from shared.embedded.kafka import EmbeddedKafka
from shared.events import Role, TrajectoryCompleted
from shared.service import Context

pytestmark = pytest.mark.asyncio(loop_scope="module")
CALM = "odd_environments:Calm"
SILENT = "odd_engines:Silent"
SPLIT = {"phases": "split"}
CLASS_OF: dict[Role, str] = {"prefill": "compute", "decode": "bandwidth", "both": "bandwidth"}
ROLES: list[Role] = ["prefill", "decode"]
NO_LONGER_THAN_S = 10.0


@pytest_asyncio.fixture(loop_scope="module")
async def stack(
    _embedded_broker: EmbeddedKafka, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TurnStack]:
    async with turn_stack(_embedded_broker, redis_url, tmp_path_factory.mktemp("turns")) as made:
        yield made


class Running:
    """Services of a test, in this process where not said otherwise."""

    def __init__(self, stack: TurnStack, exits: AsyncExitStack) -> None:
        self.stack = stack
        self.exits = exits

    async def worker(self, name: str, role: Role, **generation: object) -> Context:
        fields = {"role": role, "device_class": CLASS_OF[role], **generation}
        return await self.exits.enter_async_context(self.stack.serving("generation", name, generation=fields))

    async def router(self, name: str = "r1") -> Context:
        return await self.exits.enter_async_context(self.stack.serving("router", name))

    async def environment(self, **environment: object) -> Context:
        return await self.exits.enter_async_context(
            self.stack.serving("environment", "e1", environment=environment)
        )

    async def all_known(self, router: Context, *names: str) -> None:
        await self.stack.workers_of(*names)
        await until(lambda: set(router.status()["load"]) == set(names))


def workers_of(*ends: TrajectoryCompleted) -> set[str]:
    return {turn.worker_id for end in ends for turn in end.turns}


@pytest.mark.parametrize("role", ROLES)
async def test_a_silent_worker_of_one_phase_is_ejected_and_its_turns_run_once_elsewhere(
    stack: TurnStack, role: Role
) -> None:
    async with AsyncExitStack() as exits:
        running = Running(stack, exits)
        router = await running.router()
        environment = await running.environment(try_deadline_s=1.5)
        # First by name, so that an idle stack prefers it.
        await running.worker("a-silent", role, engine=SILENT)
        names = ["a-silent"]
        for kind in ROLES:
            for i in range(2 if kind != role else 1):
                names.append(f"{kind[0]}{i}")
                await running.worker(names[-1], kind)
        await running.all_known(router, *names)
        ends = await stack.ended(*(stack.ask(CALM, **SPLIT) for _ in range(24)))
        assert {end.reason for end in ends} == {"turn_limit"}
        assert "a-silent" not in workers_of(*ends)
        waits = [turn.wait_s for end in ends for turn in end.turns]
        slow = [wait for wait in waits if wait >= 1.5]
        retries = environment.status()["turn_retries"]
        assert 0 < len(slow) == retries < 24
        assert max(slow) < 3.0
        assert router.status()["ejected"] == ["a-silent"]
        # Nobody else is held up, nor is anyone after it.
        ends = await stack.ended(*(stack.ask(CALM, **SPLIT) for _ in range(24)))
        assert environment.status()["turn_retries"] == retries
        assert max(turn.wait_s for end in ends for turn in end.turns) < 1.5
        # What the router believes to be in hand is what is: nothing.
        await until(lambda: not any(router.status()["load"].values()))


@pytest.mark.parametrize("role", ROLES)
async def test_turns_of_a_killed_worker_of_one_phase_run_again_on_another_of_its_group(
    stack: TurnStack, role: Role
) -> None:
    other: Role = "decode" if role == "prefill" else "prefill"
    async with AsyncExitStack() as exits:
        running = Running(stack, exits)
        router = await running.router()
        environment = await running.environment()
        doomed = exits.enter_context(
            stack.process(
                "generation",
                "doomed",
                GENERATION__ENGINE=SILENT,
                GENERATION__ROLE=role,
                GENERATION__DEVICE_CLASS=CLASS_OF[role],
            )
        )
        await running.worker("living", other)
        await running.all_known(router, "doomed", "living")
        asked = [stack.ask(CALM, **SPLIT) for _ in range(8)]
        await until(lambda: router.status()["load"]["doomed"] >= 8)
        await running.worker("heir", role)
        os.kill(doomed.pid, signal.SIGKILL)
        began = time.monotonic()
        ends = await stack.ended(*asked)
        assert time.monotonic() - began < NO_LONGER_THAN_S
        assert {(end.reason, len(end.turns)) for end in ends} == {("turn_limit", 3)}
        decoding = "heir" if role == "decode" else "living"
        assert workers_of(*ends) == {decoding}
        # By the group alone: nothing was asked again, nothing answered twice.
        assert environment.status()["turn_retries"] == 0
        assert environment.status()["late_replies"] == 0


async def test_the_death_of_one_of_two_routers_loses_no_split_turn(stack: TurnStack) -> None:
    async with AsyncExitStack() as exits:
        running = Running(stack, exits)
        environment = await running.environment()
        for role in ROLES:
            await running.worker(role, role)
        doomed = exits.enter_context(stack.process("router", "r2"))
        await stack.alive("r2")
        asked = [stack.ask(CALM, max_turns=60, context_window=8192, **SPLIT) for _ in range(16)]
        router = await running.router()
        await until(lambda: int(str(router.status()["assigned"])) > 50)
        os.kill(doomed.pid, signal.SIGKILL)
        assert len(stack.trajectories) < 16
        ends = await stack.ended(*asked)
        assert {(end.reason, len(end.turns)) for end in ends} == {("turn_limit", 60)}
        assert int(str(router.status()["assigned"])) < 16 * 60
        assert environment.status()["turn_retries"] == 0
