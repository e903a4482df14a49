"""The model of a run: built small from scratch or loaded, saved for engines, exported for people.

Called by the training service when a run starts and ends. A *model folder* is what engines and environments
need: `config.json` and the tokenizer's files, no weights (those come by version from the weight store).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from shared.errors import FieldProblem, Invalid
from shared.recipe import TinyModel
from shared.tokens import ChatTokenizer

PAD, USER, ASSISTANT, END = "<pad>", "<|user|>", "<|assistant|>", "<|end|>"
TINY_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}<|end|>"
    "{% else %}<|user|>{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_LONGEST_TOKEN = 200


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, folder: Path) -> ChatTokenizer:
    """Train a byte-level BPE on the texts of a task's messages and write it as a Hugging Face folder.

    Merges may span words, but not a line's end nor the border of a number: recurring phrases and recurring
    numbers of the environments become single tokens. Any text can be encoded. At most `vocab_size` tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split("\n", behavior="merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in (PAD, USER, ASSISTANT, END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=_LONGEST_TOKEN,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        # Any other class rebuilds the pre-tokenizer of its own family when AutoTokenizer loads the folder.
        "tokenizer_class": "TokenizersBackend",
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": TINY_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return ChatTokenizer.from_folder(folder)


def build_tiny(tiny: TinyModel, *, tokenizer_folder: Path, context_window: int, seed: int) -> PreTrainedModel:
    """A randomly initialised causal LM for the tokenizer in the folder, float32 on the CPU.

    The same arguments give the same weights; the process's random state is left alone. Matrices are drawn
    with standard deviation 1/√hidden_size, those that write into the residual stream scaled by 1/√(2·layers)
    (GPT-2). The usual 0.02 suits wide models: at a width of 64 attention starts flat and learns to look up
    values several times slower.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    config = _tiny_config(tiny, tokenizer=tokenizer, context_window=context_window)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32
        )
        std = tiny.hidden_size**-0.5
        residual_std = std / math.sqrt(2 * tiny.layers)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                torch.nn.init.normal_(parameter, std=residual_std if into_residual else std)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model


def load_pretrained(name: str) -> tuple[PreTrainedModel, Path]:
    """The causal LM in a folder or under a hub name, float32 on the CPU, and the folder of its tokenizer.

    Offline use is governed by the hub's own variables (`HF_HUB_OFFLINE`, …). Raises Invalid naming `model`
    where either cannot be loaded.
    """
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        folder = Path(name) if Path(name).is_dir() else _fetch_tokenizer(name)
    except Exception as error:  # transformers and the hub raise whatever their dependencies do
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        message = f"cannot load {name!r} as a causal LM: {reason}"
        raise Invalid(message, fields=[FieldProblem(field="model", message=message)]) from error
    ChatTokenizer.from_folder(folder)
    return model, folder


def save_model_folder(model: PreTrainedModel, tokenizer_folder: Path, out: Path) -> None:
    """Write a model folder: `config.json` and the tokenizer, without weights. Existing files are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    _copy_tokenizer(tokenizer_folder, out)
    model.config.save_pretrained(out)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(out)


def export_folder(model: PreTrainedModel, tokenizer_folder: Path, out: Path) -> None:
    """Write a Hugging Face folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    It appears under its name when it is complete; an earlier one of that name is replaced.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        save_model_folder(model, tokenizer_folder, fresh)
        model.save_pretrained(fresh)
        fresh.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)
        os.replace(fresh, out)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _tiny_config(tiny: TinyModel, *, tokenizer: Tokenizer, context_window: int) -> PretrainedConfig:
    family: Callable[..., PretrainedConfig] = {"llama": LlamaConfig, "qwen3": Qwen3Config}[tiny.family]
    return family(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=tiny.hidden_size,
        intermediate_size=max(16, int(tiny.hidden_size * 8 / 3 / 16) * 16),
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.kv_heads,
        head_dim=tiny.hidden_size // tiny.heads,
        max_position_embeddings=context_window,
        rms_norm_eps=1e-5,
        initializer_range=tiny.hidden_size**-0.5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )


def _fetch_tokenizer(name: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=list(TOKENIZER_FILES)))


def _copy_tokenizer(source: Path, out: Path) -> None:
    for file in TOKENIZER_FILES:
        if (source / file).is_file() and source.resolve() != out.resolve():
            shutil.copyfile(source / file, out / file)
