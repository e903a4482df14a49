"""Attention over many sequences of different lengths in one forward pass, for any transformers model.

The tokens of all sequences are packed into one row, so that linear layers compute no padding. Attention
goes by groups of sequences of similar size: `attend` is registered with transformers' AttentionInterface
(https://huggingface.co/docs/transformers/attention_interface), stores the new KV in the sequences' blocks
and attends from the new tokens to all of their sequence. Used by the torch engine alone.

Shapes: N packed tokens, R sequences, S new tokens of a sequence, T tokens of context, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.generation.engines.kv_cache import BLOCK_TOKENS, ZERO_BLOCK, KvStore, blocks_for
from shared.errors import Invalid

Ints = npt.NDArray[np.int64]

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
            folded = plain.expand(rows, repeats, queries, context).reshape(
                rows, 1, repeats * queries, context
            )
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
    """Packed index of each sequence's last token, in the order given to `pack`."""
    groups: list[Group]


def pack(
    rows: Rows[Row],
    counts: Rows[int],
    *,
    store: KvStore,
    window: int,
    dtype: torch.dtype,
    device: torch.device,
) -> PackedBatch:
    """A batch of the next `counts[i]` tokens of each row, whose blocks must reach that far."""
    counts_R = np.array(counts)
    starts_R = np.array([row.computed for row in rows])
    buckets_R = _buckets(counts_R, starts_R + counts_R)
    order = np.argsort(buckets_R, kind="stable")
    counts_R, starts_R, buckets_R = counts_R[order], starts_R[order], buckets_R[order]
    width = blocks_for(int((starts_R + counts_R).max()))
    padding = [ZERO_BLOCK] * width
    ids: list[int] = []
    table: list[int] = []
    for i in order.tolist():
        row = rows[i]
        ids += row.tokens[row.computed : row.computed + counts[i]]
        used = row.blocks[:width]
        table += used
        table += padding[len(used) :]
    table_RB = np.array(table).reshape(len(rows), width)
    firsts_R = counts_R.cumsum() - counts_R
    row_N = np.arange(len(rows)).repeat(counts_R)
    positions_N = np.arange(len(ids)) + (starts_R - firsts_R)[row_N]
    slots_N = table_RB[row_N, positions_N // BLOCK_TOKENS] * BLOCK_TOKENS + positions_N % BLOCK_TOKENS
    last_R = np.empty_like(order)
    last_R[order] = firsts_R + counts_R - 1
    edges = [0, *(np.flatnonzero(np.diff(buckets_R)) + 1).tolist(), len(rows)]
    return PackedBatch(
        store=store,
        window=window,
        input_ids=torch.from_numpy(np.array(ids)).to(device)[None],
        position_ids=torch.from_numpy(positions_N).to(device)[None],
        slots_N=torch.from_numpy(slots_N).to(device),
        last_R=torch.from_numpy(last_R).to(device),
        groups=[
            _group(firsts_R[i:j], counts_R[i:j], starts_R[i:j], table_RB[i:j], dtype=dtype, device=device)
            for i, j in pairwise(edges)
        ],
    )


def _buckets(counts_R: Ints, contexts_R: Ints) -> Ints:
    """Sequences of one bucket attend together: powers of 4 of new tokens, of 2 of context from 64 on.

    That bounds the padding, and also the number of groups, each of which has a cost of its own.
    """
    of_count = np.ceil(np.log2(counts_R) / 2).astype(np.int64)
    of_context = np.ceil(np.log2(np.maximum(contexts_R, 64))).astype(np.int64)
    return of_count * 64 + of_context


def _group(
    firsts_R: Ints,
    counts_R: Ints,
    starts_R: Ints,
    table_RB: Ints,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Group:
    """The group of some rows: index of the first packed token, new tokens, tokens before, blocks of each."""
    rows, queries, tokens = len(counts_R), int(counts_R.max()), int(counts_R.sum())
    steps_S = np.arange(queries)
    # Padding repeats a sequence's last token: always finite, thrown away afterwards.
    steps_RS = np.minimum(steps_S, counts_R[:, None] - 1)
    width = blocks_for(int((starts_R + counts_R).max()))
    positions_RS = torch.from_numpy(starts_R[:, None] + steps_RS).to(device)
    context_T = torch.arange(width * BLOCK_TOKENS, device=device)
    mask = torch.zeros(rows, 1, queries, len(context_T), dtype=dtype, device=device)
    mask.masked_fill_(context_T > positions_RS[:, None, :, None], -torch.inf)
    padded = rows * queries != tokens
    gather = torch.from_numpy((firsts_R[:, None] + steps_RS).ravel()).to(device) if padded else None
    real = np.flatnonzero(steps_S < counts_R[:, None]) if padded else None
    return Group(
        first=int(firsts_R[0]),
        last=int(firsts_R[0]) + tokens,
        rows=rows,
        queries=queries,
        blocks=torch.from_numpy(table_RB[:, :width].ravel()).to(device),
        gather=gather,
        scatter=None if real is None else torch.from_numpy(real).to(device),
        masks={1: mask},
    )


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: PackedBatch | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer. query (1, Hq, N, D), key and value (1, H, N, D) → (1, N, Hq, D).

    Raises Invalid for a kind of attention that this does not compute.
    """
    if packed is None:
        raise Invalid("the torch engine cannot run models that pass nothing on to their attention")
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
        out = out.reshape(rows, heads, repeats, queries, -1).permute(0, 3, 1, 2, 4)
        out = out.reshape(rows * queries, heads * repeats, -1)
        parts.append(out if group.scatter is None else out[group.scatter])
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


AttentionInterface.register(IMPLEMENTATION, attend)
