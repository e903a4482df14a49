"""Text to tokens and back, once: what environments do with observations and sampled actions, and training
with warm-start transcripts. Needs `tokenizers` and `jinja2` alone, and works for any Hugging Face folder
with a `tokenizer.json`.

The token history of a trajectory only grows: `opening_ids(first observation)`, then for each turn the ids as
they were sampled, then `turn_ids(next observation)`. What was sampled is never decoded and encoded again, so
the prompt of a turn always starts with the prompt and the sampled ids of the turn before.

A tokenizer without a chat template gets `PLAIN_TEMPLATE`: `User: …`, a line break, `Assistant:`, and the
tokenizer's end-of-text token, where it has one, behind each answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from shared.errors import FieldProblem, Invalid

PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}Assistant: {{ message.content }}{{ eos_token }}\n"
    "{% else %}User: {{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
_ANSWER = "\u2402ANSWER\u2403"
"""Stands for the sampled answer while the glue behind it is rendered; no observation holds it."""
_CACHED_GLUE = 8192
Messages = Sequence[Mapping[str, object]]
"""In OpenAI's form: `role`, `content` and what else a template reads."""
Tools = Sequence[Mapping[str, object]] | None
"""In OpenAI's form, for the templates that show them to the model."""


class ChatTokenizer:
    """A tokenizer with its chat template. Immutable; safe to share between threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str,
        special_tokens: Mapping[str, str],
        end_ids: Iterable[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._template = _compile(template)
        self._special_tokens = {"bos_token": "", "eos_token": "", **special_tokens}
        self._end_text = self._end_of_answer()
        own = [] if self._end_text is None else [self._token_id(self._end_text)]
        self.end_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *end_ids]))
        """Ids that end an answer, the template's own first. Empty where the tokenizer knows none."""
        self._cached_turn_ids = lru_cache(_CACHED_GLUE)(self._turn_ids)

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTokenizer:
        """The tokenizer in a Hugging Face folder. Raises Invalid naming `model` where there is none."""
        folder = Path(folder)
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise _invalid(f"no usable tokenizer.json in {folder}: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        config = {
            **_read_json(folder / "special_tokens_map.json"),
            **_read_json(folder / "tokenizer_config.json"),
        }
        special_tokens = _special_tokens(config)
        generation = _read_json(folder / "generation_config.json").get("eos_token_id")
        listed = generation if isinstance(generation, list) else [generation]
        end_ids = [tokenizer.token_to_id(special_tokens.get("eos_token", "")), *listed]
        return cls(
            tokenizer,
            template=_template_text(folder, config),
            special_tokens=special_tokens,
            end_ids=[i for i in end_ids if isinstance(i, int)],
        )

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def opening_ids(self, observation: str) -> list[int]:
        """The first prompt: the first user message, and the template's start of an answer.

        Raises Invalid where the text cannot be encoded or the template refuses it.
        """
        return self._encode(self._render([_user(observation)]))

    def turn_ids(self, observation: str, *, ended: bool) -> list[int]:
        """What follows the sampled ids of a turn: the rest of the answer's frame, the next user message, and
        the start of the next answer.

        `ended`: the sampled ids end with one of `end_ids`; otherwise the end is part of what is returned.
        Raises Invalid where the text cannot be encoded or the template refuses it.
        """
        return list(self._cached_turn_ids(observation, ended))

    def conversation_ids(self, messages: Messages, *, tools: Tools = None) -> list[int]:
        """A whole conversation that somebody else has written, and the start of the next answer.

        Raises Invalid where the text cannot be encoded or the template refuses it.
        """
        return self._encode(self._render(messages, tools))

    def following_ids(self, messages: Messages, *, ended: bool, tools: Tools = None) -> list[int]:
        """As `turn_ids`, for any messages behind an answer."""
        glue = self._glue(messages, tools)
        if ended and self._end_text is not None:
            glue = glue.removeprefix(self._end_text)
        return self._encode(glue)

    def text_ids(self, text: str) -> list[int]:
        """Text as it is, without a template. Raises Invalid where it cannot be encoded."""
        return self._encode(text)

    def answer_ids(self, text: str) -> list[int]:
        """An answer as ids, with the end token: what a policy that says exactly this would sample."""
        return self._encode(text) + list(self.end_ids[:1])

    def action_text(self, token_ids: Sequence[int]) -> str:
        """Sampled ids as the text that the environment gets: no special tokens, no space around it."""
        return self.decode(token_ids, skip_special_tokens=True).strip()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Ids as text, for people; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def _turn_ids(self, observation: str, ended: bool) -> tuple[int, ...]:
        return tuple(self.following_ids([_user(observation)], ended=ended))

    def _glue(self, following: Messages, tools: Tools = None) -> str:
        """All that the template puts behind an answer when these are the next messages."""
        messages = [_user("?"), {"role": "assistant", "content": _ANSWER}, *following]
        before, found, glue = self._render(messages, tools).rpartition(_ANSWER)
        if not found or _ANSWER in before:
            raise _invalid("the chat template does not render an answer verbatim")
        return glue

    def _token_id(self, text: str) -> int:
        return next(i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.content == text)

    def _end_of_answer(self) -> str | None:
        """The special token that the template puts right behind an answer, or None."""
        glue = self._glue([_user("?")])
        specials = [
            t.content
            for t in self._tokenizer.get_added_tokens_decoder().values()
            if glue.startswith(t.content)
        ]
        return max(specials, key=len, default=None)

    def _render(self, messages: Messages, tools: Tools = None) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program: it fails with whatever Python raises
            raise _invalid(f"the chat template refuses the messages: {error}") from error

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            message = f"text cannot be encoded: lone surrogate at {error.start}"
            raise Invalid(message, fields=[FieldProblem(field="text", message=message)]) from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks answers in some templates; it renders what it holds."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The inner nodes alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str) -> Template:
    """The template in the sandbox and with the globals that `transformers` gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise _invalid(f"the chat template cannot be parsed: {error}") from error


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


def _user(content: str) -> Mapping[str, object]:
    return {"role": "user", "content": content}


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """`bos_token`, `eos_token`, … as text; stored as a string, or as an object with `content`."""
    found = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _template_text(folder: Path, config: Mapping[str, object]) -> str:
    """`chat_template.jinja`, else the one in the config (a string, or a list with one named `default`)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    stored = config.get("chat_template")
    if isinstance(stored, list):
        named = {str(item.get("name")): item.get("template") for item in stored if isinstance(item, dict)}
        stored = named.get("default")
    return stored if isinstance(stored, str) and stored else PLAIN_TEMPLATE


def _read_json(file: Path) -> dict[str, object]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _invalid(f"{file} cannot be read: {error}") from error
    return data if isinstance(data, dict) else {}


def _invalid(message: str) -> Invalid:
    return Invalid(message, fields=[FieldProblem(field="model", message=message)])
