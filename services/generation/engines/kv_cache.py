"""Where KV lives: blocks of tokens in pre-allocated tensors, and who holds which block.

`BlockPool` counts blocks, `SessionCache` keeps the blocks of finished turns for the next turn of their
session, `KvStore` holds the tensors. Used by the torch engine alone.

Shapes: N tokens, H KV heads, D head size, P blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

BLOCK_TOKENS = 16
"""Tokens of one block."""
ZERO_BLOCK = 0
"""Never written: pads block tables. Masked positions still enter a product, so they must be finite."""


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(slots=True)
class CachedPrefix:
    """The KV of a finished turn."""

    tokens: list[int]
    """The tokens whose KV is in `blocks`, from position 0."""
    blocks: list[int]


class BlockPool:
    """Free blocks and, behind them, blocks of sessions that may be evicted (least recently used first)."""

    def __init__(self, blocks: int) -> None:
        self.capacity = blocks
        """Blocks that requests can hold."""
        self.cached = 0
        """Blocks that sessions hold between turns."""
        self._sessions: OrderedDict[str, CachedPrefix] = OrderedDict()
        self._free = list(range(blocks, ZERO_BLOCK, -1))

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """So many blocks, evicting sessions where needed; None, and nothing taken, for want of them."""
        if len(self._free) + self.cached < count:
            return None
        while len(self._free) < count:
            self.drop(next(iter(self._sessions)))
        cut = len(self._free) - count
        taken = self._free[cut:]
        del self._free[cut:]
        return taken

    def release(self, blocks: list[int]) -> None:
        """Give blocks back."""
        self._free += blocks

    def keep(self, session: str, tokens: list[int], blocks: list[int]) -> None:
        """Keep a finished turn's KV for its session; the blocks beyond `tokens` are freed."""
        self.drop(session)
        used = blocks_for(len(tokens))
        self.release(blocks[used:])
        if used:
            self._sessions[session] = CachedPrefix(tokens, blocks[:used])
            self.cached += used

    def take(self, session: str, prompt: list[int]) -> tuple[int, list[int]]:
        """Hand over what is kept of a session: tokens that can be reused for `prompt`, and their blocks.

        At least one token of the prompt is left to compute, for its logits. The rest of what was kept is
        freed.
        """
        entry = self._sessions.pop(session, None)
        if entry is None:
            return 0, []
        self.cached -= len(entry.blocks)
        reusable = min(common_prefix(entry.tokens, prompt), len(prompt) - 1)
        used = blocks_for(reusable)
        self.release(entry.blocks[used:])
        return reusable, entry.blocks[:used]

    def common(self, session: str, prompt: list[int]) -> int:
        """Tokens of `prompt` whose KV is kept for the session."""
        entry = self._sessions.get(session)
        return common_prefix(entry.tokens, prompt) if entry is not None else 0

    def drop(self, session: str) -> None:
        """Free what is kept for a session, if anything."""
        entry = self._sessions.pop(session, None)
        if entry is not None:
            self.cached -= len(entry.blocks)
            self.release(entry.blocks)

    def drop_all(self) -> None:
        """Free what is kept for all sessions."""
        for session in list(self._sessions):
            self.drop(session)


def common_prefix(left: list[int], right: list[int]) -> int:
    """Tokens that two lists share from their start."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(i for i in range(shorter) if left[i] != right[i])


class KvStore:
    """Keys and values of every layer. A layer's tensors are made when it first writes: only then is it
    known how many heads it has, and of what size."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks + 1
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Layer → keys and values, each of shape (P, BLOCK_TOKENS · H · D)."""

    def write(
        self, layer: int, key_NHD: torch.Tensor, value_NHD: torch.Tensor, *, slots_N: torch.Tensor
    ) -> None:
        """Store the KV of N tokens. A slot is block · BLOCK_TOKENS + offset."""
        if layer not in self.layers:
            self.layers[layer] = (self._allocate(key_NHD), self._allocate(value_NHD))
        for pool, new in zip(self.layers[layer], (key_NHD, value_NHD), strict=True):
            pool.view(-1, *new.shape[1:]).index_copy_(0, slots_N, new)

    def read(
        self, layer: int, blocks: torch.Tensor, *, rows: int, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """KV of `rows` sequences from their flat block table: two tensors (rows, H, tokens, D)."""
        keys, values = self.layers[layer]
        tokens = blocks.numel() // rows * BLOCK_TOKENS
        key = keys.index_select(0, blocks).view(rows, tokens, heads, -1).transpose(1, 2)
        value = values.index_select(0, blocks).view(rows, tokens, heads, -1).transpose(1, 2)
        return key, value

    def export(self, blocks: list[int], *, start: int, stop: int) -> Iterator[torch.Tensor]:
        """KV of the tokens from `start` to `stop` of one sequence: layer by layer keys, then values, each a
        copy of shape (stop - start, H · D)."""
        first = start // BLOCK_TOKENS
        index = torch.tensor(blocks[first : blocks_for(stop)], dtype=torch.long)
        offset = first * BLOCK_TOKENS
        for layer in sorted(self.layers):
            for pool in self.layers[layer]:
                rows = pool.index_select(0, index.to(pool.device)).view(-1, pool.shape[1] // BLOCK_TOKENS)
                yield rows[start - offset : stop - offset].contiguous().cpu()

    def adopt(self, blocks: list[int], rows: Iterable[torch.Tensor], *, start: int) -> None:
        """Write what `export` gave into the blocks of a sequence, from token `start` on."""
        slots_N = None
        pools = (pool for layer in sorted(self.layers) for pool in self.layers[layer])
        for pool, new in zip(pools, rows, strict=True):
            if slots_N is None:
                at_N = torch.arange(start, start + len(new))
                slots_N = torch.tensor(blocks)[at_N // BLOCK_TOKENS] * BLOCK_TOKENS + at_N % BLOCK_TOKENS
            width = pool.shape[1] // BLOCK_TOKENS
            pool.view(-1, width).index_copy_(0, slots_N.to(pool.device), new.to(pool.device))

    def clear(self, blocks: list[int]) -> None:
        """Zero blocks that may hold NaN before anyone else gets them."""
        index = torch.tensor(blocks, dtype=torch.long)
        for pair in self.layers.values():
            for pool in pair:
                pool.index_fill_(0, index.to(pool.device), 0)

    def _allocate(self, like_NHD: torch.Tensor) -> torch.Tensor:
        width = BLOCK_TOKENS * like_NHD.shape[1] * like_NHD.shape[2]
        return torch.zeros(self._blocks, width, dtype=like_NHD.dtype, device=like_NHD.device)
