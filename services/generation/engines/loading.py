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


_SPARED = 16
"""One part in so many of a GPU's memory is left to the engine while weights are staged."""


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


class WeightCheck:
    """Holds the tensors of one version against a model as they come. Touches nothing of the model.

    Names are those of the state dict; of tied tensors one name is enough.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        cast: bool = False,
        stage: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda tensor, target: tensor,
    ) -> None:
        """`cast`: any floating dtype will do where the model's is one. `stage` is given a tensor that shares
        the bytes it came in, and the model's own, and gives what is kept of it."""
        self._expected = model.state_dict(keep_vars=True)
        self._cast = cast
        self._stage = stage
        self._given: dict[int, tuple[str, torch.Tensor]] = {}
        self._refused: WeightsInvalid | None = None

    def add(self, tensors: Mapping[str, RawTensor]) -> dict[str, torch.Tensor]:
        """The tensors of one bucket that are new, decoded; of tied ones the first.

        Raises WeightsInvalid naming the tensor, for an unknown name, another shape or dtype, too few bytes, a
        value that is not finite, or tied tensors that differ; then the whole version is refused.
        """
        if self._refused is None:
            try:
                return self._add(tensors)
            except WeightsInvalid as error:
                self._refused = error
                self._given.clear()
        raise self._refused

    def _add(self, tensors: Mapping[str, RawTensor]) -> dict[str, torch.Tensor]:
        unknown = sorted(tensors.keys() - self._expected.keys())
        if unknown:
            raise WeightsInvalid(f"unknown tensor {unknown[0]!r} ({len(unknown)} unknown in all)")
        new = {}
        for name, raw in tensors.items():
            tensor = _decode(name, raw, like=self._expected[name], cast=self._cast)
            key = id(self._expected[name])
            if key not in self._given:
                new[name] = self._stage(tensor, self._expected[name])
                self._given[key] = (name, new[name])
                continue
            first, earlier = self._given[key]
            if not torch.equal(earlier, tensor.to(earlier.device)):
                raise WeightsInvalid(f"tensors {first!r} and {name!r} are tied in the model but differ")
        return new

    def check(self) -> None:
        """Raises WeightsInvalid naming a tensor that has not come, or was refused."""
        if self._refused is not None:
            raise self._refused
        missing = [name for name, target in self._expected.items() if id(target) not in self._given]
        if missing:
            raise WeightsInvalid(f"tensor {missing[0]!r} is missing ({len(missing)} missing in all)")

    def install(self) -> None:
        """Make what was staged the model's own; where that is on the model's device, without a copy."""
        with torch.no_grad():
            for target in self._expected.values():
                new = self._given[id(target)][1]
                if new.device == target.device:
                    target.data = new
                else:
                    target.copy_(new)
        self._given.clear()


class StagedWeights:
    """One version on its way into a model: see `services.generation.protocol.WeightLoad`.

    Tensors are brought to the model's device as they come, so that a swap only changes pointers. That takes
    the memory of a second set of weights until then; what the device has no room for waits on the CPU.
    """

    def __init__(self, model: torch.nn.Module, swapped: Callable[[], None]) -> None:
        """`swapped` is called when the model holds the new weights."""
        device = next(model.parameters()).device
        across = _linear_weights(model) if device.type == "cpu" else frozenset()
        self._weights = WeightCheck(
            model, stage=lambda tensor, target: _stage(tensor, device, across=id(target) in across)
        )
        self._swapped = swapped

    def add(self, tensors: Mapping[str, RawTensor]) -> None:
        """Take in one bucket. Raises WeightsInvalid."""
        self._weights.add(tensors)

    def check(self) -> None:
        """Raises WeightsInvalid where a tensor has not come."""
        self._weights.check()

    def swap(self) -> None:
        """Put everything into the model. Raises WeightsInvalid, and changes nothing, where it is not
        whole."""
        self._weights.check()
        self._weights.install()
        self._swapped()


def _linear_weights(model: torch.nn.Module) -> frozenset[int]:
    """Ids of the weights that only linear layers use."""
    found: set[int] = set()
    elsewhere: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            linear = isinstance(module, torch.nn.Linear) and name == "weight"
            (found if linear else elsewhere).add(id(parameter))
    return frozenset(found - elsewhere)


def _stage(tensor: torch.Tensor, device: torch.device, *, across: bool) -> torch.Tensor:
    """A copy that owns its memory, aligned as torch wants it.

    `across`: of the same shape, but with its columns one after the other. MKL multiplies the few rows of a
    decode step by such a weight up to twice as fast (`rollart bench engine`).
    """
    if across:
        return tensor.t().contiguous().t()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if tensor.nbytes < free - total // _SPARED:
            return tensor.to(device)
    return tensor.clone()


def _decode(name: str, raw: RawTensor, *, like: torch.Tensor, cast: bool) -> torch.Tensor:
    """The tensor on the CPU, sharing the bytes of `raw`."""
    dtype = _DTYPES.get(raw.dtype)
    castable = cast and dtype is not None and dtype.is_floating_point and like.is_floating_point()
    if dtype is None or (dtype != like.dtype and not castable):
        raise WeightsInvalid(f"tensor {name!r} is {raw.dtype}, the model's is {like.dtype}")
    if tuple(raw.shape) != tuple(like.shape):
        raise WeightsInvalid(f"tensor {name!r} has shape {list(raw.shape)}, the model's {list(like.shape)}")
    size, needed = memoryview(raw.data).nbytes, math.prod(raw.shape) * dtype.itemsize
    if size != needed:
        raise WeightsInvalid(f"tensor {name!r} has {size} bytes, its shape needs {needed}")
    if not needed:
        return torch.empty(raw.shape, dtype=dtype)
    with warnings.catch_warnings():
        # The bytes are only read.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        tensor = torch.frombuffer(raw.data, dtype=dtype).view(raw.shape)
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise WeightsInvalid(f"tensor {name!r} holds values that are not finite")
    return tensor
