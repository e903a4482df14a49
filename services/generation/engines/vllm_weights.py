"""A new version on its way into vLLM: checked here, handed over as files. Used by `vllm_engine.py`.

A load that fails inside vLLM leaves it without usable weights, so nothing reaches it that was not checked
against the model first.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.generation.engines.loading import WeightCheck
from shared.errors import WeightsInvalid
from shared.weights import RawTensor

_MEMORY = Path("/dev/shm")
"""Files that never touch a disk, where the system has such a place."""


class FileLoad:
    """See `services.generation.protocol.WeightLoad`."""

    def __init__(self, shape: torch.nn.Module, swap: Callable[[list[str]], None]) -> None:
        """`shape` is the model without values; `swap` is given the files of a whole version."""
        self._weights = WeightCheck(shape, cast=True)
        self._swap = swap
        self._folder: Path | None = None
        self._paths: list[str] = []
        self._checked = False

    def add(self, tensors: Mapping[str, RawTensor]) -> None:
        """Check one bucket and write it down. Raises WeightsInvalid."""
        try:
            new = self._weights.add(tensors)
            if new:
                if self._folder is None:
                    place = _MEMORY if _MEMORY.is_dir() else None
                    self._folder = Path(tempfile.mkdtemp(prefix="rollart-weights-", dir=place))
                path = self._folder / f"{len(self._paths):04d}.safetensors"
                # Raw tensors share one buffer: a file wants each to own its memory.
                save_file({name: tensor.clone() for name, tensor in new.items()}, path)
                self._paths.append(str(path))
        except BaseException:
            self._remove()
            raise

    def check(self) -> None:
        """Raises WeightsInvalid where a tensor has not come."""
        try:
            self._weights.check()
        except WeightsInvalid:
            self._remove()
            raise
        self._checked = True

    def swap(self) -> None:
        """Have vLLM load the files. Raises WeightsInvalid where they were not checked, Internal where vLLM
        fails: its process is then of no use any more."""
        if not self._checked:
            self.check()
        try:
            self._swap(self._paths)
        finally:
            self._remove()

    def __del__(self) -> None:
        self._remove()

    def _remove(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
