"""Log-probabilities of stored tokens under the current policy. Called by the trainer.

Only positions whose next token was sampled go through the output head: of a multi-turn transcript that is
a small part, and the head over a vocabulary costs more than a small model's body.

Shapes: B trajectories, T padded tokens, N sampled tokens of the micro-batch, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.training.batch import MicroBatch
from shared.events import Sampling


class TokenScorer:
    """Scores micro-batches with any `transformers` causal LM.

    Right padding needs no attention mask: a causal model never looks ahead. Where body and head do not
    compose to the model's own logits (soft-capped or scaled heads), full logits are computed instead.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._body, self._head = _body_and_head(model)

    @property
    def uses_head_on_sampled_only(self) -> bool:
        """False where every position goes through the head."""
        return self._head is not None

    def __call__(self, batch: MicroBatch, *, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        """`(logprobs_BT, entropy_BT)`, float32, 0 where nothing was sampled.

        Of the distribution that each row's `sampling` describes: temperature first, then top-k, then top-p,
        renormalised over what is left.
        """
        rows, width = batch.input_ids_BT.shape
        targets_N = batch.mask_BT.reshape(-1).nonzero()[:, 0]
        row_N = torch.div(targets_N, width, rounding_mode="floor")
        # Token t is predicted at t − 1, and the last token predicts nothing: inputs are one shorter.
        sources_N = targets_N - row_N - 1
        logits_NV = self._logits(batch.input_ids_BT[:, :-1], sources_N).float()
        tokens_N = batch.input_ids_BT.reshape(-1)[targets_N]
        logits_NV = _as_sampled(logits_NV, tokens_N=tokens_N, row_N=row_N, sampling=batch.sampling)
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        logprobs_N = logprobs_NV.gather(1, tokens_N[:, None])[:, 0]
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            # −inf outside the support: its share of the entropy is 0, not 0 × −inf.
            finite_NV = logprobs_NV if not _restricted(batch.sampling) else logprobs_NV.clamp(min=-1e4)
            entropy_N = -(finite_NV.exp() * finite_NV).sum(dim=-1)
        blank = logprobs_N.new_zeros(rows * width)
        return (
            blank.scatter(0, targets_N, logprobs_N).view(rows, width),
            blank.scatter(0, targets_N, entropy_N).view(rows, width),
        )

    def _logits(self, input_ids_BT: Tensor, sources_N: Tensor) -> Tensor:
        if self._head is None:
            logits_BTV: Tensor = self._model(input_ids=input_ids_BT, use_cache=False).logits
            return logits_BTV.flatten(0, 1).index_select(0, sources_N)
        hidden_BTD: Tensor = self._body(input_ids=input_ids_BT, use_cache=False).last_hidden_state
        logits_NV: Tensor = self._head(hidden_BTD.flatten(0, 1).index_select(0, sources_N))
        return logits_NV


def _body_and_head(model: PreTrainedModel) -> tuple[nn.Module, nn.Module | None]:
    """Body and head where they compose to the model's logits on a probe, else the model and None."""
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    body = model.base_model
    if head is None or body is model:
        return model, None
    probe_BT = torch.arange(4, device=model.device).remainder(model.config.vocab_size)[None]
    with torch.no_grad():
        hidden = getattr(body(input_ids=probe_BT, use_cache=False), "last_hidden_state", None)
        if hidden is None:
            return model, None
        full = model(input_ids=probe_BT, use_cache=False).logits
        parts = head(hidden)
    same = full.shape == parts.shape and torch.allclose(full.float(), parts.float(), rtol=1e-4, atol=1e-5)
    return (body, head) if same else (model, None)


def _restricted(sampling: Sequence[Sampling]) -> bool:
    return any(s.top_k > 0 or s.top_p < 1.0 for s in sampling)


def _as_sampled(
    logits_NV: Tensor, *, tokens_N: Tensor, row_N: Tensor, sampling: Sequence[Sampling]
) -> Tensor:
    """Logits of the distribution tokens were drawn from.

    The behaviour policy's support is not stored: it is taken from the current logits, and always holds the
    sampled token, so that a token that has since left the top keeps a finite ratio and a gradient.
    """
    device = logits_NV.device
    if any(s.temperature != 1.0 for s in sampling):
        temperature_B = torch.tensor([s.temperature for s in sampling], device=device)
        # The peak goes first: a tiny temperature must not overflow.
        peak_N1 = logits_NV.detach().amax(dim=-1, keepdim=True)
        logits_NV = (logits_NV - peak_N1) / temperature_B[row_N, None]
    if not _restricted(sampling):
        return logits_NV
    vocab = logits_NV.shape[1]
    top_k_B = torch.tensor([s.top_k or vocab for s in sampling], device=device)
    top_p_B = torch.tensor([s.top_p for s in sampling], device=device)
    with torch.no_grad():
        sorted_NV, order_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
        beyond_NV = torch.arange(vocab, device=device)[None] >= top_k_B[row_N, None]
        probs_NV = sorted_NV.masked_fill(beyond_NV, -torch.inf).softmax(dim=-1)
        # A token stays while the mass before it is below top_p: the first always does.
        before_NV = probs_NV.cumsum(dim=-1) - probs_NV
        beyond_NV |= (before_NV >= top_p_B[row_N, None]) & (top_p_B[row_N, None] < 1.0)
        dropped_NV = torch.zeros_like(beyond_NV).scatter(1, order_NV, beyond_NV)
        dropped_NV.scatter_(1, tokens_N[:, None], False)
    return logits_NV.masked_fill(dropped_NV, -torch.inf)
