"""`rollart bench engine`: our torch engine, `transformers` generate and vLLM on the same requests.

The same model of 25 million random weights in float32, the same 32 prompts, greedy, the same number of
threads. `mixed`: 16 to 128 prompt tokens, 4 to 128 new ones; `equal`: 64 and 64. A static batch of `generate`
runs until its longest request is done, and tokens that nobody asked for do not count. The best of some rounds
in turn is told. `step_over_forward`: the time of our decode step for 32 sequences, sampling and log-
probabilities included, over that of the bare model's forward pass for the same batch with KV of the same
length. vLLM is measured where this interpreter has it, or `.venv-vllm` (`make test-vllm` makes it).
Called by `rollart bench`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks.random_model import WINDOW, random_weights, small_config
from services.generation.protocol import Engine, EngineRequest, load_weights
from shared import registry
from shared.events import Sampling
from shared.settings import GenerationSettings

Request = tuple[list[int], int]
"""A prompt, and how many new tokens are wanted."""

_REQUESTS = 32
_ROUNDS = 3
_STEPS = 48
_CHILD_S = 300
_VLLM_PYTHON = Path(".venv-vllm/bin/python")


def requests(kind: str) -> list[Request]:
    """The same for every engine."""
    draw = random.Random(kind)
    vocabulary = small_config().vocab_size

    def one() -> Request:
        prompt, new = (draw.randint(16, 128), draw.randint(4, 128)) if kind == "mixed" else (64, 64)
        return [draw.randrange(2, vocabulary) for _ in range(prompt)], new

    return [one() for _ in range(_REQUESTS)]


def threads() -> int:
    """As many for each engine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class EngineRunner:
    """Drives an engine of ours as its worker does."""

    def __init__(self, name: str, folder: Path) -> None:
        settings = GenerationSettings(engine=name, threads=threads(), cache_tokens=16_384, dtype="float32")
        kind: type[Engine] = registry.load("engine", name, field="GENERATION__ENGINE")
        self.engine = kind.create(folder, settings=settings, seed=0)
        load_weights(self.engine, random_weights(small_config()), version=1)
        self._woken = threading.Event()
        self.engine.attach(self._woken.set)
        self._count = 0

    def add(self, wanted: list[Request]) -> None:
        """Queue requests, none of which shares a session with another."""
        for prompt, new in wanted:
            name = f"r{self._count}"
            self._count += 1
            sampling = Sampling(temperature=0.0, max_tokens=new)
            self.engine.add(EngineRequest(name, name, prompt, sampling, WINDOW))

    def run(self, wanted: list[Request]) -> int:
        """Sample them; the number of tokens."""
        self.add(wanted)
        left, tokens = len(wanted), 0
        while left:
            if not self.engine.has_work:
                self._woken.wait(0.01)
                self._woken.clear()
            for result in self.engine.step():
                if result.error is not None:
                    raise result.error
                left -= 1
                tokens += len(result.token_ids)
        return tokens


class Generate:
    """`transformers` generate on one static batch, padded on the left."""

    def __init__(self) -> None:
        self.model = bare_model()

    def run(self, wanted: list[Request]) -> int:
        """Sample them; the number of tokens that were wanted."""
        longest = max(len(prompt) for prompt, _ in wanted)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in wanted])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in wanted])
        most = max(new for _, new in wanted)
        self.model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=most,
            min_new_tokens=most,
            do_sample=False,
            pad_token_id=0,
        )
        return sum(new for _, new in wanted)


def bare_model() -> PreTrainedModel:
    """The model as transformers has it."""
    config = small_config()
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    state = {
        name: torch.frombuffer(bytearray(raw.data), dtype=torch.float32).view(raw.shape)
        for name, raw in random_weights(config).items()
    }
    model.load_state_dict(state)
    bare: PreTrainedModel = model.eval().requires_grad_(False)
    return bare


def rate(run: Callable[[list[Request]], int], wanted: list[Request]) -> float:
    """Tokens per second."""
    began = time.perf_counter()
    tokens = run(wanted)
    return tokens / (time.perf_counter() - began)


@torch.inference_mode()
def step_over_forward(runner: EngineRunner, model: PreTrainedModel) -> float:
    """Median time of a decode step over that of a forward pass, taken in turn at the same lengths."""
    batch = [(prompt, _STEPS + 2) for prompt, _ in requests("equal")]
    runner.add(batch)
    runner.engine.step()
    ids = torch.tensor([prompt for prompt, _ in batch])
    cache = DynamicCache()
    logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    ours, bare = [], []
    for _ in range(_STEPS):
        began = time.perf_counter()
        runner.engine.step()
        ours.append(time.perf_counter() - began)
        token = logits[:, -1:].argmax(-1)
        began = time.perf_counter()
        logits = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        bare.append(time.perf_counter() - began)
    while runner.engine.has_work:
        runner.engine.step()
    return statistics.median(ours) / statistics.median(bare)


def measure_vllm() -> dict[str, float]:
    """Tokens per second by kind, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        small_config().save_pretrained(folder)
        runner = EngineRunner("vllm", Path(folder))
        try:
            runner.run(requests("equal"))
            return {
                kind: max(rate(runner.run, requests(kind)) for _ in range(_ROUNDS))
                for kind in ("mixed", "equal")
            }
        finally:
            runner.engine.close()


def _vllm() -> dict[str, float] | None:
    """In a process of its own; None where vLLM is not installed."""
    here = importlib.util.find_spec("vllm") is not None
    if not here and not _VLLM_PYTHON.exists():
        return None
    command = [sys.executable if here else str(_VLLM_PYTHON), "-m", "benchmarks.engine", "vllm"]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_CHILD_S)
    if done.returncode:
        sys.stderr.write(done.stderr[-2000:])
        raise SystemExit(f"vLLM's part of the benchmark ended with code {done.returncode}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> dict[str, object]:
    """The figures: `{"engine": {"mixed": …, "equal": …, "step_over_forward", "threads"}}`."""
    torch.set_num_threads(threads())
    generate = Generate()
    with tempfile.TemporaryDirectory() as folder:
        small_config().save_pretrained(folder)
        ours = EngineRunner("torch", Path(folder))
        torch.set_num_threads(threads())
        figures: dict[str, object] = {}
        best: dict[tuple[str, str], float] = {}
        for kind in ("mixed", "equal"):
            wanted = requests(kind)
            for at in range(_ROUNDS + 1):
                for name, run in (("ours", ours.run), ("generate", generate.run)):
                    found = rate(run, wanted)
                    # The first round warms up.
                    best[kind, name] = max(best.get((kind, name), 0.0), found if at else 0.0)
        over = step_over_forward(ours, generate.model)
        ours.engine.close()
    vllm = _vllm()
    for kind in ("mixed", "equal"):
        figures[kind] = {
            "ours_tokens_per_s": round(best[kind, "ours"], 1),
            "generate_tokens_per_s": round(best[kind, "generate"], 1),
            "vllm_tokens_per_s": round(vllm[kind], 1) if vllm else None,
            "ours_over_generate": round(best[kind, "ours"] / best[kind, "generate"], 3),
        }
    return {"engine": {**figures, "step_over_forward": round(over, 3), "threads": threads()}}


if __name__ == "__main__":
    if sys.argv[1:] == ["vllm"]:
        print(json.dumps(measure_vllm()))
    else:
        print(json.dumps(main(), indent=2))
