"""Request bodies: those of sessions, strict; those of OpenAI's API, tolerant of what changes nothing.

What would change what is sampled, and is not supported, is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from shared.errors import Invalid
from shared.events import FiniteFloat, Phases, Sampling
from shared.registry import problems
from shared.sections import Name

MAX_TOKENS = 1_000_000
SessionId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
M = TypeVar("M", bound=BaseModel)


class Strict(BaseModel):
    """Root of the bodies that are ours alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SessionSampling(Strict):
    """What a call that does not say itself is sampled with."""

    temperature: FiniteFloat = Field(1.0, ge=0, le=10)
    top_p: FiniteFloat = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0: no limit."""
    max_tokens: int = Field(MAX_TOKENS, ge=1, le=MAX_TOKENS)
    """New tokens of a turn; clipped to what the context window leaves."""


class OpenSession(Strict):
    """`POST /sessions`."""

    session_id: SessionId | None = None
    """Made up where it is left out."""
    attempt: int = Field(0, ge=0, le=1_000_000)
    """A later attempt replaces an earlier one, whose trajectory is then aborted."""
    policy: str = Field(min_length=1, max_length=256)
    """`name`, which follows the newest version, or `name@version`."""
    task: Name = "session"
    run_id: Name = "sessions"
    group_id: str | None = Field(None, min_length=1, max_length=256)
    """Sessions of one group are compared with one another; `{run_id}/{session_id}` where left out."""
    member: int = Field(0, ge=0, le=1_000_000)
    context_window: int | None = Field(None, ge=2, le=100_000_000)
    """Of the whole conversation; the model's where left out."""
    sampling: SessionSampling = SessionSampling()
    affinity: str | None = None
    """Device class that its turns prefer, or `auto`; the router's default where left out."""
    prefill_affinity: str | None = None
    phases: Phases | None = None


class PostReward(Strict):
    """`POST /sessions/{id}/reward`: ends it."""

    reward: FiniteFloat
    components: dict[str, FiniteFloat] = {}
    """What it is made of, for people."""


class EndSession(Strict):
    """`POST /sessions/{id}/end`."""

    status: Literal["finished", "truncated", "failed", "aborted"] = "finished"
    reason: str = Field("", max_length=256)
    reward: FiniteFloat | None = None

    @model_validator(mode="after")
    def _rewarded(self) -> Self:
        if self.reward is not None and self.status in ("failed", "aborted"):
            raise ValueError(f"a session that is {self.status} has no reward: leave reward out")
        return self


class StreamOptions(BaseModel):
    """`stream_options`."""

    include_usage: bool = False


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Asked(BaseModel):
    """What chat completions and completions share."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str = ""
    """The policy, where the session is opened by this call; else without effect."""
    temperature: FiniteFloat | None = Field(None, ge=0, le=10)
    top_p: FiniteFloat | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    """0 and -1: no limit."""
    max_tokens: int | None = Field(None, ge=1)
    stop: Annotated[list[str], BeforeValidator(_listed)] | None = Field(None, max_length=16)
    """Texts that are one token each."""
    stop_token_ids: list[int] = Field([], max_length=64)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """`prompt_token_ids` and `token_ids`, as vLLM gives them."""
    n: Literal[1] | None = None

    @model_validator(mode="after")
    def _supported(self) -> Self:
        extra = self.model_extra or {}
        wrong = [name for name in ("presence_penalty", "frequency_penalty", "min_p") if extra.get(name)]
        if extra.get("repetition_penalty") not in (None, 1, 1.0):
            wrong.append("repetition_penalty")
        wrong += [
            name for name in ("logit_bias", "functions", "best_of", "echo", "suffix") if _set(extra, name)
        ]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: not supported here, leave it out")
        return self

    def sampling(self, default: Sampling, stop_token_ids: tuple[int, ...]) -> Sampling:
        """With the session's values for what is not said."""
        most = self.most or default.max_tokens
        return Sampling(
            temperature=default.temperature if self.temperature is None else self.temperature,
            top_p=default.top_p if self.top_p is None else self.top_p,
            top_k=default.top_k if self.top_k is None else max(self.top_k, 0),
            max_tokens=min(most, MAX_TOKENS),
            stop_token_ids=tuple(dict.fromkeys([*stop_token_ids, *self.stop_token_ids])),
        )

    @property
    def most(self) -> int | None:
        """New tokens at most."""
        return self.max_tokens


def _set(extra: dict[str, JsonValue], name: str) -> bool:
    return extra.get(name) not in (None, False, 1, "", [], {})


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, JsonValue]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, JsonValue]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _text(self) -> Self:
        if isinstance(self.content, list) and any(part.get("type") != "text" for part in self.content):
            raise ValueError("content: parts of type text only")
        return self

    def plain(self) -> dict[str, object]:
        """As a template reads it."""
        content = self.content or ""
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content)
        role = "system" if self.role == "developer" else self.role
        found: dict[str, object] = {"role": role, "content": content}
        for name in ("name", "tool_calls", "tool_call_id"):
            if getattr(self, name):
                found[name] = getattr(self, name)
        return found


class ChatRequest(Asked):
    """`POST …/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, JsonValue]] | None = None
    """Shown to the model by its template; what it says to call them comes back as text."""
    tool_choice: Literal["auto", "none"] | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    response_format: dict[str, JsonValue] | None = None

    @model_validator(mode="after")
    def _plain_text(self) -> Self:
        if (self.response_format or {}).get("type", "text") != "text":
            raise ValueError("response_format: only text is supported here")
        return self

    @property
    def most(self) -> int | None:
        """New tokens at most."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Asked):
    """`POST …/v1/completions`."""

    prompt: str | list[int] | Annotated[list[str], Field(min_length=1, max_length=1)] | list[list[int]]
    """Text, or token ids, which are used as they are; a list of one of either."""
    logprobs: int | None = Field(None, ge=0, le=1)

    @model_validator(mode="after")
    def _single(self) -> Self:
        if not self.prompt or not self.single:
            raise ValueError("prompt: must not be empty")
        if isinstance(self.prompt, list) and isinstance(self.prompt[0], list) and len(self.prompt) > 1:
            raise ValueError("prompt: one at a time")
        return self

    @property
    def single(self) -> str | list[int]:
        """The one prompt."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        first = prompt[0]
        return first if isinstance(first, str | list) else [i for i in prompt if isinstance(i, int)]


def parse(kind: type[M], body: bytes) -> M:
    """A body. Raises Invalid naming each wrong field."""
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        fields = problems(error)
        raise Invalid("; ".join(f"{f.field}: {f.message}" for f in fields), fields=fields) from error
