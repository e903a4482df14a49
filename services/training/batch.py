"""From scored trajectories to padded tensors. Called by the trainer, and `check` by whoever takes samples in.

What is trained is decided by the stored mask alone, never by a token's value: the padding id may equal the
end-of-turn id.

Shapes: B trajectories of a micro-batch, T padded tokens. Index t of every `_BT` array is the same token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.errors import FieldProblem, Invalid
from shared.events import Sampling, TrajectoryCompleted, TrajectoryScored, TrajectoryStatus


@dataclass(frozen=True)
class Sample:
    """One trajectory with its advantage, cut behind its last sampled token (what follows trains nothing)."""

    trajectory_id: str
    token_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    advantage: float
    sampling: Sampling

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.mask)


@dataclass(frozen=True)
class Selection:
    """What of a batch goes through the model."""

    samples: list[Sample]
    masked_truncated: int
    """Trajectories left out because they were truncated and the recipe masks those."""
    unrewarded: int
    """Trajectories without a reward."""


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded tensors of one forward pass."""

    input_ids_BT: Tensor
    mask_BT: Tensor
    """Boolean; True on sampled tokens. Column 0 is False: nothing precedes it."""
    behaviour_logprobs_BT: Tensor
    advantages_B: Tensor
    sampling: tuple[Sampling, ...]
    """One per row."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        return MicroBatch(
            input_ids_BT=self.input_ids_BT.to(device),
            mask_BT=self.mask_BT.to(device),
            behaviour_logprobs_BT=self.behaviour_logprobs_BT.to(device),
            advantages_B=self.advantages_B.to(device),
            sampling=self.sampling,
        )


def check(trajectory: TrajectoryCompleted, *, vocab_size: int | None = None) -> None:
    """Refuse a trajectory that cannot be trained.

    Raises Invalid naming the field: arrays of unequal length, a mask of other values than 0 and 1 or on the
    first token, a sampled token's log-probability that is not finite or above 0, a token id outside the
    vocabulary, a temperature of 0.
    """
    n = len(trajectory.token_ids)
    for name in ("mask", "logprobs", "versions"):
        length = len(getattr(trajectory, name))
        if length != n:
            raise _invalid(trajectory, name, f"has {length} entries, token_ids {n}")
    if n == 0:
        return
    ids = np.asarray(trajectory.token_ids, dtype=np.int64)
    if ids.min() < 0 or (vocab_size is not None and ids.max() >= vocab_size):
        raise _invalid(trajectory, "token_ids", f"holds an id outside the vocabulary of {vocab_size}")
    mask = np.asarray(trajectory.mask)
    if not np.isin(mask, (0, 1)).all():
        raise _invalid(trajectory, "mask", "holds values other than 0 and 1")
    if mask[0]:
        raise _invalid(trajectory, "mask", "is set on the first token, which nothing precedes")
    logprobs = np.asarray(trajectory.logprobs, dtype=np.float64)[mask == 1]
    if not np.isfinite(logprobs).all():
        raise _invalid(trajectory, "logprobs", "is not finite on a sampled token")
    if (logprobs > 1e-4).any():
        raise _invalid(trajectory, "logprobs", "is above 0 on a sampled token")
    if mask.any() and trajectory.sampling.temperature == 0:
        raise _invalid(trajectory, "sampling.temperature", "is 0: greedy tokens have no log-probability")


def _invalid(trajectory: TrajectoryCompleted, field: str, problem: str) -> Invalid:
    message = f"{trajectory.trajectory_id}: {field} {problem}"
    return Invalid(message, fields=[FieldProblem(field=field, message=problem)])


def select(
    scored: Iterable[TrajectoryScored],
    advantages: Mapping[str, float],
    *,
    skip_groups: frozenset[str] = frozenset(),
    mask_truncated: bool = False,
) -> Selection:
    """The trajectories that go through the model.

    Left out: those without an advantage or without a sampled token, those of `skip_groups` (all advantages
    0: no gradient), and truncated ones where the recipe masks them. They are in no denominator either.
    """
    samples: list[Sample] = []
    masked = unrewarded = 0
    for item in scored:
        trajectory = item.trajectory
        advantage = advantages.get(trajectory.trajectory_id)
        if advantage is None:
            unrewarded += 1
        elif mask_truncated and trajectory.status is TrajectoryStatus.TRUNCATED:
            masked += 1
        elif trajectory.group_id not in skip_groups and any(trajectory.mask):
            samples.append(_sample(trajectory, advantage))
    return Selection(samples=samples, masked_truncated=masked, unrewarded=unrewarded)


def _sample(trajectory: TrajectoryCompleted, advantage: float) -> Sample:
    end = len(trajectory.mask) - trajectory.mask[::-1].index(1)
    return Sample(
        trajectory_id=trajectory.trajectory_id,
        token_ids=trajectory.token_ids[:end],
        mask=trajectory.mask[:end],
        logprobs=trajectory.logprobs[:end],
        advantage=advantage,
        sampling=trajectory.sampling,
    )


def split(samples: Sequence[Sample], *, max_tokens: int) -> list[list[Sample]]:
    """Micro-batches of at most `max_tokens` padded tokens, sorted by length so that little is padding.

    A trajectory longer than that has a micro-batch of its own.
    """
    batches: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda s: (len(s.token_ids), s.trajectory_id)):
        if batches and len(sample.token_ids) * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return batches


def collate(samples: Sequence[Sample], *, pad_id: int = 0) -> MicroBatch:
    """Right-padded CPU tensors of one micro-batch. What `pad_id` is does not matter to the result."""
    rows, width = len(samples), max(len(sample.token_ids) for sample in samples)
    ids = np.full((rows, width), pad_id, dtype=np.int64)
    mask = np.zeros((rows, width), dtype=np.bool_)
    logprobs = np.zeros((rows, width), dtype=np.float32)
    for row, sample in enumerate(samples):
        n = len(sample.token_ids)
        ids[row, :n] = sample.token_ids
        mask[row, :n] = sample.mask
        logprobs[row, :n] = sample.logprobs
    return MicroBatch(
        input_ids_BT=torch.from_numpy(ids),
        mask_BT=torch.from_numpy(mask),
        behaviour_logprobs_BT=torch.from_numpy(logprobs),
        advantages_B=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
        sampling=tuple(sample.sampling for sample in samples),
    )
