"""Attention over many sequences of different lengths in one forward pass, for any transformers model.

The tokens of all sequences are packed into one row, so that linear layers compute no padding. Attention
goes by groups of sequences of similar size: `attend` is registered with transformers' AttentionInterface
(https://huggingface.co/docs/transformers/attention_interface), stores the new KV in the sequences' blocks
and attends from the new tokens to all of their sequence. Used by the torch engine alone.

Shapes: N packed tokens, R sequences, S new tokens of a sequence, T tokens of context, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.generation.engines.kv_cache import BLOCK_TOKENS, ZERO_BLOCK, KvStore, blocks_for
from shared.errors import Invalid

IMPLEMENTATION = "rollart_paged"
_REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")


class Row(Protocol):
    """What attention needs to know of a sequence."""

    tokens: list[int]
    computed: int
    """Tokens whose KV is stored."""
    blocks: list[int]


@dataclass(slots=True)
class Group:
    """Sequences of similar size that attend together."""

    first: int
    """Index of the group's first packed token."""
    last: int
    rows: int
    queries: int
    """S of the longest."""
    blocks: torch.Tensor
    """Flat block table, shape (rows · blocks,)."""
    gather: torch.Tensor | None
    """Packed token of each padded query, shape (rows · S,); None where nothing is padded."""
    scatter: torch.Tensor | None
    """Padded queries that are real, shape (tokens,)."""
    masks: dict[int, torch.Tensor]
    """Additive mask for so many query heads per KV head, shape (rows, 1, repeats · S, T)."""

    def mask(self, repeats: int) -> torch.Tensor:
        """The mask for queries folded by `repeats`."""
        if self.queries == 1:
            return self.masks[1]  # broadcasts
        if repeats not in self.masks:
            plain = self.masks[1]
            rows, _, queries, context = plain.shape
            folded = plain.expand(rows, repeats, queries, context).reshape(rows, 1, repeats * queries, context)
            self.masks[repeats] = folded
        return self.masks[repeats]


@dataclass(slots=True)
class PackedBatch:
    """One forward pass."""

    store: KvStore
    window: int
    input_ids: torch.Tensor
    """Shape (1, N)."""
    position_ids: torch.Tensor
    """Shape (1, N)."""
    slots_N: torch.Tensor
    """Where the KV of each token goes."""
    last_R: torch.Tensor
    """Packed index of each sequence's last token, in `rows` order."""
    groups: list[Group] = field(default_factory=list)


def pack(
    rows: Rows[Row], counts: Rows[int], *, store: KvStore, window: int, dtype: torch.dtype, device: torch.device
) -> PackedBatch:
    """A batch of the next `counts[i]` tokens of each row, whose blocks must reach that far."""
    order = sorted(range(len(rows)), key=lambda i: _bucket(counts[i], rows[i].computed + counts[i]))
    ids: list[int] = []
    positions: list[int] = []
    table: list[int] = []
    ends: list[int] = [0] * len(rows)
    starts: list[int] = []
    width = max(blocks_for(row.computed + count) for row, count in zip(rows, counts, strict=True))
    padding = [ZERO_BLOCK] * width
    for i in order:
        row, start, stop = rows[i], rows[i].computed, rows[i].computed + counts[i]
        starts.append(len(ids))
        ids += row.tokens[start:stop]
        positions += range(start, stop)
        ends[i] = len(ids) - 1
        used = row.blocks[:width]
        table += used
        table += padding[len(used) :]
    counts_R = torch.tensor([counts[i] for i in order])
    table_RB = torch.tensor(table).view(len(rows), width)
    positions_N = torch.tensor(positions)
    row_N = torch.arange(len(rows)).repeat_interleave(counts_R)
    slots_N = table_RB[row_N, positions_N // BLOCK_TOKENS] * BLOCK_TOKENS + positions_N % BLOCK_TOKENS
    batch = PackedBatch(
        store=store,
        window=window,
        input_ids=torch.tensor(ids, device=device)[None],
        position_ids=positions_N.to(device)[None],
        slots_N=slots_N.to(device),
        last_R=torch.tensor(ends, device=device),
    )
    at = 0
    while at < len(order):
        key = _bucket(counts[order[at]], positions[ends[order[at]]] + 1)
        stop = at + 1
        while stop < len(order) and _bucket(counts[order[stop]], positions[ends[order[stop]]] + 1) == key:
            stop += 1
        batch.groups.append(
            _group(
                starts[at], counts_R[at:stop], table_RB[at:stop], positions_N=positions_N, dtype=dtype, device=device
            )
        )
        at = stop
    return batch


def _bucket(count: int, context: int) -> tuple[int, int]:
    """Sequences of one bucket attend together: padding is bounded, and so is the number of groups."""
    return (count - 1).bit_length() + 1 >> 1 if count > 1 else 0, max(6, (context - 1).bit_length())


def _group(
    first: int,
    counts_R: torch.Tensor,
    table_RB: torch.Tensor,
    *,
    positions_N: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> Group:
    rows, queries, tokens = len(counts_R), int(counts_R.max()), int(counts_R.sum())
    starts_R = first + counts_R.cumsum(0) - counts_R
    step_S = torch.arange(queries)
    # Padding repeats a sequence's last token: always finite, thrown away afterwards.
    index_RS = starts_R[:, None] + torch.minimum(step_S[None], counts_R[:, None] - 1)
    positions_RS = positions_N[index_RS]
    width = blocks_for(int(positions_RS.max()) + 1)
    mask = torch.zeros(rows, 1, queries, width * BLOCK_TOKENS, dtype=dtype)
    mask.masked_fill_(torch.arange(width * BLOCK_TOKENS) > positions_RS[:, None, :, None], -torch.inf)
    padded = rows * queries != tokens
    real = (step_S[None] < counts_R[:, None]).flatten().nonzero()[:, 0] if padded else None
    return Group(
        first=first,
        last=first + tokens,
        rows=rows,
        queries=queries,
        blocks=table_RB[:, :width].flatten().to(device),
        gather=index_RS.flatten().to(device) if padded else None,
        scatter=real.to(device) if real is not None else None,
        masks={1: mask.to(device)},
    )


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: PackedBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer. query (1, Hq, N, D), key and value (1, H, N, D) → (1, N, Hq, D).

    Raises Invalid for a kind of attention that this does not compute.
    """
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    if sliding_window is not None and sliding_window < packed.window:
        refused.append("sliding_window")
    if refused:
        raise Invalid(f"the torch engine runs full attention only; this model uses {', '.join(refused)}")
    layer = module.layer_idx
    assert isinstance(layer, int)
    heads = key.shape[1]
    repeats = query.shape[1] // heads
    packed.store.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), slots_N=packed.slots_N)
    query_NHD = query[0].transpose(0, 1)
    parts = []
    for group in packed.groups:
        keys, values = packed.store.read(layer, group.blocks, rows=group.rows, heads=heads)
        part = query_NHD[group.first : group.last] if group.gather is None else query_NHD[group.gather]
        rows, queries, size = group.rows, group.queries, query.shape[-1]
        # The query heads of one KV head are folded into its queries: keys and values need no copies.
        folded = part.reshape(rows, queries, heads, repeats, size).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(rows, heads, repeats * queries, size)
        out = scaled_dot_product_attention(folded, keys, values, attn_mask=group.mask(repeats), scale=scaling)
        out = out.view(rows, heads, repeats, queries, -1).permute(0, 3, 1, 2, 4)
        out = out.reshape(rows * queries, heads * repeats, -1)
        parts.append(out if group.scatter is None else out[group.scatter])
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


AttentionInterface.register(IMPLEMENTATION, attend)
