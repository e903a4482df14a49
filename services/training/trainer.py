"""The optimiser of a run: takes a batch of scored groups, changes the model, says what happened.

Called by the training service's step loop, in a worker thread, one call at a time. Holds model, AdamW and
the schedule; knows no broker, store or version.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.training import batch
from services.training.algorithms.advantages import rewards_by_group
from services.training.algorithms.losses import Diagnostics, token_weights
from services.training.algorithms.protocol import Algorithm
from services.training.batch import MicroBatch, Sample
from services.training.logprobs import TokenScorer
from shared import registry
from shared.errors import Internal, Invalid
from shared.events import TrajectoryScored
from shared.recipe import Recipe, Training
from shared.weights import RawTensor

_log = structlog.get_logger()

_SAFETENSORS_NAME = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class StepStats:
    """What one step did. Loss, entropy, gradient norm and the measures of mismatch are those of the first
    pass over the batch, before the model changed; clip fractions and `ratio_max` are over all passes."""

    loss: float = 0.0
    entropy: float = 0.0
    """Nats, mean over trained tokens."""
    grad_norm: float = 0.0
    """Before clipping."""
    mismatch_kl: float = 0.0
    """Mean of u − 1 − log u ≥ 0, u = π_θ/μ: how far the trainer is from the policy that sampled."""
    chi2: float = 0.0
    """Mean of u², minus 1."""
    ess: float = 1.0
    """(Σu)²/(n·Σu²): the share of tokens that off-policy sampling leaves effective."""
    clip_fraction_positive: float = 0.0
    """Of tokens with A > 0, those above the clip."""
    clip_fraction_negative: float = 0.0
    """Of tokens with A < 0, those below the clip."""
    ratio_max: float = 1.0
    tokens_trained: int = 0
    """Sampled tokens in the loss, counted once however many passes."""
    sequences: int = 0
    """Trajectories in the loss."""
    zero_variance_groups: int = 0
    singleton_groups: int = 0
    masked_truncated: int = 0
    """Trajectories out of the loss because they were truncated."""
    unrewarded: int = 0
    """Trajectories without a reward: out of statistics and loss."""
    rejected: int = 0
    """Trajectories that `batch.check` refused: out of statistics and loss."""
    skipped: int = 0
    """Optimiser steps not taken because loss, gradient or a log-probability was not finite."""
    optimiser_steps: int = 0
    """Optimiser steps taken; 0 where nothing in the batch had a gradient."""
    learning_rate: float = 0.0
    forward_backward_s: float = 0.0
    optimiser_s: float = 0.0


class Trainer:
    """Model and optimiser of one run."""

    def __init__(
        self, model: PreTrainedModel, *, recipe: Recipe, device: str | torch.device = "cpu", threads: int = 0
    ) -> None:
        """Moves the model to `device`. `threads` sets torch's intra-op threads of the process; 0 leaves them.

        Raises UnknownPlugin where the recipe's algorithm does not exist.
        """
        if threads:
            torch.set_num_threads(threads)
        self.device = torch.device(device)
        self.model = model.to(self.device)  # type: ignore[arg-type]
        # Dropout would make a token's ratio differ from 1 under equal weights.
        self.model.eval()
        self._recipe = recipe
        self._training = recipe.training
        cls = registry.load("algorithm", self._training.algorithm, field="training.algorithm")
        self._algorithm = cast(Algorithm, cls(self._training))
        self._score = TokenScorer(self.model)
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._optimiser: torch.optim.Optimizer = _adamw(self._parameters, self._training)
        self.steps_done = 0

    def step(self, groups: Mapping[str, Sequence[TrajectoryScored]]) -> StepStats:
        """Train on one batch: group id → its trajectories. One call is one step of the schedule.

        Groups whose rewards are all equal are counted and not forwarded; a trajectory that cannot be trained
        is counted and left out. Where a pass is not finite the model is left as before that pass, later
        passes are not made and `skipped` is 1. Raises Internal where a trajectory occurs twice.
        """
        members, rejected = self._accepted(groups)
        advantages = self._algorithm.advantages(rewards_by_group(members))
        selection = batch.select(
            members,
            advantages.by_trajectory,
            skip_groups=advantages.zero_variance | advantages.singletons,
            mask_truncated=self._training.mask_truncated,
        )
        rate = learning_rate(self.steps_done, self._training)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        stats = self._optimise(selection.samples)
        self.steps_done += 1
        return replace(
            stats,
            zero_variance_groups=len(advantages.zero_variance),
            singleton_groups=len(advantages.singletons),
            masked_truncated=selection.masked_truncated,
            unrewarded=selection.unrewarded,
            rejected=rejected,
            learning_rate=rate,
        )

    def _accepted(
        self, groups: Mapping[str, Sequence[TrajectoryScored]]
    ) -> tuple[list[TrajectoryScored], int]:
        accepted: list[TrajectoryScored] = []
        seen: set[str] = set()
        rejected = 0
        for scored in (scored for members in groups.values() for scored in members):
            name = scored.trajectory.trajectory_id
            if name in seen:
                raise Internal(f"{name} is twice in one batch")
            seen.add(name)
            try:
                batch.check(scored.trajectory, vocab_size=self.model.config.vocab_size)
            except Invalid as error:
                rejected += 1
                _log.warning("trajectory_rejected", trajectory_id=name, problem=error.message)
            else:
                accepted.append(scored)
        return accepted, rejected

    def _optimise(self, samples: list[Sample]) -> StepStats:
        """All passes over the batch, one optimiser step each."""
        if not samples:
            return StepStats()
        chunks = batch.split(samples, max_tokens=self._training.micro_batch_tokens)
        micro_batches = [batch.collate(chunk).to(self.device) for chunk in chunks]
        tokens = sum(sample.sampled for sample in samples)
        stats: StepStats | None = None
        passes: list[Diagnostics] = []
        taken = skipped = 0
        forward_backward_s = optimiser_s = 0.0
        for _ in range(self._training.epochs):
            begin = time.perf_counter()
            loss, diagnostics = self._accumulate(micro_batches, tokens=tokens, sequences=len(samples))
            norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._training.grad_clip)
            measured = torch.stack([loss.double(), norm.double(), diagnostics.nonfinite.double()])
            loss_value, norm_value, bad = measured.tolist()
            middle = time.perf_counter()
            finite = bool(torch.isfinite(measured).all()) and bad == 0
            if finite:
                self._optimiser.step()
                taken += 1
            self._optimiser.zero_grad(set_to_none=True)
            forward_backward_s += middle - begin
            optimiser_s += time.perf_counter() - middle
            stats = stats or _first_pass(loss_value, norm_value, diagnostics)
            if not finite:
                skipped = 1
                _log.error("step_skipped", loss=loss_value, grad_norm=norm_value, nonfinite_tokens=int(bad))
                break
            passes.append(diagnostics)
        return replace(
            _with_clipping(stats or StepStats(), passes),
            tokens_trained=tokens if taken else 0,
            sequences=len(samples) if taken else 0,
            optimiser_steps=taken,
            skipped=skipped,
            forward_backward_s=forward_backward_s,
            optimiser_s=optimiser_s,
        )

    def _accumulate(
        self, micro_batches: Iterable[MicroBatch], *, tokens: int, sequences: int
    ) -> tuple[Tensor, Diagnostics]:
        """Gradients of the batch's loss, summed over micro-batches."""
        loss: Tensor | None = None
        diagnostics: Diagnostics | None = None
        for micro_batch in micro_batches:
            logprobs_BT, entropy_BT = self._score(micro_batch, entropy_grad=self._training.entropy_coef > 0)
            weights_BT = token_weights(
                micro_batch.mask_BT,
                aggregation=self._training.loss_aggregation,
                tokens=tokens,
                sequences=sequences,
                max_length=self._recipe.rollout.context_window,
            )
            share = self._algorithm.loss(
                logprobs_BT,
                entropy_BT=entropy_BT,
                behaviour_logprobs_BT=micro_batch.behaviour_logprobs_BT,
                advantages_B=micro_batch.advantages_B,
                mask_BT=micro_batch.mask_BT,
                weights_BT=weights_BT,
            )
            share.loss.backward()  # type: ignore[no-untyped-call]
            value = share.loss.detach()
            loss = value if loss is None else loss + value
            diagnostics = share.diagnostics if diagnostics is None else diagnostics + share.diagnostics
        if loss is None or diagnostics is None:
            raise Internal("a pass over no micro-batch")
        return loss, diagnostics

    def state_dict(self) -> dict[str, object]:
        """Model, optimiser, schedule and RNG: what `torch.save` needs to continue exactly here."""
        state: dict[str, object] = {
            "model": self.model.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "steps_done": self.steps_done,
            "rng": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from `state_dict()`. Raises Invalid where it is of another model."""
        try:
            self.model.load_state_dict(cast(dict[str, Tensor], state["model"]))
            self._optimiser.load_state_dict(cast(dict[str, object], state["optimiser"]))
            self.steps_done = int(cast(int, state["steps_done"]))
            torch.set_rng_state(cast(Tensor, state["rng"]))
            if self.device.type == "cuda" and "cuda_rng" in state:
                torch.cuda.set_rng_state(cast(Tensor, state["cuda_rng"]), self.device)
        except (KeyError, RuntimeError, ValueError) as error:
            raise Invalid(f"not a state of this trainer's model: {error}") from error

    def raw_weights(self) -> dict[str, RawTensor]:
        """Every tensor of the model as bytes, tied ones once, under the first of their names."""
        seen: set[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = set()
        raw: dict[str, RawTensor] = {}
        for name, tensor in self.model.state_dict().items():
            place = (tensor.data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            if tensor.numel() and place in seen:
                continue
            seen.add(place)
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            raw[name] = RawTensor(dtype=_SAFETENSORS_NAME[tensor.dtype], shape=tuple(tensor.shape), data=data)
        return raw


def learning_rate(step: int, training: Training) -> float:
    """Rate of a step, counted from 0: linear growth over `warmup_steps`, then linear to its final share.

    A pure function of the step, so nothing of it can be restored twice or not at all.
    """
    if step < training.warmup_steps:
        return training.learning_rate * (step + 1) / training.warmup_steps
    falling = max(training.steps - training.warmup_steps - 1, 1)
    progress = min(1.0, (step - training.warmup_steps) / falling)
    return training.learning_rate * (1.0 - (1.0 - training.final_learning_rate_share) * progress)


def _adamw(parameters: Sequence[Tensor], training: Training) -> torch.optim.AdamW:
    """Weight decay on matrices only: norms and biases have no reason to shrink."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=training.learning_rate,
        betas=training.betas,
        fused=True,
    )


def _first_pass(loss: float, grad_norm: float, diagnostics: Diagnostics) -> StepStats:
    tokens = max(int(diagnostics.tokens), 1)
    ratio, squared = float(diagnostics.ratio), float(diagnostics.ratio_squared)
    return StepStats(
        loss=loss,
        grad_norm=grad_norm,
        entropy=float(diagnostics.entropy) / tokens,
        mismatch_kl=float(diagnostics.kl) / tokens,
        chi2=squared / tokens - 1.0,
        ess=ratio * ratio / (tokens * squared) if squared > 0 else 0.0,
    )


def _with_clipping(stats: StepStats, passes: Sequence[Diagnostics]) -> StepStats:
    positive = sum(int(d.positive) for d in passes)
    negative = sum(int(d.negative) for d in passes)
    return replace(
        stats,
        clip_fraction_positive=sum(int(d.clipped_positive) for d in passes) / max(positive, 1),
        clip_fraction_negative=sum(int(d.clipped_negative) for d in passes) / max(negative, 1),
        ratio_max=max((float(d.ratio_max) for d in passes), default=stats.ratio_max),
    )
