"""Token histories that only grow, for our own tokenizer's shape and for the templates models come with."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from shared.errors import Invalid
from shared.tokens import ChatTokenizer

CHATML = """{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
"""Qwen2's shape: a default system prompt, a line break behind each end."""

THINKING = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Qwen3's shape: reasoning of earlier answers disappears when a conversation is rendered again."""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant') %}{{ raise_exception('unknown role') }}{%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

GENERATION = """{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{% else %}<|user|>{{ message.content }}{% endif %}{% endfor %}<|assistant|>"""

REFUSING = "{{ raise_exception('only with a system prompt') }}"
FORGETFUL = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}{% endif %}{% endfor %}"
)

ROLES = ["<|user|>", "<|assistant|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIALS = ["<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", *ROLES]
TEMPLATES = {
    "chatml": CHATML,
    "thinking": THINKING,
    "llama3": LLAMA3,
    "generation": GENERATION,
    "plain": None,
}


def write_folder(folder: Path, *, template: str | None, **config: object) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["hello hello hello", "he llo he llo", "the goal is right", "row 1 column 2"] * 10
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    stored = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<|bos|>", "special": True},
        "eos_token": "<|endoftext|>",
        **({"chat_template": template} if template else {}),
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(stored))
    return folder


@pytest.fixture(params=list(TEMPLATES))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_folder(tmp_path, template=TEMPLATES[request.param])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def rendered(folder: Path, messages: list[dict[str, str]]) -> list[int]:
    """What `transformers` makes of the messages."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


@pytest.mark.parametrize("template", [CHATML, THINKING, LLAMA3, GENERATION])
def test_ids_are_those_of_apply_chat_template(tmp_path: Path, template: str) -> None:
    folder = write_folder(tmp_path, template=template)
    ours = ChatTokenizer.from_folder(folder)
    first, answer, second = "row 1", "right", "hello goal"
    opening = rendered(folder, [user(first)])
    whole = rendered(folder, [user(first), {"role": "assistant", "content": answer}, user(second)])
    newline = [] if template != GENERATION else ours.answer_ids("\n")[:-1]
    assert opening + newline + ours.answer_ids(answer) + ours.turn_ids(second, ended=True) == whole


def test_an_answer_that_was_cut_off_gets_its_end_from_the_glue(folder: Path) -> None:
    tokenizer = ChatTokenizer.from_folder(folder)
    cut = tokenizer.turn_ids("next", ended=False)
    assert cut == [tokenizer.end_ids[0], *tokenizer.turn_ids("next", ended=True)]


def test_each_prompt_starts_with_the_prompt_and_the_sampled_ids_before_it(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.from_folder(write_folder(tmp_path, template=CHATML))
    rng = random.Random(0)
    drifted = 0
    prompt = tokenizer.opening_ids("row 1 column 2")
    for _ in range(1000):
        sampled = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 12))]
        ended = rng.random() < 0.5
        if ended:
            sampled.append(rng.choice(tokenizer.end_ids))
        following = prompt + sampled + tokenizer.turn_ids("hello", ended=ended)
        assert following[: len(prompt) + len(sampled)] == prompt + sampled
        text = tokenizer.action_text(sampled)
        text.encode("utf-8")
        drifted += tokenizer.answer_ids(text)[:-1] != [i for i in sampled if i not in tokenizer.end_ids]
    assert drifted > 500, "random ids rarely are what the tokenizer makes of their text"


def test_pieces_are_kept_where_the_tokenizer_would_merge_them(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.from_folder(write_folder(tmp_path, template=CHATML))
    pieces = tokenizer.answer_ids("he")[:-1] + tokenizer.answer_ids("llo")[:-1]
    merged = tokenizer.answer_ids("hello")[:-1]
    assert tokenizer.decode(pieces) == tokenizer.decode(merged) == "hello"
    assert pieces != merged
    prompt = tokenizer.opening_ids("?") + pieces + tokenizer.turn_ids("!", ended=False)
    start = len(tokenizer.opening_ids("?"))
    assert prompt[start : start + len(pieces)] == pieces


def test_reasoning_of_earlier_answers_stays_in_the_history(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, template=THINKING)
    ours = ChatTokenizer.from_folder(folder)
    answer = "<think>\nthe goal\n</think>\n\nright"
    history = ours.opening_ids("row 1") + ours.answer_ids(answer) + ours.turn_ids("hello", ended=True)
    again = rendered(folder, [user("row 1"), {"role": "assistant", "content": answer}, user("hello")])
    assert "the goal" in ours.decode(history)
    assert "the goal" not in ours.decode(again)


def test_all_known_ends_stop_an_answer(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, template=CHATML)
    by_text = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [by_text("<|eot_id|>")]}))
    tokenizer = ChatTokenizer.from_folder(folder)
    assert tokenizer.end_ids == tuple(by_text(t) for t in ("<|im_end|>", "<|endoftext|>", "<|eot_id|>"))


def test_a_tokenizer_without_a_template_gets_the_plain_one(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.from_folder(write_folder(tmp_path, template=None))
    assert tokenizer.decode(tokenizer.opening_ids("row 1")) == "<|bos|>User: row 1\nAssistant:"
    assert tokenizer.decode(tokenizer.turn_ids("row 2", ended=True)) == "\nUser: row 2\nAssistant:"


def test_a_tokenizer_without_any_end_token_still_takes_turns(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.from_folder(write_folder(tmp_path, template=None, eos_token=None))
    assert tokenizer.end_ids == ()
    assert tokenizer.turn_ids("row 2", ended=False) == tokenizer.turn_ids("row 2", ended=True)
    assert tokenizer.decode(tokenizer.turn_ids("row 2", ended=False)) == "\nUser: row 2\nAssistant:"


@pytest.mark.parametrize("stored", ["file", "named"])
def test_a_template_is_found_wherever_it_is_stored(tmp_path: Path, stored: str) -> None:
    named = [{"name": "tool_use", "template": REFUSING}, {"name": "default", "template": CHATML}]
    folder = write_folder(tmp_path, template=None, chat_template=named if stored == "named" else REFUSING)
    if stored == "file":
        (folder / "chat_template.jinja").write_text(CHATML)
    assert (
        ChatTokenizer.from_folder(folder).decode([ChatTokenizer.from_folder(folder).end_ids[0]])
        == "<|im_end|>"
    )


def test_action_text_holds_no_special_tokens(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.from_folder(write_folder(tmp_path, template=CHATML))
    assert tokenizer.action_text(tokenizer.answer_ids("  right\n")) == "right"
    assert tokenizer.action_text([]) == ""


@pytest.mark.parametrize("text", ["\ud800", "row \udfff"])
def test_text_that_cannot_be_encoded_is_invalid(folder: Path, text: str) -> None:
    tokenizer = ChatTokenizer.from_folder(folder)
    for encode in (tokenizer.opening_ids, tokenizer.answer_ids, lambda t: tokenizer.turn_ids(t, ended=True)):
        with pytest.raises(Invalid, match="surrogate"):
            encode(text)


@pytest.mark.parametrize("text", ["\x00", "\u202e", "🎉" * 1000, ""])
def test_unusual_text_is_encoded_unchanged(tmp_path: Path, text: str) -> None:
    tokenizer = ChatTokenizer.from_folder(write_folder(tmp_path, template=CHATML))
    assert f"user\n{text}<|im_end|>" in tokenizer.decode(tokenizer.opening_ids(text))


@pytest.mark.parametrize("template", [REFUSING, FORGETFUL, "{% if %}", "{{ 1 / 0 }}"])
def test_a_template_that_cannot_be_used_is_refused(tmp_path: Path, template: str) -> None:
    with pytest.raises(Invalid) as caught:
        ChatTokenizer.from_folder(write_folder(tmp_path, template=template))
    assert [problem.field for problem in caught.value.fields] == ["model"]


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(Invalid):
        ChatTokenizer.from_folder(write_folder(tmp_path, template=escape))


@pytest.mark.parametrize("content", [None, "{not json", "{}"])
def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(Invalid) as caught:
        ChatTokenizer.from_folder(tmp_path)
    assert [problem.field for problem in caught.value.fields] == ["model"]
