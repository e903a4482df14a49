"""What the synthetic engine keeps: its configuration, live requests, and the KV that sessions left behind.
Used by `benchmarks/synthetic_engine.py`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.generation.protocol import EngineRequest
from shared.errors import Invalid
from shared.weights import RawTensor


class Synthetic(BaseModel):
    """The object `synthetic` of `config.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    time_divisor: float = Field(1.0, gt=0)
    """Seconds of the GPU in one second here."""
    tokens_per_id: int = Field(1, ge=1)
    """Tokens that one id stands for."""


class SyntheticModel(BaseModel):
    """What of `config.json` is read."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    max_position_embeddings: int = Field(1 << 20, ge=1)
    vocab_size: int = Field(1 << 31, ge=2)
    synthetic: Synthetic = Synthetic()


class TransferParams(BaseModel):
    """`kv_transfer_params`. The KV itself is nowhere; what is checked is whether it still could be."""

    remote_engine_id: str
    remote_request_id: str
    remote_num_tokens: int
    expires_at: float
    """Unix time."""


@dataclass(slots=True)
class Sequence:
    """A live request. Counts are of ids."""

    request: EngineRequest
    added_at: float
    room: int
    """New ids at most."""
    sampled: list[int] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    decoded: int = 0
    """Ids whose tokens have all been decoded; of a split turn the first one comes undecoded."""
    computed: int = 0
    """Ids of prompt and `sampled` whose KV is here."""
    cached: int = 0
    transferred: int = 0
    transfer_s: float = 0.0
    recomputed: str = ""
    ready_at: float = 0.0
    """When its KV has come over the link."""
    placed_at: float = 0.0
    first_at: float = 0.0

    @property
    def length(self) -> int:
        """Of prompt and sampled ids."""
        return len(self.request.prompt_ids) + len(self.sampled)

    @property
    def most(self) -> int:
        """Length that it may reach."""
        return len(self.request.prompt_ids) + self.room


def read_model(model_dir: Path) -> SyntheticModel:
    """Of a folder that may have a `config.json`. Raises Invalid for one that is wrong."""
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_bytes()) if path.is_file() else {}
        return SyntheticModel.model_validate(raw)
    except (ValueError, ValidationError) as error:
        raise Invalid(f"{path} is no model configuration: {error}") from error


class KeptKv:
    """KV that is kept for a session's next turn, as the ids it is of. Least recently used first."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, list[int]] = OrderedDict()
        self.total = 0

    def common(self, session: str, prompt: SequenceOf[int]) -> int:
        """Ids of a prompt whose KV is here."""
        kept = self._ids.get(session, [])
        count = min(len(kept), len(prompt))
        return count if kept[:count] == prompt[:count] else 0

    def keep(self, session: str, ids: list[int]) -> None:
        """In place of what was kept of the session."""
        self.forget(session)
        self._ids[session] = ids
        self.total += len(ids)

    def forget(self, session: str) -> None:
        """What is kept of a session, if anything."""
        self.total -= len(self._ids.pop(session, ()))

    def shrink(self, most: int) -> None:
        """Give up sessions until so many ids are kept at most."""
        while self._ids and self.total > most:
            self.forget(next(iter(self._ids)))

    def clear(self) -> None:
        """Give up all."""
        self._ids.clear()
        self.total = 0


class VersionOnly:
    """An update that takes any weights. See `services.generation.protocol.WeightLoad`."""

    def __init__(self, version: int, swap_to: Callable[[int], None]) -> None:
        self._version = version
        self._swap_to = swap_to

    def add(self, tensors: Mapping[str, RawTensor]) -> None:
        """They are of no use here."""

    def check(self) -> None:
        """Nothing can be missing."""

    def swap(self) -> None:
        """Take the version."""
        self._swap_to(self._version)
