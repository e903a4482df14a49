"""Split turns between two torch engines over real sockets: the same tokens, nothing pinned, nothing hung."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_models import (
    CONFIGS,
    GREEDY,
    SMALL,
    ask,
    assert_agrees,
    build,
    drain,
    engine_for,
    prompt_of,
    raw_weights,
)
from transformers import LlamaConfig

from services.generation.engines.torch_engine import TorchEngine
from services.generation.kv.client import TransferParams
from services.generation.kv.wire import Ask, Reply, receive_model, send_model
from services.generation.protocol import EngineRequest, EngineResult, load_weights
from shared.events import FinishReason, Prefilled, Sampling
from shared.settings import GenerationSettings

LONG = Sampling(temperature=0.0, max_tokens=12)


class Pair:
    """A prefill engine and a decode engine with the same weights."""

    def __init__(self, folder: Path, *, name: str = "llama", seed: int = 1, **settings: Any) -> None:
        self.model = build(name, seed)
        self.prefill = engine_for(folder / "p", self.model, name=name, role="prefill", **settings)
        self.decode = engine_for(folder / "d", self.model, name=name, role="decode", **settings)
        self.arrived = threading.Event()
        self.decode.attach(self.arrived.set)

    def start(
        self, prompt: list[int], sampling: Sampling = LONG, *, name: str = "x", session: str = "s"
    ) -> EngineResult:
        """The prefill engine's part of a turn."""
        self.prefill.add(EngineRequest(name, session, prompt, sampling, 1000, prefill_only=True))
        return drain(self.prefill)[name]

    def go_on(
        self,
        prompt: list[int],
        first: EngineResult,
        sampling: Sampling = LONG,
        *,
        session: str = "s",
        **changes: Any,
    ) -> EngineResult:
        """The decode engine's part."""
        self.hand(prompt, first, sampling, session=session, **changes)
        return self.finish(first.request_id)

    def hand(
        self,
        prompt: list[int],
        first: EngineResult,
        sampling: Sampling = LONG,
        *,
        session: str = "s",
        **changes: Any,
    ) -> None:
        assert first.kv_transfer_params is not None
        prefilled = Prefilled(
            worker_id="p",
            device_class="compute",
            token_ids=first.token_ids,
            logprobs=first.logprobs,
            versions=first.versions,
            version=self.prefill.version,
            kv_transfer_params=first.kv_transfer_params | changes,
        )
        self.decode.add(EngineRequest(first.request_id, session, prompt, sampling, 1000, prefilled=prefilled))

    def finish(self, name: str) -> EngineResult:
        """Wait as a worker does: asleep until woken, tending now and then."""
        limit = time.monotonic() + 20
        while time.monotonic() < limit:
            if self.decode.has_work:
                for result in self.decode.step():
                    if result.request_id == name:
                        return result
            else:
                self.arrived.wait(0.05)
                self.arrived.clear()
                self.decode.tend()
        raise AssertionError("the turn does not finish")

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.005)


def together(
    pair: Pair, folder: Path, prompt: list[int], sampling: Sampling, name: str = "x"
) -> EngineResult:
    both = engine_for(folder / "both", pair.model)
    ask(both, name, prompt, sampling)
    return drain(both)[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_split_turn_equals_one_of_a_both_worker_and_computes_no_prompt_token(
    name: str, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, name=name)
    both = engine_for(tmp_path / "both", pair.model, name=name)
    for length in (1, 15, 16, 17, 90):
        for sampling in (
            LONG,
            Sampling(temperature=1.0, max_tokens=12),
            Sampling(temperature=0.7, top_k=9, max_tokens=5),
        ):
            prompt, key = prompt_of(length, length), f"{length}/{sampling.temperature}"
            first = pair.start(prompt, sampling, name=key, session=key)
            assert (first.finish_reason, len(first.token_ids)) == (None, 1)
            result = pair.go_on(prompt, first, sampling, session=key)
            ask(both, key, prompt, sampling)
            expected = drain(both)[key]
            assert result.token_ids == expected.token_ids
            assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
            assert result.finish_reason is expected.finish_reason
            assert (result.cached_tokens, result.transferred_tokens, result.recomputed) == (
                length,
                length,
                "",
            )
            assert result.transferred_bytes > 0
    pair.close()


def test_bfloat16_travels_as_it_is(tmp_path: Path) -> None:
    LlamaConfig(**SMALL, dtype="bfloat16").save_pretrained(tmp_path)
    made = {
        role: TorchEngine.create(tmp_path, settings=GenerationSettings(role=role), seed=0)
        for role in ("prefill", "decode", "both")
    }
    pair = Pair(tmp_path / "pair")
    pair.close()
    pair.prefill, pair.decode = made["prefill"], made["decode"]
    pair.decode.attach(pair.arrived.set)
    prompt = prompt_of(3, 40)
    result = pair.go_on(prompt, pair.start(prompt))
    ask(made["both"], "x", prompt, LONG)
    assert result.token_ids == drain(made["both"])["x"].token_ids
    assert result.transferred_bytes == 40 * 2 * 2 * 16 * 2  # tokens, layers, keys and values, width, bytes
    pair.close()


def test_of_a_later_turn_only_the_new_part_is_fetched(pair: Pair) -> None:
    history, bytes_before = prompt_of(1, 30), 0
    for turn in range(4):
        name = f"turn{turn}"
        first = pair.start(history, name=name)
        result = pair.go_on(history, first)
        assert_agrees(pair.model, history, result, LONG)
        assert result.cached_tokens == len(history)
        if turn:
            # Everything but the last sampled token has gone through the decode engine in the turn before.
            assert result.transferred_tokens == 6
            assert result.transferred_bytes < bytes_before
            assert first.cached_tokens > 0
        bytes_before = bytes_before or result.transferred_bytes
        history = history + result.token_ids + prompt_of(50 + turn, 5)
        pair.prefill.tend()
        assert pair.prefill.kv_leases == 0


def test_a_first_token_that_ends_the_turn_is_the_answer(pair: Pair) -> None:
    prompt = prompt_of(2, 20)
    for sampling, reason in ((Sampling(max_tokens=1), FinishReason.LENGTH),):
        result = pair.start(prompt, sampling)
        assert result.finish_reason is reason
        assert result.kv_transfer_params is None
    greedy = pair.start(prompt, GREEDY, name="g")
    stop = Sampling(temperature=0.0, max_tokens=9, stop_token_ids=(greedy.token_ids[0],))
    assert pair.start(prompt, stop, name="stop").finish_reason is FinishReason.STOP
    pair.prefill.add(EngineRequest("full", "f", prompt, GREEDY, 21, prefill_only=True))
    assert drain(pair.prefill)["full"].finish_reason is FinishReason.CONTEXT


def test_decoding_of_others_goes_on_while_kv_is_on_its_way(pair: Pair) -> None:
    prompt = prompt_of(4, 40)
    first = pair.start(prompt)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pair.hand(prompt, first, remote_port=silent.getsockname()[1])
        assert not pair.decode.has_work
        ask(pair.decode, "other", prompt_of(5, 10), LONG)
        other = drain(pair.decode)["other"]
    assert_agrees(pair.model, prompt_of(5, 10), other, LONG)


@pytest.mark.parametrize(
    "reason", ["gone", "refused", "late", "version", "corrupt", "incompatible", "evicted"]
)
def test_kv_that_cannot_be_used_is_computed_again_for_a_stated_reason(reason: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, kv_fetch_timeout_s=0.3)
    prompt = prompt_of(6, 45)
    expected = together(pair, tmp_path, prompt, LONG)
    history = prompt[:20]
    if reason == "evicted":
        ask(pair.decode, "before", history, GREEDY, session="s")
        drain(pair.decode)
    first = pair.start(prompt)
    params = TransferParams.model_validate(first.kv_transfer_params)
    versions = [(1, 12)]
    match reason:
        case "gone":
            assert pair.prefill.abort("x")
            result = pair.go_on(prompt, first)
        case "refused":
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            result = pair.go_on(prompt, first, remote_port=port)
        case "late":
            with socket.create_server(("127.0.0.1", 0)) as silent:
                result = pair.go_on(prompt, first, remote_port=silent.getsockname()[1])
        case "version":
            pair.hand(prompt, first)
            until(lambda: pair.decode.has_work)
            load_weights(pair.decode, raw_weights(pair.model), version=2)
            result, versions = pair.finish("x"), [(1, 1), (2, 11)]
        case "corrupt":
            with broken_proxy(params) as port:
                result = pair.go_on(prompt, first, remote_port=port)
        case "incompatible":
            result = pair.go_on(prompt, first, remote_num_tokens=44)
        case _:
            pair.hand(prompt, first)
            pair.decode.forget("s")
            result = pair.finish("x")
    assert result.recomputed == ("gone" if reason == "refused" else reason)
    assert (result.token_ids, result.versions) == (expected.token_ids, versions)
    assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert (result.cached_tokens, result.transferred_tokens, result.transferred_bytes) == (0, 0, 0)
    pair.close()


class broken_proxy:
    """Passes one exchange through and flips a bit in the middle of what comes back."""

    def __init__(self, params: TransferParams) -> None:
        self._target = (params.remote_host, params.remote_port)
        self._listener = socket.create_server(("127.0.0.1", 0))

    def __enter__(self) -> int:
        threading.Thread(target=self._run, daemon=True).start()
        return int(self._listener.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        with client, socket.create_connection(self._target) as server:
            asked = receive_model(client, Ask)
            assert asked is not None
            send_model(server, asked)
            reply = receive_model(server, Reply)
            assert reply is not None
            send_model(client, reply)
            data = bytearray()
            while len(data) < reply.nbytes + 4 * 8:  # a chunk's head for keys and values of each layer
                data += server.recv(65536)
            data[len(data) // 2] ^= 1
            client.sendall(data)
            with contextlib.suppress(ConnectionError):
                client.recv(1)


def test_a_lost_connection_leaves_the_lease_for_another_try(pair: Pair) -> None:
    prompt = prompt_of(7, 33)
    first = pair.start(prompt)
    params = TransferParams.model_validate(first.kv_transfer_params)
    with socket.create_connection((params.remote_host, params.remote_port)) as careless:
        send_model(careless, Ask(lease=params.lease))
        assert receive_model(careless, Reply)
    result = pair.go_on(prompt, first)
    assert result.recomputed == ""
    until(lambda: pair.prefill.kv_leases == 0)
    again = pair.go_on(prompt, first, session="other")
    assert again.recomputed == "gone"
    assert again.token_ids == result.token_ids


def test_a_hundred_abandoned_prefills_leave_nothing_pinned(tmp_path: Path) -> None:
    pair = Pair(tmp_path, kv_lease_s=0.4)
    for i in range(100):
        pair.prefill.add(EngineRequest(f"x{i}", f"s{i}", prompt_of(i, 20), LONG, 1000, prefill_only=True))
    drain(pair.prefill)
    pair.prefill.abort("x0")
    assert pair.prefill.kv_usage > 0
    until(lambda: (pair.prefill.tend(), pair.prefill.kv_leases == 0)[1])
    pair.prefill.tend()
    assert pair.prefill.kv_usage == 0.0
    assert pair.prefill._pool.free == pair.prefill._pool.capacity
    pair.close()


def test_admission_waits_for_leases_and_goes_on_after_them(tmp_path: Path) -> None:
    pair = Pair(tmp_path, kv_lease_s=0.3, cache_tokens=256)
    for i in range(8):
        pair.prefill.add(EngineRequest(f"x{i}", f"s{i}", prompt_of(i, 60), LONG, 1000, prefill_only=True))
    done: set[str] = set()
    limit = time.monotonic() + 10
    while len(done) < 8 and time.monotonic() < limit:
        pair.prefill.tend()
        done |= {result.request_id for result in pair.prefill.step()}
    assert len(done) == 8
    pair.close()


def test_an_abort_of_a_turn_whose_kv_is_on_its_way_frees_both_ends(pair: Pair) -> None:
    prompt = prompt_of(8, 33)
    first = pair.start(prompt)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pair.hand(prompt, first, remote_port=silent.getsockname()[1])
        assert pair.decode.abort("x")
    assert (pair.decode.waiting, pair.decode.kv_usage, pair.decode.has_work) == (0, 0.0, False)
    second = pair.start(prompt, name="y")
    pair.hand(prompt, second)
    until(lambda: pair.decode.has_work)
    assert pair.decode.abort("y")
    assert pair.decode.step() == []
    assert pair.decode.kv_usage == 0.0


def test_leased_kv_outlives_a_swap_under_its_own_version(pair: Pair) -> None:
    prompt = prompt_of(9, 50)
    first = pair.start(prompt)
    load_weights(pair.prefill, raw_weights(build(seed=2)), version=2)
    result = pair.go_on(prompt, first)
    assert result.recomputed == ""
    assert_agrees(pair.model, prompt, result, LONG)
    until(lambda: pair.prefill.kv_leases == 0)
    pair.prefill.tend()
    # What the old weights computed is of no use for the session's next turn.
    assert pair.prefill._pool.free == pair.prefill._pool.capacity


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0\0\0\x05{}..."])
def test_a_stranger_on_the_kv_port_disturbs_nobody(garbage: bytes, pair: Pair) -> None:
    prompt = prompt_of(10, 33)
    first = pair.start(prompt)
    params = TransferParams.model_validate(first.kv_transfer_params)
    address = (params.remote_host, params.remote_port)
    strangers = [socket.create_connection(address) for _ in range(3)]
    for stranger in strangers:
        stranger.sendall(garbage)
    with socket.create_connection(address) as guess:
        send_model(guess, Ask(lease="not-a-lease"))
        reply = receive_model(guess, Reply)
        assert reply is not None
        assert not reply.found
    assert pair.go_on(prompt, first).recomputed == ""
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_events_keeps_blocks_accounted_on_both_ends(seed: int, tmp_path: Path) -> None:
    pair = Pair(tmp_path, cache_tokens=512, kv_lease_s=0.2, kv_fetch_timeout_s=0.3)
    rng = random.Random(seed)
    waiting: dict[str, tuple[list[int], EngineResult, str]] = {}
    version = 1
    for event in range(60):
        session = str(rng.randrange(5))
        match rng.choice(["start", "start", "hand", "hand", "step", "abort", "load", "drop", "tend"]):
            case "start":
                prompt = prompt_of(rng.randrange(3), rng.randint(1, 60))
                waiting[f"r{event}"] = (
                    prompt,
                    pair.start(prompt, name=f"r{event}", session=session),
                    session,
                )
            case "hand" if waiting:
                prompt, first, session = waiting.pop(rng.choice(list(waiting)))
                pair.hand(prompt, first, session=session)
            case "abort" if waiting:
                pair.prefill.abort(rng.choice(list(waiting)))
            case "load":
                version += 1
                load_weights(
                    rng.choice([pair.prefill, pair.decode]), raw_weights(pair.model), version=version
                )
            case "drop":
                pair.decode.forget(session)
            case "tend":
                pair.prefill.tend()
                pair.decode.tend()
            case _:
                for result in pair.decode.step():
                    assert result.error is None
        accounted(pair.decode)
    until(lambda: (pair.decode.step(), pair.decode.tend(), not pair.decode._live)[2])
    until(lambda: (pair.prefill.tend(), pair.prefill.kv_leases == 0)[1])
    pair.prefill.tend()
    for engine in (pair.prefill, pair.decode):
        accounted(engine)
        assert engine.kv_usage == 0.0
    pair.close()


def accounted(engine: TorchEngine) -> None:
    pool = engine._pool
    held = [block for sequence in engine._live.values() for block in sequence.blocks]
    assert pool.free + pool.cached + len(held) == pool.capacity
    assert len(set(held)) == len(held)
