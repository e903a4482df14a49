"""Draws the next token of many rows at once. Called by the torch engine after each forward pass.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch

from shared.events import Sampling

_BELOW_ONE = 1.0 - 1e-12
"""Largest uniform used: u · total must stay below total after rounding."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One token per row."""

    token_ids: list[int]
    logprobs: list[float]
    """Under the distribution drawn from; of greedy rows under softmax at temperature 1."""
    finite: list[bool]
    """False: the row's logits hold NaN or +inf (-inf only excludes a token); its token means nothing."""


def draw(logits_RV: torch.Tensor, sampling: Sequence[Sampling], *, uniforms: Sequence[float]) -> Draw:
    """Sample each row by its own parameters and its own uniform number in [0, 1).

    Inverse transform sampling, so that a row's token depends on its own logits and number only, never
    on the rest of the batch. Temperature first, then top-k, then top-p over what top-k left, as vLLM
    and transformers do; `temperature` 0 takes the most likely token and ignores both.
    """
    logits_RV = logits_RV.float()
    vocab = logits_RV.shape[-1]
    device = logits_RV.device
    temperatures = [row.temperature for row in sampling]
    if any(t not in (0.0, 1.0) for t in temperatures):
        # The peak goes first: a tiny temperature must not overflow.
        scale_R = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float64, device=device)
        shifted_RV = logits_RV - logits_RV.amax(-1, keepdim=True)
        logits_RV = (shifted_RV / scale_R[:, None]).float()
    truncated = [
        i for i, row in enumerate(sampling) if row.temperature and (row.top_p < 1.0 or 0 < row.top_k < vocab)
    ]
    if truncated:
        rows = torch.tensor(truncated, device=device)
        kept = _truncate(logits_RV[rows], [sampling[i] for i in truncated])
        logits_RV = logits_RV.index_copy(0, rows, kept)
    logprobs_RV = logits_RV.log_softmax(-1)
    cumulative_RV = logprobs_RV.exp().cumsum(-1, dtype=torch.float64)
    uniform_R = torch.tensor(uniforms, dtype=torch.float64, device=device).clamp_(max=_BELOW_ONE)
    # right=True: the first entry above the target, hence never a token of probability 0.
    target_R1 = (uniform_R * cumulative_RV[:, -1])[:, None]
    tokens_R1 = torch.searchsorted(cumulative_RV, target_R1, right=True)
    if 0.0 in temperatures:
        greedy_R = torch.tensor([t == 0.0 for t in temperatures], device=device)
        tokens_R1 = torch.where(greedy_R[:, None], logprobs_RV.argmax(-1, keepdim=True), tokens_R1)
    # One NaN or +inf in a row makes the normaliser, and so every log-probability of the row, not finite.
    logprobs = logprobs_RV.gather(-1, tokens_R1.clamp_(max=vocab - 1))[:, 0].tolist()
    return Draw(
        token_ids=tokens_R1[:, 0].tolist(),
        logprobs=logprobs,
        finite=[isfinite(logprob) for logprob in logprobs],
    )


def _truncate(logits_RV: torch.Tensor, sampling: Sequence[Sampling]) -> torch.Tensor:
    """Logits with everything outside top-k and top-p at -inf. The most likely token always stays."""
    vocab = logits_RV.shape[-1]
    device = logits_RV.device
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    top_k_R = torch.tensor([row.top_k or vocab for row in sampling], device=device)
    top_p_R = torch.tensor([row.top_p for row in sampling], dtype=torch.float64, device=device)
    drop_RV = torch.arange(vocab, device=device)[None, :] >= top_k_R[:, None]
    probs_RV = sorted_RV.masked_fill(drop_RV, -torch.inf).softmax(-1).double()
    # A token goes when those before it already reach top_p. At top_p = 1 rounding must drop nothing.
    before_RV = probs_RV.cumsum(-1) - probs_RV
    drop_RV |= (before_RV >= top_p_R[:, None]) & (top_p_R < 1.0)[:, None]
    drop_RV[:, 0] = False
    return logits_RV.masked_fill(torch.zeros_like(drop_RV).scatter_(-1, order_RV, drop_RV), -torch.inf)
