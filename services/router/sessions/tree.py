"""What a session has said so far: a tree of turns, each with the tokens as they were sampled.

A call continues the turn after which its messages go on; what was sampled is never tokenised again. A call
whose messages continue nothing begins anew, with the conversation as its caller tells it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict

from services.router.sessions.bodies import ChatRequest, CompletionRequest
from shared.events import FinishReason, Message, Sampling
from shared.tokens import ChatTokenizer

ROOT = -1


class Turn(BaseModel):
    """One answered call. Kept in Redis as JSON."""

    model_config = ConfigDict(frozen=True)

    number: int
    parent: int
    """The turn that it continues, or ROOT."""
    branch: int
    """That of its parent where it was the first to continue it, else its own number."""
    key: str = ""
    """Digest of the conversation up to and with this answer; empty where it is none."""
    context_ids: list[int]
    """Prompt tokens behind the parent's last."""
    token_ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int]]
    """Run-length: (policy version, tokens)."""
    finish_reason: FinishReason
    sampling: Sampling
    messages: list[Message]
    """What was said since the parent, the answer last."""
    worker_id: str
    device_class: str
    prefill_worker: str | None = None
    cached_tokens: int = 0
    wait_s: float = 0.0

    @property
    def draw(self) -> tuple[float, float, int]:
        """What log-probabilities depend on."""
        return self.sampling.temperature, self.sampling.top_p, self.sampling.top_k


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call goes on."""

    parent: Turn | None
    context_ids: list[int]
    messages: list[Message]
    key: str
    """Of the conversation before the answer."""


@dataclass(slots=True)
class Tree:
    """The turns of one attempt at a session."""

    turns: dict[int, Turn] = field(default_factory=dict)
    _by_key: dict[str, Turn] = field(default_factory=dict)

    def add(self, turns: Iterable[Turn]) -> None:
        """Take in turns; of the same conversation the latest counts."""
        for turn in sorted(turns, key=lambda one: one.number):
            self.turns[turn.number] = turn
            if turn.key:
                self._by_key[turn.key] = turn

    def path(self, turn: Turn | None) -> list[Turn]:
        """From the beginning to a turn."""
        found: list[Turn] = []
        while turn is not None:
            found.append(turn)
            turn = self.turns.get(turn.parent)
        return found[::-1]

    def ids(self, turn: Turn | None) -> list[int]:
        """All tokens up to and with a turn."""
        return [i for one in self.path(turn) for i in (*one.context_ids, *one.token_ids)]

    def place_chat(self, request: ChatRequest, tokenizer: ChatTokenizer) -> Place:
        """Where a conversation goes on. Raises Invalid where its text or its order cannot be encoded."""
        messages = [message.plain() for message in request.messages]
        parent, at, key = None, 0, _digest("", {"tools": request.tools or []})
        for number, message in enumerate(messages, start=1):
            key = _digest(key, message)
            turn = self._by_key.get(key)
            if turn is not None and number < len(messages):
                parent, at = turn, number
        if parent is None:
            ids = tokenizer.conversation_ids(messages, tools=request.tools)
        else:
            ended = parent.token_ids[-1] in tokenizer.end_ids
            ids = tokenizer.following_ids(messages[at:], ended=ended, tools=request.tools)
        return Place(parent, ids, [_told(message) for message in messages[at:]], key)

    def place_completion(self, request: CompletionRequest, tokenizer: ChatTokenizer) -> Place:
        """Where a prompt goes on: behind the longest of what was asked and answered before."""
        prompt = request.single
        if isinstance(prompt, str):
            longest = max(
                (turn for turn in self.turns.values() if prompt.startswith(self._text(turn, tokenizer))),
                key=lambda turn: len(self.ids(turn)),
                default=None,
            )
            rest = prompt[len(self._text(longest, tokenizer)) :] if longest else prompt
            return Place(longest, tokenizer.text_ids(rest), [Message(role="user", content=rest)], "")
        longest, before = None, 0
        for turn in self.turns.values():
            ids = self.ids(turn)
            if before < len(ids) < len(prompt) and prompt[: len(ids)] == ids:
                longest, before = turn, len(ids)
        text = tokenizer.decode(prompt[before:])
        return Place(longest, prompt[before:], [Message(role="user", content=text)], "")

    def _text(self, turn: Turn, tokenizer: ChatTokenizer) -> str:
        """Prompt and answer as a caller has them: special tokens of answers are not shown."""
        return "".join(message.content for one in self.path(turn) for message in one.messages)

    def ends(self) -> list[Turn]:
        """The turns after which nothing was sampled in the same way: each is the end of a trajectory."""
        continued = {
            turn.parent
            for turn in self.turns.values()
            if turn.parent in self.turns and self.turns[turn.parent].draw == turn.draw
        }
        return [turn for number, turn in sorted(self.turns.items()) if number not in continued]


def answer_key(place: Place, answer: str) -> str:
    """Digest of the conversation with its answer; empty for a completion."""
    return _digest(place.key, {"role": "assistant", "content": answer}) if place.key else ""


def _digest(before: str, message: Mapping[str, object]) -> str:
    """Chains messages: one more behind what came before. Space around an answer does not count."""
    if message.get("role") == "assistant":
        message = {**message, "content": str(message["content"]).strip()}
    text = json.dumps(message, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()


def _told(message: Mapping[str, object]) -> Message:
    """For people, who know two sides."""
    role = "assistant" if message["role"] == "assistant" else "user"
    return Message(role=role, content=str(message["content"]))


def shown(tokenizer: ChatTokenizer, token_ids: Sequence[int], *, hidden: Sequence[int] = ()) -> str:
    """An answer as its caller sees it: without special tokens, and without a stop token at its end."""
    ids = list(token_ids)
    if ids and ids[-1] in hidden:
        ids.pop()
    return tokenizer.decode(ids, skip_special_tokens=True)
