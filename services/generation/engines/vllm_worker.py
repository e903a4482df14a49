"""What of us runs inside vLLM's own process: loads weights, and ends that process with its parent.

Named as `worker_extension_cls` by `vllm_engine.py`; vLLM imports it in its engine process, where its class
becomes part of the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.kv_transfer import get_kv_transfer_group

_PR_SET_PDEATHSIG = 1
_LOOK_S = 1.0


def _end_with_parent() -> None:
    """A service that is killed takes its engine along, instead of leaving it with the GPU's memory."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    # Where there is no such signal, and for a parent that died before it was asked for.
    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def _keep_weights_writable() -> None:
    """On the CPU vLLM packs linear layers for oneDNN, and a later load would not reach what it computes
    with."""
    if not torch.cuda.is_available():
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False


if multiprocessing.parent_process() is not None:
    _end_with_parent()
    _keep_weights_writable()


class WeightLoader:
    """Becomes part of vLLM's worker: `self` is that worker."""

    model_runner: Any

    def rollart_leases(self, ending: dict[str, float]) -> list[str]:
        """Requests whose KV waits to be fetched, by vLLM's id; of those in `ending` the lease ends after so
        many seconds at the latest."""
        leases: dict[str, float] = {}
        with contextlib.suppress(AssertionError):
            worker = getattr(get_kv_transfer_group(), "connector_worker", None)
            leases = getattr(worker, "_reqs_to_send", leases)
        for name in ending.keys() & leases.keys():
            leases[name] = min(leases[name], time.perf_counter() + ending[name])
        return list(leases)

    def rollart_load(self, paths: list[str]) -> int:
        """Replace the weights by those in safetensors files, already checked; how many tensors the model
        took."""

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for path in paths:
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        yield name, file.get_tensor(name)

        with torch.no_grad():
            return len(self.model_runner.model.load_weights(tensors()) or ())
