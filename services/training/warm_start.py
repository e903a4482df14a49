"""The supervised phase before RL: scripted transcripts become token rows, and the model imitates them.

Called by the training service. A row holds exactly the ids that a rollout with the same texts would hold, so
what is learned here is what sampling meets later.

Shapes: B rows of a micro-batch, T padded tokens, N tokens in the loss, V vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.events import TrajectoryCompleted
from shared.recipe import WarmStart
from shared.tokens import ChatTokenizer

MICRO_BATCH_TOKENS = {"cpu": 1024}
MICRO_BATCH_TOKENS_ELSEWHERE = 16_384
"""Padded tokens of one forward pass, by device: caches are small on a CPU, launches dear on a GPU. The
result does not depend on it."""
_WARMUP_SHARE = 0.05
_FINAL_SHARE = 0.1
"""Of the learning rate, at the end of the cosine."""


@dataclass(frozen=True)
class Row:
    """One transcript. Arrays of shape (T,), aligned."""

    token_ids: list[int]
    mask: list[int]
    """1 on tokens of actions, their end token included."""


@dataclass(frozen=True)
class WarmStartProgress:
    """What one step did."""

    step: int
    """Steps done, from 1."""
    loss: float
    """Mean cross-entropy over the step's tokens, nats, before its update."""
    tokens: int
    """Tokens in the loss."""


def make_rows(
    trajectories: Iterable[TrajectoryCompleted], tokenizer: ChatTokenizer, *, context_window: int
) -> list[Row]:
    """Rows of the trajectories' messages; those without an answer are left out.

    `messages` alternate user and assistant; a last user message, which nobody answered, is not part of the
    row. A row longer than `context_window` ends with the last answer that fits.
    """
    rows = []
    for trajectory in trajectories:
        row = _row([m.content for m in trajectory.messages], tokenizer, context_window=context_window)
        if row.token_ids:
            rows.append(row)
    return rows


def run(
    model: PreTrainedModel, rows: Sequence[Row], *, settings: WarmStart, seed: int
) -> Iterator[WarmStartProgress]:
    """Train the model in place, yielding after each step. AdamW, gradient norm clipped at 1, a short linear
    warm-up, then a cosine to a tenth of the learning rate.

    Every row is used once before any is used again. The same arguments give the same weights on one machine.
    Nothing happens where there are no rows.
    """
    if not rows:
        return
    max_tokens = MICRO_BATCH_TOKENS.get(model.device.type, MICRO_BATCH_TOKENS_ELSEWHERE)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    order = _endless(len(rows), rng=random.Random(seed))
    model.train()
    for step in range(settings.steps):
        batch = [rows[next(order)] for _ in range(settings.batch_size)]
        total = sum(_trained_tokens(row, settings) for row in batch)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(step, settings.steps)
        optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for micro in _micro_batches(batch, max_tokens=max_tokens):
            part = _loss_sum(model, micro, settings=settings) / total
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield WarmStartProgress(step=step + 1, loss=loss, tokens=total)


def _row(texts: Sequence[str], tokenizer: ChatTokenizer, *, context_window: int) -> Row:
    token_ids: list[int] = []
    mask: list[int] = []
    for turn in range(len(texts) // 2):
        observation, action = texts[2 * turn], texts[2 * turn + 1]
        if turn == 0:
            prompt = tokenizer.opening_ids(observation)
        else:
            prompt = tokenizer.turn_ids(observation, ended=bool(tokenizer.end_ids))
        answer = tokenizer.answer_ids(action)
        if len(token_ids) + len(prompt) + len(answer) > context_window:
            break
        token_ids += prompt + answer
        mask += [0] * len(prompt) + [1] * len(answer)
    return Row(token_ids, mask)


def _endless(count: int, *, rng: random.Random) -> Iterator[int]:
    while True:
        yield from rng.sample(range(count), count)


def _schedule(step: int, steps: int) -> float:
    """Share of the learning rate at a step, above 0."""
    warmup = max(1, round(steps * _WARMUP_SHARE))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return _FINAL_SHARE + (1 - _FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))


def _trained_tokens(row: Row, settings: WarmStart) -> int:
    """Tokens of a row in the loss; the first token is predicted by nothing."""
    return len(row.token_ids) - 1 if settings.loss_on == "all" else sum(row.mask)


def _micro_batches(batch: Sequence[Row], *, max_tokens: int) -> Iterator[list[Row]]:
    """The rows by length, so that little is padded."""
    micro: list[Row] = []
    for row in sorted(batch, key=lambda row: len(row.token_ids)):
        if micro and len(row.token_ids) * (len(micro) + 1) > max_tokens:
            yield micro
            micro = []
        micro.append(row)
    if micro:
        yield micro


def _loss_sum(model: PreTrainedModel, rows: Sequence[Row], *, settings: WarmStart) -> Tensor:
    """Summed cross-entropy. What counts is decided by lengths and masks, never by a token's value."""
    width = max(len(row.token_ids) for row in rows)
    ids_BT = torch.zeros(len(rows), width, dtype=torch.long)
    counts_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        length = len(row.token_ids)
        ids_BT[index, :length] = torch.tensor(row.token_ids)
        counts_BT[index, :length] = True if settings.loss_on == "all" else torch.tensor(row.mask).bool()
    ids_BT, counts_BT = ids_BT.to(model.device), counts_BT[:, 1:].to(model.device)
    logits_BTV: Tensor = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
    targets_N = ids_BT[:, 1:][counts_BT]
    return torch.nn.functional.cross_entropy(logits_BTV[counts_BT].float(), targets_N, reduction="sum")
