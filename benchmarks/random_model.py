"""Random models for the benchmarks that compute for real."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from shared.weights import RawTensor

VOCABULARY = 512
WINDOW = 2048


def tiny_config() -> LlamaConfig:
    """1 million parameters: its steps cost what surrounds the model."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WINDOW,
    )


def small_config() -> LlamaConfig:
    """25 million parameters, 100 MB: a step costs what the model does, and weights take time to move."""
    return LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=WINDOW,
    )


def random_weights(config: LlamaConfig, *, seed: int = 0) -> dict[str, RawTensor]:
    """As they come from the store."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return {
        name: RawTensor(dtype="F32", shape=tuple(t.shape), data=t.detach().numpy().tobytes())
        for name, t in model.state_dict().items()
    }
