"""Prefill and decode in two processes with a model that computes: KV that really moves, and what is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from turn_stack import TurnStack, turn_stack

from services.generation.engines.torch_engine import TorchEngine
from services.generation.protocol import EngineRequest, EngineResult, load_weights
from shared import weights
from shared.bus import Bus
from shared.embedded.kafka import EmbeddedKafka
from shared.events import PolicyPublished, Sampling, TurnGenerated, TurnRequested
from shared.settings import GenerationSettings
from shared.state import WorkerRecord
from shared.supervisor import Supervisor
from shared.turns import TurnClient
from shared.weights import RawTensor

pytestmark = pytest.mark.asyncio(loop_scope="module")
POLICY = "model"
CONFIG = LlamaConfig(
    vocab_size=60,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.25,
)
GREEDY = Sampling(temperature=0.0, max_tokens=12)
CLASS_OF = {"prefill": "compute", "decode": "bandwidth"}
LIMIT_S = 60.0


def prompt_of(length: int) -> list[int]:
    return [(7 * i + length) % 60 for i in range(length)]


def raw_weights() -> dict[str, RawTensor]:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(CONFIG)  # type: ignore[no-untyped-call]
    return {
        name: RawTensor(dtype="F32", shape=tuple(t.shape), data=t.detach().numpy().tobytes())
        for name, t in model.state_dict().items()
    }


def by_both(folder: Path, prompt: list[int]) -> EngineResult:
    """What a worker that does both phases answers."""
    CONFIG.save_pretrained(folder)
    engine = TorchEngine.create(folder, settings=GenerationSettings(cache_tokens=4096), seed=0)
    load_weights(engine, raw_weights(), version=1)
    engine.add(EngineRequest("one", "one", prompt, GREEDY, 512))
    while True:
        for result in engine.step():
            return result


class Split:
    """A prefill and a decode worker, each a process, a router, and an asker."""

    def __init__(self, stack: TurnStack, client: TurnClient, processes: ExitStack) -> None:
        self.stack = stack
        self.client = client
        self._processes = processes
        self.pids: dict[str, int] = {}

    def worker(self, role: str) -> None:
        started = self._processes.enter_context(
            self.stack.process(
                "generation",
                role,
                GENERATION__ENGINE="torch",
                GENERATION__ROLE=role,
                GENERATION__DEVICE_CLASS=CLASS_OF[role],
                GENERATION__CACHE_TOKENS="4096",
            )
        )
        self.pids[role] = started.pid

    async def ask(self, name: str, prompt: list[int]) -> TurnGenerated:
        deadline = time.time() + LIMIT_S
        turn = TurnRequested(
            run_id="split",
            trajectory_id=f"split/{name}.0#0",
            attempt=0,
            turn=0,
            task="split",
            policy=POLICY,
            prompt_ids=prompt,
            sampling=GREEDY,
            context_window=512,
            deadline=deadline,
            try_deadline=deadline,
            asker=self.client.asker,
            reply_partition=self.client.partition,
            phases="split",
        )
        return await self.client.ask(turn)

    async def until_worker(self, role: str, holds: Callable[[WorkerRecord], bool]) -> None:
        limit = time.monotonic() + LIMIT_S
        while not any(holds(w) for w in await self.stack.state.workers() if w.worker_id == role):
            assert time.monotonic() < limit, f"{role} does not get there"
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def split(
    _embedded_broker: EmbeddedKafka, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Split]:
    folder = tmp_path_factory.mktemp("split")
    async with turn_stack(_embedded_broker, redis_url, folder) as stack, Supervisor() as supervisor:
        CONFIG.save_pretrained(folder / "config")
        uri = weights.publish_model(stack.store, policy=POLICY, folder=folder / "config")
        prefix, digest = weights.publish(stack.store, raw_weights(), policy=POLICY, version=1, step=1)
        record = PolicyPublished(
            policy=POLICY, version=1, step=1, uri=prefix, digest=digest, published_at=time.time()
        )
        await stack.state.acquire_lease("trainer", "test", ttl_s=600)
        await stack.state.publish_policy(record, model_uri=uri, lease="trainer", owner="test")
        bus = Bus(stack.kafka, client_id="asker", store=stack.store, supervisor=supervisor)
        client = TurnClient(bus, stack.state, asker="asker", try_deadline_s=LIMIT_S)
        await client.start(supervisor)
        with ExitStack() as processes:
            made = Split(stack, client, processes)
            for role in CLASS_OF:
                made.worker(role)
            async with stack.serving("router", "r1"):
                await stack.workers_of(*CLASS_OF)
                yield made


async def test_the_decode_worker_goes_on_without_computing_the_prompt(split: Split, tmp_path: Path) -> None:
    # The first turn loads the policy, and may find its KV late.
    await split.ask("first", prompt_of(30))
    for length in (33, 160, 300):
        prompt = prompt_of(length)
        answer = await split.ask(f"of-{length}", prompt)
        assert (answer.worker_id, answer.cached_tokens) == ("decode", length)
        handover = answer.handover
        assert handover is not None
        assert (handover.prefill_worker, handover.transferred_tokens, handover.recomputed) == (
            "prefill",
            length,
            "",
        )
        # Two layers of keys and values in float32.
        assert handover.transferred_bytes == length * 2 * 2 * 2 * 8 * 4
        wanted = by_both(tmp_path / str(length), prompt)
        assert answer.token_ids == wanted.token_ids
        assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    await split.until_worker("prefill", lambda worker: not worker.kv_leases and not worker.kv_usage)


async def test_kv_that_died_with_its_worker_is_computed_again(split: Split, tmp_path: Path) -> None:
    prompt = prompt_of(200)
    os.kill(split.pids["decode"], signal.SIGSTOP)
    asking = asyncio.ensure_future(split.ask("died", prompt))
    await split.until_worker("prefill", lambda worker: worker.kv_leases == 1)
    os.kill(split.pids["prefill"], signal.SIGKILL)
    os.kill(split.pids["decode"], signal.SIGCONT)
    answer = await asking
    assert (answer.worker_id, answer.cached_tokens) == ("decode", 0)
    assert answer.handover is not None
    assert answer.handover.recomputed == "gone"
    wanted = by_both(tmp_path, prompt)
    assert answer.token_ids == wanted.token_ids
    assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
