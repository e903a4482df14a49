"""Hears how busy vLLM is, without its HTTP server. Imported only where vLLM is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class LoadLogger(StatLoggerBase):
    """Called by vLLM after each of its steps."""

    def __init__(self, heard: Callable[[int, int, float], None]) -> None:
        """`heard` is told running requests, waiting requests and KV usage."""
        self._heard = heard

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        """One step's figures."""
        if scheduler_stats is not None:
            self._heard(
                scheduler_stats.num_running_reqs,
                scheduler_stats.num_waiting_reqs,
                scheduler_stats.kv_cache_usage,
            )

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
