"""How long a GPU takes for one pass of a language model: a roofline. Used by `synthetic_engine.py`.

Assumptions, all of them: the two GPUs of the RollArt paper's table 2 (peak FLOP/s in bf16 and HBM bandwidth);
half of the peak FLOP/s and 0.7 of the peak bandwidth are reached, on both; a pass takes the longer of its
arithmetic (two operations per parameter and token, and attention over the tokens before) and its reading
(all weights once, and the KV of every running sequence); nothing is lost between passes. The model has the
shape of Qwen3-8B in bf16. Nine tenths of a GPU's memory are used; what the weights leave of it holds KV. KV
goes from worker to worker at 25 GB/s, the paper's 200 Gbit/s Ethernet between clusters, and the hand-overs to
one worker follow one another.
"""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE_SHARE = 0.5
MEMORY_SHARE = 0.7
USED_SHARE = 0.9
LINK_BYTES_S = 25e9


@dataclass(frozen=True)
class Gpu:
    """A GPU's peak figures."""

    name: str
    flops: float
    """Operations per second in bf16."""
    read_bytes_s: float
    """Of its memory."""
    memory_bytes: float
    cost: float
    """Of an hour, relative to an H20."""


H800 = Gpu("H800", flops=989.5e12, read_bytes_s=3.35e12, memory_bytes=80e9, cost=2.85)
H20 = Gpu("H20", flops=148e12, read_bytes_s=4e12, memory_bytes=96e9, cost=1.0)


@dataclass(frozen=True)
class Model:
    """What of a model's shape decides how long it takes."""

    parameters: float = 8.19e9
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    value_bytes: int = 2
    """Of a weight, and of a number in the KV."""

    @property
    def weight_bytes(self) -> float:
        """All weights."""
        return self.parameters * self.value_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Key and value of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.value_bytes

    @property
    def attention_flops(self) -> int:
        """Scores and weighted sum of one token over one token before it, in all layers."""
        return 4 * self.layers * self.heads * self.head_size


QWEN3_8B = Model()


def pass_s(gpu: Gpu, *, tokens: float, attended: float, kv_tokens: float, model: Model = QWEN3_8B) -> float:
    """One pass over `tokens` new ones. `attended`: over how many earlier ones they attend, summed;
    `kv_tokens`: whose KV is read."""
    flops = tokens * 2 * model.parameters + attended * model.attention_flops
    read = model.weight_bytes + kv_tokens * model.kv_token_bytes
    return max(flops / (gpu.flops * COMPUTE_SHARE), read / (gpu.read_bytes_s * MEMORY_SHARE))


def kv_capacity(gpu: Gpu, model: Model = QWEN3_8B) -> int:
    """Tokens whose KV fits beside the weights."""
    return int((gpu.memory_bytes * USED_SHARE - model.weight_bytes) / model.kv_token_bytes)


def transfer_s(tokens: float, model: Model = QWEN3_8B) -> float:
    """The KV of so many tokens over the link."""
    return tokens * model.kv_token_bytes / LINK_BYTES_S
