"""Our settings as vLLM's: its environment variables, read when it is imported, and its engine arguments."""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path
from typing import Any

from shared.errors import FieldProblem, Invalid
from shared.settings import GenerationSettings

_EXTENSION = "services.generation.engines.vllm_worker.WeightLoader"
_CPU_BLOCK = 32
_CONNECTOR_ROLE = {"prefill": "kv_producer", "decode": "kv_consumer"}


def environment(settings: GenerationSettings) -> None:
    """Set what vLLM reads from the environment, unless the operator has: before it is imported."""
    ours = {
        # One child process, the engine core with the worker in it: it ends with this one.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "OMP_NUM_THREADS": str(settings.threads),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": _own_host(settings),
    }
    if settings.device == "cpu":
        ours |= {
            "TORCHDYNAMO_DISABLE": "1",
            "UCX_TLS": "tcp,shm,self,posix,sysv,cma",
        }
    for name, value in ours.items():
        os.environ.setdefault(name, value)
    if settings.role != "both":
        # Each engine of a process needs a port of its own; a fixed one counts up with them.
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(_free_port(settings))


def make_config(model_dir: Path, settings: GenerationSettings) -> Any:
    """vLLM's configuration. Raises Invalid naming GENERATION__VLLM_ARGS for arguments that it does not
    take."""
    from vllm import AsyncEngineArgs

    arguments: dict[str, Any] = {
        "model": str(model_dir),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": settings.dtype,
        "logprobs_mode": "processed_logprobs",
        "max_num_seqs": settings.max_batch,
        "max_num_batched_tokens": settings.prefill_tokens,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "worker_extension_cls": _EXTENSION,
    }
    if settings.device == "cpu":
        blocks = math.ceil(settings.cache_tokens / _CPU_BLOCK)
        arguments |= {
            "enforce_eager": True,
            "block_size": _CPU_BLOCK,
            "num_gpu_blocks_override": blocks,
            "kv_cache_memory_bytes": 64 << 20,
        }
    if settings.role != "both":
        from vllm.config import KVTransferConfig

        connector: dict[str, Any] = {
            "kv_connector": settings.kv_connector,
            "kv_role": _CONNECTOR_ROLE[settings.role],
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": lease_s(settings)},
        }
        if settings.device == "cpu":
            connector["kv_buffer_device"] = "cpu"
        arguments["kv_transfer_config"] = KVTransferConfig(**connector)
    try:
        return AsyncEngineArgs(**arguments | settings.vllm_args).create_engine_config()
    except (TypeError, ValueError) as error:
        message = f"vLLM does not take these arguments: {error}"
        raise Invalid(
            message, fields=[FieldProblem(field="GENERATION__VLLM_ARGS", message=message)]
        ) from error


def lease_s(settings: GenerationSettings) -> int:
    """Seconds for which vLLM keeps handed-over KV for a decode worker that has not asked for it yet.

    No longer than one may still come: until they have ended, vLLM cannot take in new weights. A decode worker
    at which the turn waits in line keeps its lease alive.
    """
    return math.ceil(min(settings.kv_lease_s, settings.kv_fetch_timeout_s + 2))


def _own_host(settings: GenerationSettings) -> str:
    return socket.gethostname() if settings.kv_host in ("0.0.0.0", "::") else settings.kv_host


def _free_port(settings: GenerationSettings) -> int:
    for port in range(settings.kv_port, settings.kv_port + settings.max_policies):
        with socket.socket() as probe:
            try:
                probe.bind((settings.kv_host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    message = f"ports {settings.kv_port} and the {settings.max_policies - 1} after it are in use"
    raise Invalid(message, fields=[FieldProblem(field="GENERATION__KV_PORT", message=message)])
