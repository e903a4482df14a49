"""The asking side of the benchmark of weight updates: turns in flight all the time, until it is killed.

Prints, four times a second, a JSON list: seconds, and tokens received until then.
"""

from __future__ import annotations

import asyncio
import json
import time

import uvloop

from benchmarks.random_model import WINDOW
from benchmarks.turn_asker import POLICY
from shared.bus import Bus
from shared.events import Sampling, TurnRequested
from shared.settings import load_settings
from shared.state import State
from shared.store import open_store
from shared.supervisor import Supervisor
from shared.turns import TurnClient

_IN_FLIGHT = 8
_PROMPT = 64
_NEW_TOKENS = 16
"""Of the player with the shortest turns; each further one asks for a few more, so that they do not end
together."""
_TURN_S = 120.0


class Player:
    """Keeps one turn in flight."""

    tokens = 0

    def __init__(self, client: TurnClient, number: int) -> None:
        self._client = client
        self._number = number

    async def play(self) -> None:
        """One turn after the other."""
        count = 0
        while True:
            deadline = time.time() + _TURN_S
            turn = TurnRequested(
                run_id="bench",
                trajectory_id=f"bench/{self._number}-{count}.0#0",
                attempt=0,
                turn=0,
                task="bench",
                policy=POLICY,
                prompt_ids=[(self._number + 7 * at) % 2000 for at in range(_PROMPT)],
                sampling=Sampling(max_tokens=_NEW_TOKENS + 4 * self._number),
                context_window=WINDOW,
                deadline=deadline,
                try_deadline=deadline,
                asker=self._client.asker,
                reply_partition=self._client.partition,
            )
            reply = await self._client.ask(turn)
            Player.tokens += len(reply.token_ids)
            count += 1


async def main() -> None:
    """Play."""
    settings = load_settings()
    state = State(settings.redis)
    await state.connect()
    async with Supervisor() as supervisor:
        store = open_store(settings.store_uri)
        bus = Bus(settings.kafka, client_id="bench-asker", store=store, supervisor=supervisor)
        client = TurnClient(bus, state, asker="bench-asker", try_deadline_s=_TURN_S)
        await client.start(supervisor)
        async with asyncio.TaskGroup() as players:
            for number in range(_IN_FLIGHT):
                players.create_task(Player(client, number).play())
            while True:
                await asyncio.sleep(0.25)
                print(json.dumps([time.perf_counter(), Player.tokens]), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
