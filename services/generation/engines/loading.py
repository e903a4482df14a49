"""Builds a model from its configuration and replaces its weights. Used by the torch engine alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from services.generation.engines.paged_attention import IMPLEMENTATION
from shared.errors import Invalid, WeightsInvalid
from shared.weights import RawTensor

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


def build_model(model_dir: Path, *, device: torch.device, seed: int) -> PreTrainedModel:
    """A causal LM with random weights, ready for paged attention. Raises Invalid for a folder without one."""
    try:
        config = AutoConfig.from_pretrained(model_dir)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, attn_implementation=IMPLEMENTATION
            )
    except (OSError, ValueError, KeyError) as error:
        raise Invalid(f"no causal language model can be built from {model_dir}: {error}") from error
    built: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return built


class StagedWeights:
    """One version on its way into a model: see `services.generation.protocol.WeightLoad`.

    Names are those of the state dict; of tied tensors one name is enough. Everything is checked and decoded
    as it comes; only `swap` touches the model.
    """

    def __init__(self, model: torch.nn.Module, swapped: Callable[[], None]) -> None:
        """`swapped` is called when the model holds the new weights."""
        self._expected = model.state_dict(keep_vars=True)
        self._given: dict[int, tuple[str, torch.Tensor]] = {}
        self._swapped = swapped

    def add(self, tensors: Mapping[str, RawTensor]) -> None:
        """Take in one bucket. Raises WeightsInvalid naming the tensor, for an unknown name, another shape or
        dtype, too few bytes, a value that is not finite, or tied tensors that differ."""
        unknown = sorted(tensors.keys() - self._expected.keys())
        if unknown:
            raise WeightsInvalid(f"unknown tensor {unknown[0]!r} ({len(unknown)} unknown in all)")
        for name, raw in tensors.items():
            tensor = _decode(name, raw, like=self._expected[name])
            first, earlier = self._given.setdefault(id(self._expected[name]), (name, tensor))
            if earlier is not tensor and not torch.equal(earlier, tensor):
                raise WeightsInvalid(f"tensors {first!r} and {name!r} are tied in the model but differ")

    def check(self) -> None:
        """Raises WeightsInvalid naming a tensor that has not come."""
        missing = [name for name, target in self._expected.items() if id(target) not in self._given]
        if missing:
            raise WeightsInvalid(f"tensor {missing[0]!r} is missing ({len(missing)} missing in all)")

    def swap(self) -> None:
        """Copy everything into the model. Raises WeightsInvalid, and changes nothing, where it is not
        whole."""
        self.check()
        with torch.no_grad():
            for target in self._expected.values():
                target.copy_(self._given[id(target)][1])
        self._swapped()


def _decode(name: str, raw: RawTensor, *, like: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, sharing the bytes of `raw`."""
    if _DTYPES.get(raw.dtype) != like.dtype:
        raise WeightsInvalid(f"tensor {name!r} is {raw.dtype}, the model's is {like.dtype}")
    if tuple(raw.shape) != tuple(like.shape):
        raise WeightsInvalid(f"tensor {name!r} has shape {list(raw.shape)}, the model's {list(like.shape)}")
    size, needed = memoryview(raw.data).nbytes, math.prod(raw.shape) * like.element_size()
    if size != needed:
        raise WeightsInvalid(f"tensor {name!r} has {size} bytes, its shape needs {needed}")
    if not needed:
        return torch.empty(raw.shape, dtype=like.dtype)
    with warnings.catch_warnings():
        # The bytes are only read.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        tensor = torch.frombuffer(raw.data, dtype=like.dtype).view(raw.shape)
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise WeightsInvalid(f"tensor {name!r} holds values that are not finite")
    return tensor
