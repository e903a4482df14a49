"""The synthetic engine takes the seconds that the roofline says, and keeps the engines' protocol."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_speeds
from benchmarks.gpu_speeds import H20, H800
from benchmarks.synthetic_engine import ByClass, SyntheticEngine
from services.generation.protocol import Engine, EngineRequest, EngineResult, load_weights
from shared.errors import Conflict, Invalid
from shared.events import FinishReason, Prefilled, Sampling
from shared.settings import GenerationSettings

KV_TOKEN = 2 * 36 * 8 * 128 * 2
ATTENTION = 4 * 36 * 32 * 128
FAST = 1e6


def engine_of(
    folder: Path, device_class: str = "compute", *, divisor: float = FAST, per_id: int = 1, **settings: object
) -> SyntheticEngine:
    folder.mkdir(exist_ok=True)
    synthetic = {"time_divisor": divisor, "tokens_per_id": per_id}
    (folder / "config.json").write_text(json.dumps({"synthetic": synthetic}))
    given = GenerationSettings.model_validate({"device_class": device_class, **settings})
    engine = ByClass.create(folder, settings=given, seed=0)
    load_weights(engine, {}, version=3)
    return engine


def request(name: str, prompt: list[int], new: int, *, session: str = "", **more: object) -> EngineRequest:
    asked = EngineRequest(name, session or name, prompt, Sampling(max_tokens=new), 1 << 20)
    return replace(asked, **more)  # type: ignore[arg-type]


def finish(engine: Engine, *, steps: int = 10_000) -> dict[str, EngineResult]:
    found: dict[str, EngineResult] = {}
    for _ in range(steps):
        if not engine.has_work:
            return found
        found |= {result.request_id: result for result in engine.step()}
    raise AssertionError("the engine does not come to an end")


def prompt_s(gpu: gpu_speeds.Gpu, tokens: int, *, before: int = 0) -> float:
    """A chunk of a prompt, its arithmetic alone."""
    attended = before * tokens + tokens * tokens // 2
    return (tokens * 2 * 8.19e9 + attended * ATTENTION) / (gpu.flops * 0.5)


def decode_s(gpu: gpu_speeds.Gpu, kv_tokens: int) -> float:
    """A pass that decodes, its reading alone."""
    return (2 * 8.19e9 + kv_tokens * KV_TOKEN) / (gpu.read_bytes_s * 0.7)


def test_a_pass_takes_the_seconds_computed_by_hand() -> None:
    assert gpu_speeds.pass_s(H800, tokens=4096, attended=4096 * 2048, kv_tokens=0) == pytest.approx(
        0.145609, abs=1e-6
    )
    assert gpu_speeds.pass_s(H20, tokens=4096, attended=4096 * 2048, kv_tokens=0) == pytest.approx(
        0.973517, abs=1e-6
    )
    assert gpu_speeds.pass_s(H800, tokens=1, attended=1000, kv_tokens=1000) == pytest.approx(
        0.007048, abs=1e-6
    )
    assert gpu_speeds.pass_s(H20, tokens=1, attended=1000, kv_tokens=1000) == pytest.approx(
        0.005903, abs=1e-6
    )
    assert gpu_speeds.transfer_s(1000) == pytest.approx(0.005898, abs=1e-6)
    assert gpu_speeds.kv_capacity(H800) == 377_197
    assert gpu_speeds.kv_capacity(H20) == 474_853


@pytest.mark.parametrize(("device_class", "gpu"), [("compute", H800), ("bandwidth", H20)])
def test_a_turn_takes_its_chunks_and_then_one_pass_a_token(
    tmp_path: Path, device_class: str, gpu: gpu_speeds.Gpu
) -> None:
    engine = engine_of(tmp_path, device_class, prefill_tokens=4096)
    engine.add(request("a", [7] * 6000, 3))
    (result,) = finish(engine).values()
    expected = prompt_s(gpu, 4096) + prompt_s(gpu, 1904, before=4096)
    expected += sum(decode_s(gpu, 6000 + i) for i in range(3))
    assert engine.gpu_s == pytest.approx(expected, rel=1e-9)
    assert result.token_ids == [1, 2, 3]
    assert result.versions == [(3, 3)]
    assert result.finish_reason is FinishReason.LENGTH


def test_what_a_session_left_behind_is_not_computed_again(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    engine.add(request("a", [7] * 3000, 2, session="s"))
    first = finish(engine)["a"]
    before = engine.gpu_s
    engine.add(request("b", [7] * 3000 + first.token_ids + [9] * 500, 1, session="s"))
    assert finish(engine)["b"].cached_tokens == 3002
    assert engine.gpu_s - before == pytest.approx(
        prompt_s(H800, 500, before=3002) + decode_s(H800, 3502), rel=1e-9
    )
    engine.forget("s")
    engine.add(request("c", [7] * 3000, 1, session="s"))
    assert finish(engine)["c"].cached_tokens == 0


def test_a_long_prompt_holds_up_the_decodes_of_others_in_its_passes(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "bandwidth")
    engine.add(request("decodes", [7] * 100, 50))
    engine.step()
    engine.step()
    before = engine.gpu_s
    engine.add(request("prompt", [7] * 3000, 1))
    engine.step()
    assert engine.peek("decodes", 0)[0] == [1, 2]
    assert engine.gpu_s - before > 100 * decode_s(H20, 101)
    assert engine.gpu_s - before == pytest.approx(prompt_s(H20, 3000), rel=0.01)


def test_an_id_that_stands_for_many_tokens_takes_as_many_passes(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, per_id=16)
    engine.add(request("a", [7] * 100, 2))
    assert len(finish(engine)["a"].token_ids) == 2
    expected = prompt_s(H800, 1600) + 16 * decode_s(H800, 1600) + 16 * decode_s(H800, 1616)
    assert engine.gpu_s == pytest.approx(expected, rel=1e-9)


def test_a_step_lasts_as_long_as_the_gpu_would_take_by_the_divisor(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "bandwidth", divisor=20)
    engine.add(request("a", [7] * 4000, 2))
    began = time.perf_counter()
    result = finish(engine)["a"]
    assert time.perf_counter() - began >= engine.gpu_s / 20
    assert result.prefill_s + result.decode_s >= engine.gpu_s / 20


def handed_over(prefill: Engine, prompt: list[int], new: int) -> Prefilled:
    prefill.add(request("a", prompt, new, session="s", prefill_only=True))
    result = finish(prefill)["a"]
    assert result.finish_reason is None
    assert result.kv_transfer_params is not None
    return Prefilled(
        worker_id="p", device_class="compute", token_ids=result.token_ids, logprobs=result.logprobs,
        versions=result.versions, version=3, kv_transfer_params=result.kv_transfer_params,
    )  # fmt: skip


def test_a_split_turn_is_that_of_one_worker_and_its_prompt_is_computed_once(tmp_path: Path) -> None:
    alone = engine_of(tmp_path / "alone")
    prefill, decode = engine_of(tmp_path / "p"), engine_of(tmp_path / "d", "bandwidth")
    prompt = [7] * 2000
    alone.add(request("a", prompt, 4, session="s"))
    prefilled = handed_over(prefill, prompt, 4)
    assert prefill.gpu_s == pytest.approx(prompt_s(H800, 2000), rel=1e-9)
    assert prefill.kv_leases == 1
    decode.add(request("a", prompt, 4, session="s", prefilled=prefilled))
    split, whole = finish(decode)["a"], finish(alone)["a"]
    assert (split.token_ids, split.logprobs, split.versions) == (
        whole.token_ids,
        whole.logprobs,
        whole.versions,
    )
    assert decode.gpu_s == pytest.approx(
        sum(decode_s(H20, tokens) for tokens in (2001, 2001, 2002, 2003)), rel=1e-9
    )
    assert (split.transferred_tokens, split.transferred_bytes) == (2000, 2000 * KV_TOKEN)
    assert (split.cached_tokens, split.recomputed) == (2000, "")


def test_only_what_the_decode_worker_has_not_kept_comes_over_the_link(tmp_path: Path) -> None:
    prefill, decode = engine_of(tmp_path / "p"), engine_of(tmp_path / "d")
    decode.add(request("a", [7] * 100, 2, session="s", prefilled=handed_over(prefill, [7] * 100, 2)))
    first = finish(decode)["a"]
    prompt = [7] * 100 + first.token_ids + [9] * 50
    decode.add(request("a", prompt, 2, session="s", prefilled=handed_over(prefill, prompt, 2)))
    assert finish(decode)["a"].transferred_tokens == 50


def test_kv_that_cannot_be_had_is_computed_again_and_the_reason_told(tmp_path: Path) -> None:
    prefill, decode = engine_of(tmp_path / "p"), engine_of(tmp_path / "d")
    good = handed_over(prefill, [7] * 300, 2)
    gone = good.model_copy(update={"kv_transfer_params": good.kv_transfer_params | {"expires_at": 1.0}})
    odd = good.model_copy(update={"kv_transfer_params": {"remote_host": "elsewhere"}})
    old = good.model_copy(update={"version": 2})
    for reason, prefilled in (("gone", gone), ("incompatible", odd), ("version", old)):
        before = decode.gpu_s
        decode.add(request(reason, [7] * 300, 2, prefilled=prefilled))
        result = finish(decode)[reason]
        assert (result.recomputed, result.token_ids) == (reason, [1, 2])
        assert (result.cached_tokens, result.transferred_tokens, result.transfer_s) == (0, 0, 0.0)
        assert decode.gpu_s - before > prompt_s(H800, 300)


def test_new_weights_make_all_kv_be_computed_again_and_label_the_tokens_after_them(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    engine.add(request("a", [7] * 1000, 4))
    for _ in range(3):
        engine.step()
    before = engine.gpu_s
    load_weights(engine, {}, version=4)
    result = finish(engine)["a"]
    assert result.versions == [(3, 2), (4, 2)]
    assert engine.gpu_s - before == pytest.approx(
        prompt_s(H800, 1002) + decode_s(H800, 1002) + decode_s(H800, 1003), rel=1e-9
    )


def test_requests_wait_for_memory_and_kept_sessions_make_room(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, per_id=1000)
    capacity = gpu_speeds.kv_capacity(H800) // 1000
    engine.add(request("kept", [7] * (capacity - 10), 1))
    finish(engine)
    engine.add(request("a", [7] * (capacity // 2), 2))
    engine.add(request("b", [7] * (capacity // 2), 2))
    engine.step()
    assert (engine.running, engine.waiting) == (1, 1)
    assert engine.kv_usage <= 1
    assert len(finish(engine)) == 2
    engine.add(request("kept-2", [7] * (capacity - 10), 1, session="kept"))
    assert finish(engine)["kept-2"].cached_tokens == 0
    with pytest.raises(Invalid, match="GPU has"):
        engine.add(request("larger", [7] * capacity, 1))


def test_duplicates_are_refused_aborts_free_and_leases_expire(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, kv_lease_s=0.001)
    engine.add(request("a", [7] * 10, 5))
    with pytest.raises(Conflict):
        engine.add(request("a", [7] * 10, 5))
    assert engine.abort("a")
    assert not engine.abort("a")
    assert not engine.has_work
    handed_over(engine, [7] * 10, 2)
    time.sleep(0.002)
    engine.tend()
    assert engine.kv_leases == 0


def test_a_class_without_a_gpu_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="'other'"):
        engine_of(tmp_path, "other")
    (tmp_path / "config.json").write_text('{"synthetic": {"speed": 3}}')
    with pytest.raises(Invalid, match="synthetic"):
        ByClass.create(tmp_path, settings=GenerationSettings(), seed=0)


def test_it_needs_no_torch() -> None:
    code = "import sys, benchmarks.synthetic_engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
