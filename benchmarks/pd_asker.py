"""The asking side of the prefill/decode benchmark: plays trajectories through the environment's turn client.

A process of its own. Its argument is a `Plan` as JSON; one line of JSON, an `Outcome`, is printed per job.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

import uvloop

from benchmarks.pd_profiles import Job, Lane, Outcome, Plan, Profile
from benchmarks.turn_asker import POLICY
from shared.bus import Bus
from shared.errors import Unavailable
from shared.events import Sampling, TurnGenerated, TurnRequested
from shared.settings import load_settings
from shared.state import State
from shared.store import open_store
from shared.supervisor import Supervisor
from shared.turns import TurnClient

_READY_S = 60.0
_TURN_S = 600.0
_TRY_S = 120.0
_FIRST_TURNS = 6
"""Asked of each lane at once, for each worker, before anything is timed: every worker loads the policy."""


class Asker:
    """Plays jobs."""

    def __init__(self, plan: Plan, client: TurnClient, state: State) -> None:
        self._plan = plan
        self._client = client
        self._state = state
        self._replies: list[tuple[str, TurnGenerated]] = []

    async def until_ready(self) -> None:
        """Wait for all workers, then have each sample something. Raises Unavailable after a minute."""
        limit = time.monotonic() + _READY_S
        while sum(bool(worker.partitions) for worker in await self._state.workers()) < self._plan.workers:
            if time.monotonic() > limit:
                raise Unavailable(f"the benchmark's {self._plan.workers} workers own no partitions")
            await asyncio.sleep(0.1)
        lanes = {lane for job in self._plan.jobs for queue in job.queues for lane in queue.lanes}
        one = Profile(name="first", prompt=16, turns=1, answer=2 * self._plan.tokens_per_id, observation=0)
        for lane in lanes:
            count = _FIRST_TURNS * self._plan.workers
            await asyncio.gather(*(self._play(one, lane, f"first/{id(lane)}-{i}") for i in range(count)))

    async def run(self, job: Job) -> Outcome:
        """Play all trajectories of a job."""
        self._replies.clear()
        retries = self._client.retries
        busy = await self._busy()
        began = time.perf_counter()
        players = []
        for queue in job.queues:
            numbers = iter(range(queue.trajectories))
            for lane in queue.lanes:
                players += [self._player(job, queue.profile, lane, numbers) for _ in range(lane.players)]
        await asyncio.gather(*players)
        seconds = time.perf_counter() - began
        classes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for task, reply in self._replies:
            classes[task][reply.device_class] += 1
        handovers = [reply.handover for _, reply in self._replies if reply.handover is not None]
        return Outcome(
            name=job.name,
            seconds=round(seconds, 3),
            turns=len(self._replies),
            classes={task: dict(counts) for task, counts in classes.items()},
            handed_over=sum(not handover.recomputed for handover in handovers),
            recomputed=dict(Counter(handover.recomputed for handover in handovers if handover.recomputed)),
            retries=self._client.retries - retries,
            busy=_share(busy, await self._busy()),
        )

    async def _player(self, job: Job, profile: Profile, lane: Lane, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._play(profile, lane, f"{job.name}/{profile.name}-{number}")

    async def _play(self, profile: Profile, lane: Lane, name: str) -> None:
        """One trajectory, from its prompt to the answer of its last turn."""
        draw = random.Random(name)
        history = self._ids(draw, profile.prompt)
        last: TurnGenerated | None = None
        for turn in range(profile.turns):
            last = await self._ask(profile, lane, name, turn, history, last)
            self._replies.append((profile.name, last))
            history = [*history, *last.token_ids, *self._ids(draw, profile.observation)]

    def _ids(self, draw: random.Random, tokens: int) -> list[int]:
        return [draw.randrange(2, self._plan.vocab_size) for _ in range(self._count(tokens))]

    def _count(self, tokens: int) -> int:
        """Ids that stand for so many tokens."""
        return -(-tokens // self._plan.tokens_per_id)

    async def _ask(
        self, profile: Profile, lane: Lane, name: str, turn: int, ids: list[int], last: TurnGenerated | None
    ) -> TurnGenerated:
        deadline = time.time() + _TURN_S
        handover = last.handover if last is not None else None
        request = TurnRequested(
            run_id="bench",
            trajectory_id=f"{name}.0#0",
            attempt=0,
            turn=turn,
            task=profile.name,
            policy=POLICY,
            prompt_ids=ids,
            sampling=Sampling(max_tokens=self._count(profile.answer)),
            context_window=self._plan.context_window,
            deadline=deadline,
            try_deadline=self._client.try_deadline(deadline),
            asker=self._client.asker,
            reply_partition=self._client.partition,
            last_worker=last.worker_id if last is not None else None,
            last_prefill_worker=handover.prefill_worker if handover is not None else None,
            affinity=lane.affinity,
            prefill_affinity=lane.prefill_affinity,
            phases=lane.phases,
        )
        return await self._client.ask(request)

    async def _busy(self) -> dict[str, tuple[str, float, float]]:
        """Worker → its class and role, and what it has reported: seconds of work, and when."""
        kinds = {w.worker_id: f"{w.device_class}:{w.role}" for w in await self._state.workers()}
        return {
            p.process_id: (kinds[p.process_id], p.busy_s, p.updated_at)
            for p in await self._state.processes()
            if p.process_id in kinds
        }


def _share(
    before: dict[str, tuple[str, float, float]], after: dict[str, tuple[str, float, float]]
) -> dict[str, float]:
    """Mean over the workers of a kind, between two reports."""
    shares: defaultdict[str, list[float]] = defaultdict(list)
    for worker, (kind, busy_s, at) in after.items():
        _, busy_before, before_at = before.get(worker, (kind, 0.0, at))
        if at > before_at:
            shares[kind].append(min(1.0, (busy_s - busy_before) / (at - before_at)))
    return {kind: round(sum(found) / len(found), 2) for kind, found in sorted(shares.items())}


async def main(plan: Plan) -> None:
    """Play the jobs in turn."""
    settings = load_settings()
    state = State(settings.redis)
    await state.connect()
    async with Supervisor() as supervisor:
        store = open_store(settings.store_uri)
        bus = Bus(settings.kafka, client_id="bench-asker", store=store, supervisor=supervisor)
        client = TurnClient(bus, state, asker="bench-asker", try_deadline_s=_TRY_S)
        await client.start(supervisor)
        asker = Asker(plan, client, state)
        await asker.until_ready()
        for job in plan.jobs:
            print((await asker.run(job)).model_dump_json(), flush=True)
        await client.stop()
    await state.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(Plan.model_validate_json(sys.argv[1])))
