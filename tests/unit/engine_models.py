"""Small random models, engines for them and the reference they are held to; used by the engine tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from services.generation.engines.torch_engine import TorchEngine
from services.generation.protocol import Engine, EngineRequest, EngineResult, load_weights
from shared.events import Sampling
from shared.settings import GenerationSettings
from shared.weights import RawTensor

torch.set_num_threads(1)
VOCAB = 60
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.25,
}
GREEDY = Sampling(temperature=0.0, max_tokens=6)
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama_untied": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=160, initializer_range=0.25
    ),
}


def build(name: str = "llama", seed: int = 1) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        CONFIGS[name], attn_implementation="eager"
    )
    model.train(False)
    return model


def raw_weights(model: PreTrainedModel) -> dict[str, RawTensor]:
    return {
        name: RawTensor(dtype="F32", shape=tuple(t.shape), data=t.detach().numpy().tobytes())
        for name, t in model.state_dict().items()
    }


def engine_for(
    folder: Path, model: PreTrainedModel | None = None, *, name: str = "llama", **settings: object
) -> TorchEngine:
    CONFIGS[name].save_pretrained(folder)
    engine = TorchEngine.create(folder, settings=GenerationSettings.model_validate(settings), seed=0)
    if model is not None:
        load_weights(engine, raw_weights(model), version=1)
    return engine


def drain(engine: Engine) -> dict[str, EngineResult]:
    results: dict[str, EngineResult] = {}
    for _ in range(2000):
        if not engine.has_work:
            return results
        results |= {result.request_id: result for result in engine.step()}
    raise AssertionError("the engine does not finish")


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def ask(
    engine: TorchEngine,
    name: str,
    prompt: list[int],
    sampling: Sampling = GREEDY,
    *,
    session: str | None = None,
) -> EngineRequest:
    request = EngineRequest(name, session or name, prompt, sampling, 1000)
    engine.add(request)
    return request


@torch.no_grad()
def assert_agrees(
    model: PreTrainedModel, prompt: list[int], result: EngineResult, sampling: Sampling
) -> None:
    """Every reported log-probability, and every greedy choice, is what one full forward pass gives."""
    assert result.error is None
    tokens = prompt + result.token_ids
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
    if sampling.temperature == 0:
        assert logits.argmax(-1).tolist() == result.token_ids
    wanted = logprobs[range(len(result.token_ids)), result.token_ids].tolist()
    assert result.logprobs == pytest.approx(wanted, abs=1e-5)
