"""The asking side of the route benchmark: the same turns through the router, and straight to the worker."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import zlib
from functools import partial

import uvloop

from benchmarks.turn_asker import POLICY
from benchmarks.turn_load import NEW_TOKENS, PROMPT, Level, measure
from shared.bus import Bus
from shared.errors import Unavailable
from shared.events import GenerateRequested, Sampling, TurnRequested
from shared.settings import Settings, load_settings
from shared.state import State, WorkerRecord
from shared.store import open_store
from shared.supervisor import Supervisor
from shared.telemetry import root_traceparent
from shared.topics import worker_topic
from shared.turns import TurnClient

_WORKER_S = 60.0


class DirectBus(Bus):
    """Publishes a turn as its router would, to the one worker there is."""

    worker: WorkerRecord

    def publish_turn(
        self, topic: str, turn: TurnRequested, *, key: str, run_id: str, traceparent: str
    ) -> None:
        """In place of `publish`, which the turn client calls with `turns`."""
        worker = self.worker
        request = GenerateRequested(
            turn=turn,
            worker_id=worker.worker_id,
            device_class=worker.device_class,
            assigned_at=time.time(),
        )
        self.publisher.publish(
            worker_topic("both", worker.device_class),
            request,
            partition=worker.partitions[zlib.crc32(key.encode()) % len(worker.partitions)],
            run_id=run_id,
            traceparent=traceparent,
        )


async def _worker(state: State, settings: Settings) -> WorkerRecord:
    """The worker, once it owns every partition."""
    limit = time.monotonic() + _WORKER_S
    while time.monotonic() < limit:
        for worker in await state.workers():
            if len(worker.partitions) == settings.kafka.partitions:
                return worker
        await asyncio.sleep(0.1)
    raise Unavailable("the benchmark's worker owns no partitions")


async def ask(levels: list[Level]) -> None:
    """Keeps so many turns in flight, straight and routed in turn; prints one JSON line per level and way."""
    settings = load_settings()
    state = State(settings.redis)
    await state.connect()
    async with Supervisor() as one, Supervisor() as other:
        store = open_store(settings.store_uri)
        direct = DirectBus(settings.kafka, client_id="bench-direct", store=store, supervisor=one)
        direct.worker = await _worker(state, settings)
        direct.publish = direct.publish_turn  # type: ignore[assignment]
        routed = Bus(settings.kafka, client_id="bench-routed", store=store, supervisor=other)
        clients = {
            "direct": TurnClient(direct, state, asker="bench-direct", try_deadline_s=30.0),
            "routed": TurnClient(routed, state, asker="bench-routed", try_deadline_s=30.0),
        }
        for client, supervisor in zip(clients.values(), (one, other), strict=True):
            await client.start(supervisor)
            await _turn(client, f"bench/first-{client.asker}.0#0")
        for level in levels:
            for way, client in clients.items():
                figures = await measure(partial(_turn, client), level)
                print(json.dumps(figures | {"way": way, "retries": client.retries}), flush=True)
        for client in clients.values():
            await client.stop()
    await state.close()


_SAMPLING = Sampling(max_tokens=NEW_TOKENS)
_TRACEPARENT = root_traceparent("bench")


async def _turn(client: TurnClient, trajectory: str) -> None:
    deadline = time.time() + 60
    request = TurnRequested(
        run_id="bench",
        trajectory_id=trajectory,
        attempt=0,
        turn=0,
        task="bench",
        policy=POLICY,
        prompt_ids=PROMPT,
        sampling=_SAMPLING,
        context_window=4096,
        deadline=deadline,
        try_deadline=client.try_deadline(deadline),
        asker=client.asker,
        reply_partition=client.partition,
    )
    await client.ask(request, traceparent=_TRACEPARENT)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask([Level(*item) for item in json.loads(sys.argv[1])]))
