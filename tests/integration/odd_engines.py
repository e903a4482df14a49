"""Engines that fail as engines do, and answer at once otherwise. Named in settings as `odd_engines:Class`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import ClassVar

from services.generation.engines.instant import InstantEngine
from services.generation.protocol import EngineResult, WeightLoad
from shared.errors import WeightsInvalid
from shared.weights import RawTensor

NAN = float("nan")


class NanFirst(InstantEngine):
    """NaN in the first answer, null in the second, -inf in the third; then all is well."""

    def __init__(self, *, window: int, vocab_size: int, max_batch: int) -> None:
        super().__init__(window=window, vocab_size=vocab_size, max_batch=max_batch)
        self.bad: list[float | None] = [NAN, None, float("-inf")]

    def step(self) -> list[EngineResult]:
        results = super().step()
        for i, result in enumerate(results):
            if self.bad:
                logprobs = [-1.0] * (len(result.token_ids) - 1) + [self.bad.pop(0)]
                results[i] = dataclasses.replace(result, logprobs=logprobs)
        return results


class NanAlways(InstantEngine):
    """A broken device."""

    def step(self) -> list[EngineResult]:
        return [dataclasses.replace(r, logprobs=[NAN] * len(r.token_ids)) for r in super().step()]


class Silent(InstantEngine):
    """Takes everything and answers nothing."""

    @property
    def has_work(self) -> bool:
        return False


class Endless(InstantEngine):
    """Samples for ever; tells which requests were aborted."""

    aborted: ClassVar[list[str]] = []

    def step(self) -> list[EngineResult]:
        time.sleep(0.002)
        return []

    def abort(self, request_id: str) -> bool:
        Endless.aborted.append(request_id)
        return super().abort(request_id)


class Dripping(InstantEngine):
    """One token a step, for whoever wants to see them come."""

    def __init__(self, *, window: int, vocab_size: int, max_batch: int) -> None:
        super().__init__(window=window, vocab_size=vocab_size, max_batch=max_batch)
        self._told: dict[str, int] = {}

    def step(self) -> list[EngineResult]:
        time.sleep(0.005)
        due = []
        for request_id, (request, _) in self._waiting.items():
            told = self._told[request_id] = self._told.get(request_id, 0) + 1
            if told >= request.sampling.max_tokens:
                due.append(request_id)
        others = {name: self._waiting.pop(name) for name in list(self._waiting) if name not in due}
        results = super().step()
        self._waiting |= others
        return results

    def peek(self, request_id: str, start: int) -> tuple[list[int], list[float]]:
        token_ids, logprobs = self._script(self._waiting[request_id][0].sampling.max_tokens)
        told = self._told.get(request_id, 0)
        return token_ids[start:told], logprobs[start:told]


class _Refused:
    """Weights that do not fit."""

    def __init__(self, version: int) -> None:
        self._version = version

    def add(self, tensors: Mapping[str, RawTensor]) -> None:
        raise WeightsInvalid(f"version {self._version} does not fit")

    def check(self) -> None:
        raise AssertionError("what was refused is not checked")

    def swap(self) -> None:
        raise AssertionError("what was refused is not loaded")


class _Logged:
    """Says what is done with it."""

    def __init__(self, inner: WeightLoad, version: int) -> None:
        self._inner, self._version = inner, version

    def add(self, tensors: Mapping[str, RawTensor]) -> None:
        Logged.log.append(("add", self._version))
        self._inner.add(tensors)

    def check(self) -> None:
        Logged.log.append(("check", self._version))
        self._inner.check()

    def swap(self) -> None:
        Logged.log.append(("swap", self._version))
        self._inner.swap()


class Logged(InstantEngine):
    """Tells what becomes of updates."""

    log: ClassVar[list[tuple[str, int]]] = []

    def begin_load(self, version: int) -> WeightLoad:
        return _Logged(super().begin_load(version), version)


class Picky(InstantEngine):
    """Refuses even versions."""

    def begin_load(self, version: int) -> WeightLoad:
        return _Refused(version) if version % 2 == 0 else super().begin_load(version)
