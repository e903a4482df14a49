"""The asking side of the turn benchmark: the environment's own turn client, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop

from benchmarks.turn_load import NEW_TOKENS, PROMPT, Level, measure
from shared.bus import Bus
from shared.events import Sampling, TurnRequested
from shared.settings import load_settings
from shared.state import State
from shared.store import open_store
from shared.supervisor import Supervisor
from shared.telemetry import root_traceparent
from shared.turns import TurnClient

POLICY = "bench"


async def ask(levels: list[Level]) -> None:
    """Keeps so many turns in flight; prints one JSON line per level."""
    settings = load_settings()
    state = State(settings.redis)
    await state.connect()
    async with Supervisor() as supervisor:
        store = open_store(settings.store_uri)
        bus = Bus(settings.kafka, client_id="bench-asker", store=store, supervisor=supervisor)
        client = TurnClient(bus, state, asker="bench-asker", try_deadline_s=30.0)
        await client.start(supervisor)

        sampling = Sampling(max_tokens=NEW_TOKENS)
        # A trace is made once for a trajectory, not for each of its turns.
        traceparent = root_traceparent("bench")

        async def turn(trajectory: str) -> None:
            deadline = time.time() + 60
            request = TurnRequested(
                run_id="bench",
                trajectory_id=trajectory,
                attempt=0,
                turn=0,
                task="bench",
                policy=POLICY,
                prompt_ids=PROMPT,
                sampling=sampling,
                context_window=4096,
                deadline=deadline,
                try_deadline=client.try_deadline(deadline),
                asker=client.asker,
                reply_partition=client.partition,
                last_worker=None,
                affinity=None,
                min_version=0,
            )
            await client.ask(request, traceparent=traceparent)

        await turn("bench/first.0#0")
        for level in levels:
            print(json.dumps(await measure(turn, level)), flush=True)
        await client.stop()
    await state.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask([Level(*item) for item in json.loads(sys.argv[1])]))
