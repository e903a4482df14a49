"""A small random model for the part of `pd.py` that computes for real."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from shared.weights import RawTensor

VOCABULARY = 512
WINDOW = 2048


def tiny_model() -> tuple[str, dict[str, RawTensor]]:
    """Its `config.json` and its weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WINDOW,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    tensors = {
        name: RawTensor(dtype="F32", shape=tuple(t.shape), data=t.detach().numpy().tobytes())
        for name, t in model.state_dict().items()
    }
    return config.to_json_string(), tensors
