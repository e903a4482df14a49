"""The recipe: everything about one training run. TOML on disk, JSON over REST, strict everywhere.

The text under each field is its documentation (`docs/recipe.md` is generated from it). An unknown key,
NaN, infinity or a number out of range is refused by name, before anything starts.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, ValidationError, model_validator

from shared import placement, registry
from shared.errors import FieldProblem, Invalid, UnknownPlugin
from shared.placement import Affinity, Placement
from shared.sections import Float, Int, Name, Section
from shared.settings import Label

_MAX_FILE_BYTES = 4_000_000
_MAX_OPEN = 262_144
"""Trajectories asked for at once: beyond it, only the asking would take minutes."""


class TinyModel(Section):
    """Shape of the model that `model = "tiny"` builds: randomly initialised, its tokenizer trained on
    transcripts of the tasks."""

    family: Literal["llama", "qwen3"] = "llama"
    """Architecture (a `transformers` causal LM)."""
    hidden_size: Int = Field(64, ge=16, le=2048, multiple_of=8)
    """Width of the residual stream."""
    layers: Int = Field(2, ge=1, le=48)
    """Transformer blocks."""
    heads: Int = Field(4, ge=1, le=64)
    """Attention heads; hidden_size / heads must be even."""
    kv_heads: Int = Field(2, ge=1, le=64)
    """Key and value heads; heads must be a multiple (grouped-query attention)."""
    vocab_size: Int = Field(768, ge=300, le=65536)
    """Upper limit; the tokenizer stops earlier when the transcripts hold no more merges."""

    @model_validator(mode="after")
    def _divisible(self) -> TinyModel:
        if self.hidden_size % self.heads or (self.hidden_size // self.heads) % 2:
            raise ValueError("hidden_size must be heads × an even head size")
        if self.heads % self.kv_heads:
            raise ValueError("heads must be a multiple of kv_heads")
        return self


class Task(Section):
    """One task: an environment, its reward, and how its turns are sampled."""

    environment: str
    """A name of the environments table or `package.module:Class`."""
    config: dict[str, JsonValue] = Field({})
    """The environment's own keys (its `Config`)."""
    weight: Float = Field(1.0, gt=0, le=1000)
    """Share of groups, relative to the other tasks."""
    max_turns: Int = Field(8, ge=1, le=10_000)
    """An episode longer than this is truncated."""
    max_tokens_per_turn: Int = Field(8, ge=1, le=131_072)
    """New tokens of one turn at most."""
    reward: str = "episode_return"
    """A name of the rewards table or `package.module:Class`."""
    reward_config: dict[str, JsonValue] = Field({})
    """The scorer's own keys (its `Config`)."""
    affinity: Label | None = None
    """Device class for this task's turns, or `auto`: the same as its entry in `[affinity]`, which holds where
    this is absent."""
    skill: Float = Field(0.0, ge=0, le=1)
    """Warm start only: probability that scripted play takes the best action it knows, else a random one."""


class Rollout(Section):
    """What is rolled out, and how far ahead of training."""

    groups_per_step: Int = Field(16, ge=1, le=65_536)
    """Prompts of one training batch."""
    group_size: Int = Field(8, ge=1, le=1024)
    """Trajectories of one prompt."""
    max_staleness: Int = Field(1, ge=0, le=64)
    """α: the largest lag, in versions, between a trajectory's start and the step that trains it."""
    temperature: Float = Field(1.0, gt=0, le=10)
    """Of training rollouts; the trainer's log-probabilities use the same."""
    top_p: Float = Field(1.0, gt=0, le=1)
    """Nucleus: the smallest set of tokens that holds this probability; 1 is all."""
    top_k: Int = Field(0, ge=0, le=1_000_000)
    """Only the k likeliest tokens; 0 is all."""
    context_window: Int = Field(512, ge=16, le=1_048_576)
    """Tokens of a whole trajectory at most."""
    deadline_s: Float = Field(120.0, ge=1, le=86_400)
    """An episode that takes longer is aborted."""
    group_retries: Int = Field(2, ge=0, le=100)
    """How often a prompt whose group failed is issued again before it is dropped for good."""


class Training(Section):
    """The optimisation."""

    algorithm: str = "grpo"
    """A name of the algorithms table or `package.module:Class`."""
    steps: Int = Field(60, ge=1, le=10_000_000)
    """Optimiser steps, each of which publishes a version."""
    learning_rate: Float = Field(1e-3, gt=0, le=1)
    """Of AdamW, after warm-up."""
    warmup_steps: Int = Field(0, ge=0, le=1_000_000)
    """Steps over which the learning rate grows linearly to its value."""
    final_learning_rate_share: Float = Field(1.0, ge=0, le=1)
    """After warm-up the learning rate falls linearly to this share of its value at the last step; 1 keeps it.
    Late batches, in which most groups have nothing left to teach, are noisy: a falling rate keeps them from
    undoing what was learned."""
    betas: tuple[Float, Float] = (0.9, 0.95)
    """Of AdamW."""
    weight_decay: Float = Field(0.0, ge=0, le=1)
    """Of AdamW, on matrices."""
    grad_clip: Float = Field(1.0, gt=0, le=1000)
    """Largest global gradient norm."""
    epochs: Int = Field(1, ge=1, le=16)
    """Optimiser passes over one batch; one step publishes one version whatever this is."""
    micro_batch_tokens: Int = Field(16_384, ge=64, le=16_777_216)
    """Padded tokens of one forward pass at most; the result does not depend on it."""
    clip_low: Float = Field(0.2, gt=0, lt=1)
    """ε below 1 of the ratio clip."""
    clip_high: Float = Field(0.28, gt=0, le=10)
    """ε above 1 of the ratio clip (DAPO clip-higher)."""
    entropy_coef: Float = Field(0.0, ge=0, le=1)
    """Weight of the entropy bonus in the loss."""
    normalize_std: bool = True
    """Divide a group's advantages by its population standard deviation (GRPO); False: Dr.GRPO."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    """DAPO, GRPO and Dr.GRPO respectively, always over the whole batch."""
    mask_truncated: bool = False
    """Leave truncated trajectories out of the loss (they stay in their group's statistics)."""
    max_mismatch_kl: Float = Field(0.02, gt=0, le=100)
    """Nats per token between sampler and trainer, at equal weights, above which a step counts as the error
    `sampler_mismatch`."""


class WarmStart(Section):
    """A short supervised phase on scripted play, before RL. Its transcripts travel through the same
    services as rollouts do."""

    episodes: Int = Field(1024, ge=0, le=10_000_000)
    """Scripted episodes over all tasks; 0 switches the phase off (a tiny model still needs transcripts
    for its tokenizer)."""
    steps: Int = Field(200, ge=0, le=10_000_000)
    """Supervised steps; 0 leaves the model untrained."""
    batch_size: Int = Field(32, ge=1, le=65_536)
    """Transcripts of one step."""
    learning_rate: Float = Field(2e-3, gt=0, le=1)
    """Its peak: a short rise, then a cosine."""
    loss_on: Literal["all", "actions"] = "all"
    """Tokens in the loss: everything, or only the actions."""


class Evaluation(Section):
    """Held-out episodes, before the first and after the last step."""

    episodes: Int = Field(128, ge=0, le=1_000_000)
    """Per task; 0 switches evaluation off."""
    temperature: Float = Field(1.0, ge=0, le=10)
    """0 is greedy."""
    first_seed: Int = Field(1_000_000, ge=0, le=2**53)
    """Seeds count up from here; their split is `eval`."""


class Checkpoint(Section):
    """When the run's state is saved."""

    every_steps: Int = Field(20, ge=1, le=10_000_000)
    """One checkpoint every so many steps, and one after the last."""
    keep: Int = Field(2, ge=1, le=1000)
    """Newest complete checkpoints kept."""


class Recipe(Section):
    """One run."""

    name: Name = "run"
    """Start of the run's id."""
    seed: Int = Field(0, ge=0, le=2**31 - 1)
    """Decides the model's first weights, the prompts' seeds and the order of the warm start."""
    model: str = Field("tiny", min_length=1, max_length=4096)
    """`tiny`, or a folder or hub name of any `transformers` causal LM."""
    tiny: TinyModel = TinyModel()
    tasks: dict[Name, Task] = Field(min_length=1)
    """Name → task; at least one."""
    affinity: Affinity = Affinity()
    rollout: Rollout = Rollout()
    training: Training = Training()
    warm_start: WarmStart = WarmStart()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        for name, task in self.tasks.items():
            if task.max_tokens_per_turn >= self.rollout.context_window:
                raise ValueError(
                    f"tasks.{name}.max_tokens_per_turn ({task.max_tokens_per_turn}) must be below "
                    f"rollout.context_window ({self.rollout.context_window})"
                )
        rollout = self.rollout
        open_ = rollout.groups_per_step * rollout.group_size * (rollout.max_staleness + 1)
        if open_ > _MAX_OPEN:
            raise ValueError(
                f"rollout.groups_per_step × rollout.group_size × (rollout.max_staleness + 1) is {open_} "
                f"trajectories at once, at most {_MAX_OPEN}: make one of them smaller"
            )
        if self.model == "tiny" and self.warm_start.episodes == 0:
            raise ValueError(
                'warm_start.episodes must be above 0 when model = "tiny": its tokenizer is '
                "trained on those transcripts"
            )
        return self

    def placement(self, task: str) -> Placement:
        """What the turns of a task of this recipe ask of the router."""
        return self.affinity.of(task, self.tasks[task].affinity)


def validate(data: object) -> Recipe:
    """A recipe out of parsed TOML or JSON, its plug-ins' names and configs checked too.

    Raises Invalid naming every wrong key.
    """
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        fields = [FieldProblem(field=f.field, message=_hint(f)) for f in registry.problems(error)]
        raise _invalid(fields) from error
    _check_unicode(recipe.model_dump(), "recipe")
    fields = placement.problems(recipe.affinity, {name: task.affinity for name, task in recipe.tasks.items()})
    for name, task in recipe.tasks.items():
        plugins: list[tuple[registry.Kind, str, dict[str, JsonValue], str, str]] = [
            ("environment", task.environment, task.config, "environment", "config"),
            ("reward", task.reward, task.reward_config, "reward", "reward_config"),
        ]
        for kind, plugin, config, key, config_key in plugins:
            try:
                registry.check_name(kind, plugin, field=f"tasks.{name}.{key}")
                registry.configure(kind, plugin, config, field=f"tasks.{name}.{config_key}")
            except UnknownPlugin as error:
                place = f"tasks.{name}.{key}"
                fields += [FieldProblem(field=place, message=f.message) for f in error.fields]
            except Invalid as error:
                fields += error.fields
    try:
        registry.check_name("algorithm", recipe.training.algorithm, field="training.algorithm")
    except Invalid as error:
        fields += error.fields
    if fields:
        raise _invalid(fields)
    return recipe


def load(path: Path) -> Recipe:
    """The recipe in a TOML file. Raises Invalid where it is missing, unreadable or wrong."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            raise OSError(f"larger than {_MAX_FILE_BYTES} bytes")
        data = tomllib.loads(raw.decode("utf-8"))
    except FileNotFoundError as error:
        raise _invalid([FieldProblem(field=str(path), message="no such recipe file")]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid([FieldProblem(field=str(path), message=f"cannot be read: {error}")]) from error
    except tomllib.TOMLDecodeError as error:
        raise _invalid([FieldProblem(field=str(path), message=f"not valid TOML: {error}")]) from error
    except RecursionError as error:
        raise _invalid([FieldProblem(field=str(path), message="nested too deeply")]) from error
    return validate(data)


def _invalid(fields: list[FieldProblem]) -> Invalid:
    return Invalid("; ".join(f"{f.field}: {f.message}" for f in fields), fields=fields)


_SECTION_KEYS: dict[str, list[str]] = {}


def _hint(problem: FieldProblem) -> str:
    """The message, with the place where a misplaced or misspelt key belongs."""
    if not problem.message.startswith("unknown key"):
        return problem.message
    if not _SECTION_KEYS:
        _SECTION_KEYS[""] = list(Recipe.model_fields)
        for section, field in Recipe.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                _SECTION_KEYS[section] = list(field.annotation.model_fields)
        _SECTION_KEYS["tasks.<name>"] = list(Task.model_fields)
    parent, _, key = problem.field.rpartition(".")
    own = "tasks.<name>" if re.fullmatch(r"tasks\.[^.]+", parent) else parent
    elsewhere = [s for s, keys in _SECTION_KEYS.items() if key in keys and s != own]
    if elsewhere:
        where = f"[{elsewhere[0]}]" if elsewhere[0] else "the top level"
        return f"unknown key here; it belongs in {where}"
    import difflib

    near = difflib.get_close_matches(key, _SECTION_KEYS.get(own, []), n=1)
    return f"unknown key; did you mean {near[0]!r}?" if near else problem.message


def _check_unicode(value: object, field: str) -> None:
    if isinstance(value, str):
        if "\0" in value:
            raise _invalid([FieldProblem(field=field, message="holds a NUL character")])
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _invalid([FieldProblem(field=field, message="not encodable as UTF-8")]) from error
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_unicode(key, field)
            _check_unicode(item, f"{field}.{key}".removeprefix("recipe."))
    elif isinstance(value, list | tuple):
        for item in value:
            _check_unicode(item, field)
