"""Building, saving and loading the policy's model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.training.model import (
    build_tiny,
    export_folder,
    load_pretrained,
    save_model_folder,
    train_tokenizer,
)
from shared.errors import Invalid
from shared.recipe import TinyModel
from shared.tokens import ChatTokenizer

torch.set_num_threads(1)
TEXTS = ["left ice\ndown hole\nright edge\nup goal\nrow 1, column 2", "left", "from 1 to 16", "12"] * 20


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    train_tokenizer(TEXTS, vocab_size=400, folder=tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_recurring_phrases_and_numbers_become_single_tokens(tokenizer_folder: Path) -> None:
    tokenizer = ChatTokenizer.from_folder(tokenizer_folder)
    assert len(tokenizer.answer_ids("left")) == 2
    assert len(tokenizer.answer_ids("12")) == 2
    assert tokenizer.decode(tokenizer.opening_ids(TEXTS[0])).startswith("<|user|>left ice\n")
    assert len(tokenizer.opening_ids(TEXTS[0])) <= 12


def test_padding_is_not_the_end_token(tokenizer_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert ChatTokenizer.from_folder(tokenizer_folder).end_ids == (tokenizer.eos_token_id,)


@pytest.mark.parametrize("text", ["héllo 🎉", "\x00\u202e", "a  b\r\n\n c\t", "", "   ", "12345 left\n"])
def test_any_text_survives_the_byte_level_vocabulary(tokenizer_folder: Path, text: str) -> None:
    tokenizer = ChatTokenizer.from_folder(tokenizer_folder)
    assert tokenizer.decode(tokenizer.answer_ids(text), skip_special_tokens=True) == text


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_exported_folder_gives_the_same_logits_and_ids_in_transformers(
    tokenizer_folder: Path, tmp_path: Path, family: str
) -> None:
    tiny = TinyModel.model_validate({"family": family, "hidden_size": 32})
    model = build_tiny(tiny, tokenizer_folder=tokenizer_folder, context_window=64, seed=1)
    model.train(False)
    export_folder(model, tokenizer_folder, tmp_path / "run" / "export")
    export_folder(model, tokenizer_folder, tmp_path / "run" / "export")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["export"]

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "export")
    ours = ChatTokenizer.from_folder(tmp_path / "run" / "export")
    ids = ours.opening_ids("row 1, column 2 of 16")
    message = [{"role": "user", "content": "row 1, column 2 of 16"}]
    assert list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)) == ids
    with torch.no_grad():
        torch.testing.assert_close(loaded(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits)
    assert loaded.config.max_position_embeddings == 64
    assert loaded.generation_config.eos_token_id == ours.end_ids[0]


def test_a_model_folder_holds_no_weights_and_builds_the_same_shapes(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    model = build_tiny(TinyModel(), tokenizer_folder=tokenizer_folder, context_window=64, seed=1)
    save_model_folder(model, tokenizer_folder, tmp_path / "model")
    assert not [path for path in (tmp_path / "model").iterdir() if path.suffix in {".safetensors", ".bin"}]
    rebuilt = type(model)(type(model.config).from_pretrained(tmp_path / "model"))
    assert {n: p.shape for n, p in rebuilt.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    assert ChatTokenizer.from_folder(tmp_path / "model").end_ids


def test_weights_depend_on_the_seed_alone(tokenizer_folder: Path) -> None:
    def weights(seed: int) -> list[float]:
        model = build_tiny(TinyModel(), tokenizer_folder=tokenizer_folder, context_window=64, seed=seed)
        return torch.cat([p.flatten() for p in model.parameters()]).tolist()

    state = torch.get_rng_state()
    first = weights(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(random.randrange(1, 9))
    assert weights(1) == first
    assert weights(2) != first


def test_a_folder_is_loaded_with_its_tokenizer(tokenizer_folder: Path, tmp_path: Path) -> None:
    model = build_tiny(TinyModel(), tokenizer_folder=tokenizer_folder, context_window=64, seed=1)
    export_folder(model, tokenizer_folder, tmp_path / "export")
    loaded, folder = load_pretrained(str(tmp_path / "export"))
    assert folder == tmp_path / "export"
    assert loaded.dtype == torch.float32
    for (name, ours), (_, theirs) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("name", ["no/such-folder/anywhere", ""])
def test_a_model_that_cannot_be_loaded_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Invalid) as caught:
        load_pretrained(name or str(tmp_path))
    assert [problem.field for problem in caught.value.fields] == ["model"]
    assert (name or str(tmp_path)) in caught.value.message


def test_a_failed_export_leaves_the_earlier_one(tokenizer_folder: Path, tmp_path: Path) -> None:
    model = build_tiny(TinyModel(), tokenizer_folder=tokenizer_folder, context_window=64, seed=1)
    export_folder(model, tokenizer_folder, tmp_path / "export")
    broken = build_tiny(TinyModel(), tokenizer_folder=tokenizer_folder, context_window=64, seed=1)
    broken.generation_config.temperature = -1.0  # refused by transformers when it is saved
    with pytest.raises(ValueError):
        export_folder(broken, tokenizer_folder, tmp_path / "export")
    AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir() if path.name != "tokenizer"] == ["export"]
