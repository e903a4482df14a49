"""Split turns and measured affinity on the wire: a real router between an asker and workers that the test
plays."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from router_wire import RouterWire, router_wire
from turn_stack import TurnStack, turn_stack

from shared.embedded.kafka import EmbeddedKafka
from shared.events import GenerateRequested, PrefillRequested
from shared.state.records import TaskProfile

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack(
    _embedded_broker: EmbeddedKafka, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TurnStack]:
    async with turn_stack(_embedded_broker, redis_url, tmp_path_factory.mktemp("turns")) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def wire(stack: TurnStack) -> AsyncIterator[RouterWire]:
    async with router_wire(stack, "r1") as made:
        yield made


async def prefill_of(wire: RouterWire, trajectory: str, *, number: int = 1) -> PrefillRequested:
    topic, _, request = await wire.assigned(trajectory, number=number)
    assert isinstance(request, PrefillRequested)
    assert topic == f"prefill.{request.device_class}"
    return request


async def test_a_split_turn_goes_to_its_prefill_worker_with_the_decode_worker_named(wire: RouterWire) -> None:
    wire.worker("p1", "prefill", "compute", partitions=[2])
    wire.worker("d1", "decode", "bandwidth", partitions=[3])
    wire.worker("b1", "both", "bandwidth")
    await wire.live("p1", "d1", "b1")
    topic, partition, request = await wire.assigned(wire.ask(phases="split"))
    assert isinstance(request, PrefillRequested)
    assert (topic, partition, request.worker_id, request.fallback) == ("prefill.compute", 2, "p1", False)
    target = request.decode
    assert (target.worker_id, target.device_class, target.partition) == ("d1", "bandwidth", 3)
    topic, _, request = await wire.assigned(wire.ask())
    assert isinstance(request, GenerateRequested)
    assert (topic, request.worker_id) == ("generate.bandwidth", "b1")


async def test_each_phase_stays_with_its_worker_while_that_lives(wire: RouterWire) -> None:
    for name in ("p1", "p2"):
        wire.worker(name, "prefill", "compute")
    for name in ("d1", "d2"):
        wire.worker(name, "decode", "bandwidth")
    await wire.live("p1", "p2", "d1", "d2")
    split = {"phases": "split"}
    for first, last in (("p2", "d1"), ("p1", "d2")):
        held = {"last_prefill_worker": first, "last_worker": last, "turn": 1}
        request = await prefill_of(wire, wire.ask(**split, **held))
        assert (request.worker_id, request.decode.worker_id) == (first, last)
    await wire.silence("p1")
    await wire.silence("d2")
    held = {"last_prefill_worker": "p1", "last_worker": "d2", "turn": 1}
    request = await prefill_of(wire, wire.ask(**split, **held))
    assert (request.worker_id, request.decode.worker_id) == ("p2", "d1")


async def test_what_falls_back_is_counted_and_told_and_ends_when_the_preferred_is_back(
    wire: RouterWire,
) -> None:
    wire.worker("b1", "both", "bandwidth")
    await wire.live("b1")
    _, _, request = await wire.assigned(wire.ask(phases="split"))
    assert isinstance(request, GenerateRequested)
    assert (request.worker_id, request.fallback) == ("b1", True)
    (told,) = await wire.affinity()
    assert [(f.kind, f.turns, f.active) for f in told.fallbacks] == [("phases", 1, True)]
    assert wire.context.status()["fallbacks"] == 1
    # Of the phases there are workers now, though of another class.
    wire.worker("p1", "prefill", "bandwidth")
    wire.worker("d1", "decode", "bandwidth")
    await wire.live("b1", "p1", "d1")
    assert (await prefill_of(wire, wire.ask(phases="split"))).fallback
    (told,) = await wire.affinity()
    kinds = [(f.kind, f.turns, f.active) for f in told.fallbacks]
    assert kinds == [("phases", 1, False), ("prefill_class", 1, True)]
    wire.worker("p2", "prefill", "compute")
    await wire.live("b1", "p1", "d1", "p2")
    request = await prefill_of(wire, wire.ask(phases="split"))
    assert (request.worker_id, request.fallback) == ("p2", False)
    (told,) = await wire.affinity()
    assert not any(fallback.active for fallback in told.fallbacks)


async def test_a_measured_task_moves_to_the_cheaper_way_and_the_router_says_why(wire: RouterWire) -> None:
    wire.worker("b1", "both", "bandwidth")
    wire.worker("b2", "both", "compute")
    wire.worker("p1", "prefill", "compute")
    wire.worker("d1", "decode", "bandwidth")
    await wire.live("b1", "b2", "p1", "d1")
    auto = {"affinity": "auto", "phases": "auto"}
    topic, _, _ = await wire.assigned(wire.ask("run/first.0#0", **auto))
    assert topic == "generate.bandwidth"
    (told,) = await wire.affinity()
    assert [option.cost for option in told.options] == [None] * 3
    for name, prefill_s, decode_s in (("b1", 60.0, 50.0), ("b2", 10.0, 60.0)):
        profile = TaskProfile(
            prefills=50, prompt_tokens=400_000, prefill_s=prefill_s,
            decodes=50, generated_tokens=5000, decode_s=decode_s,
        )  # fmt: skip
        wire.measured(name, "odd", profile)
    wire.measured("p1", "odd", TaskProfile(prefills=50, prompt_tokens=400_000, prefill_s=10.0))
    wire.measured("d1", "odd", TaskProfile(decodes=50, generated_tokens=5000, decode_s=50.0, transfer_s=0.5))
    told = await wire.switched()
    assert (told.phases, told.prefill_class, told.device_class) == ("split", "compute", "bandwidth")
    assert told.why.startswith("split compute → bandwidth costs 1.58 (2.85 × 0.2 s prefill + 1 × (1 s decode")
    costs = {(option.phases, option.device_class): option.cost for option in told.options}
    assert costs[("together", "bandwidth")] == pytest.approx(2.2)
    assert costs[("together", "compute")] == pytest.approx(2.85 * 1.4)
    request = await prefill_of(wire, wire.ask("run/after.0#0", **auto))
    assert (request.worker_id, request.decode.worker_id) == ("p1", "d1")


async def test_a_key_is_needed(wire: RouterWire) -> None:
    async with httpx.AsyncClient(base_url=wire.url, trust_env=False) as client:
        assert (await client.get("/v1/affinity")).status_code == 401
