"""The engine under test, the model it runs, and the reference it is held to.

ENGINE_UNDER_TEST names it: `torch` (the default) or `vllm`. The tests know nothing of either; they use what
`services/generation/protocol.py` promises, as `services/generation/worker.py` does.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from services.generation.protocol import Engine, EngineRequest, EngineResult
from shared import registry
from shared.events import Prefilled, Sampling
from shared.settings import GenerationSettings
from shared.weights import RawTensor

torch.set_num_threads(1)
NAME = os.environ.get("ENGINE_UNDER_TEST", "torch")
VOCAB = 60
WINDOW = 160
TOLERANCE = 2e-5
"""Between two ways to compute the same in float32: order of summation, nothing else."""
GREEDY = Sampling(temperature=0.0, max_tokens=6)
LONG = Sampling(temperature=0.0, max_tokens=24)
_LIMIT_S = 60.0


def config() -> Qwen2Config:
    """Heads of a size that every engine's attention takes; sharp enough for greedy choices to be clear."""
    return Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WINDOW,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )


def build(seed: int) -> PreTrainedModel:
    """The model with the weights of a seed."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config(), attn_implementation="eager", dtype=torch.float32
    )
    model.train(False)
    return model


def raw_weights(model: PreTrainedModel) -> dict[str, RawTensor]:
    """As they come from the store."""
    return {
        name: RawTensor(dtype="F32", shape=tuple(t.shape), data=t.detach().numpy().tobytes())
        for name, t in model.state_dict().items()
    }


def prompt_of(seed: int, length: int) -> list[int]:
    """Random ids."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


class Driven:
    """An engine, driven as its worker drives it: asleep until there is work or it wakes us."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        config().save_pretrained(folder)
        values = {"dtype": "float32", "max_batch": 16, "prefill_tokens": 64, "cache_tokens": 4096}
        made = GenerationSettings.model_validate({**values, "engine": NAME, **settings})
        kind = registry.load("engine", NAME, field="ENGINE_UNDER_TEST")
        self.engine: Engine = kind.create(folder, settings=made, seed=0)
        self._woken = threading.Event()
        self.engine.attach(self._woken.set)

    def ask(
        self,
        name: str,
        prompt: list[int],
        sampling: Sampling = GREEDY,
        *,
        session: str | None = None,
        window: int = WINDOW,
        prefill_only: bool = False,
        prefilled: Prefilled | None = None,
    ) -> None:
        """Queue a request."""
        self.engine.add(
            EngineRequest(name, session or name, prompt, sampling, window, prefill_only, prefilled)
        )

    def until(self, done: Callable[[dict[str, EngineResult]], bool]) -> dict[str, EngineResult]:
        """Run until the results so far are what is waited for."""
        limit = time.monotonic() + _LIMIT_S
        results: dict[str, EngineResult] = {}
        while not done(results):
            assert time.monotonic() < limit, "the engine does not get on"
            if self.engine.has_work:
                results |= {result.request_id: result for result in self.engine.step()}
            else:
                self._woken.wait(0.01)
                self._woken.clear()
                self.engine.tend()
        return results

    def results(self, *names: str) -> dict[str, EngineResult]:
        """Run until these requests have ended."""
        return self.until(lambda found: found.keys() >= set(names))

    def one(self, name: str, prompt: list[int], sampling: Sampling = GREEDY, **more: Any) -> EngineResult:
        """A single request from its start to its end."""
        self.ask(name, prompt, sampling, **more)
        return self.results(name)[name]

    def load(self, weights: dict[str, RawTensor], version: int) -> None:
        """Weights in several buckets, pulled by another thread as in the service, then swapped."""
        update = self.engine.begin_load(version)
        failures: list[BaseException] = []

        def pull() -> None:
            try:
                names = list(weights)
                for at in range(0, len(names), 5):
                    update.add({name: weights[name] for name in names[at : at + 5]})
                update.check()
            except BaseException as error:
                failures.append(error)

        puller = threading.Thread(target=pull)
        puller.start()
        puller.join()
        if failures:
            raise failures[0]
        update.swap()


class Versioned(Driven):
    """Counts versions up, whatever test loads."""

    version = 0

    def take(self, seed: int) -> int:
        """Load the weights of a seed as the next version."""
        self.version += 1
        self.load(raw_weights(build(seed)), self.version)
        return self.version


class Pair:
    """A prefill engine and a decode engine."""

    def __init__(self, folder: Path) -> None:
        # One folder: what vLLM's connector compares before it moves KV includes the model's path.
        self.prefill = Versioned(folder, role="prefill", kv_lease_s=3)
        self.decode = Versioned(folder, role="decode", kv_lease_s=3)

    def take(self, seed: int) -> None:
        """The same weights for both."""
        version = max(self.prefill.version, self.decode.version)
        for one in (self.prefill, self.decode):
            one.version = version
            one.take(seed)


@torch.no_grad()
def expected_logprobs(
    model: PreTrainedModel, prompt: list[int], token_ids: list[int], sampling: Sampling
) -> torch.Tensor:
    """Log-probabilities before each sampled token, shape (tokens, VOCAB): one full forward pass, then
    temperature, top-k, top-p and renormalisation."""
    logits = model(torch.tensor([prompt + token_ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    logits = logits / (sampling.temperature or 1.0)
    if sampling.temperature and sampling.top_k > 0:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.temperature and sampling.top_p < 1:
        ordered, index = logits.softmax(-1).sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, before >= sampling.top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    return logits.log_softmax(-1)


def assert_agrees(
    model: PreTrainedModel,
    prompt: list[int],
    result: EngineResult,
    sampling: Sampling,
    part: slice = slice(None),
) -> None:
    """Each log-probability, and each greedy choice, is what the model gives for the tokens before."""
    assert result.error is None
    wanted = expected_logprobs(model, prompt, result.token_ids, sampling)
    if sampling.temperature == 0:
        assert wanted.argmax(-1).tolist()[part] == result.token_ids[part]
    chosen = wanted[range(len(result.token_ids)), result.token_ids].tolist()
    assert result.logprobs[part] == pytest.approx(chosen[part], abs=TOLERANCE)
