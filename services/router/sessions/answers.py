"""Responses in OpenAI's form, with what vLLM adds for token ids."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from pydantic import JsonValue

from services.router.sessions.bodies import ChatRequest, CompletionRequest
from services.router.sessions.talk import Call
from services.router.sessions.tree import Turn, shown
from shared.errors import RollArtError
from shared.events import FinishReason

Json = dict[str, JsonValue]
Request = ChatRequest | CompletionRequest


def completion(request: Request, call: Call, turn: Turn) -> Json:
    """A whole answer."""
    text = shown(call.tokenizer, turn.token_ids, hidden=call.hidden)
    choice: Json = {"index": 0, "finish_reason": _finish(turn), "logprobs": None}
    if isinstance(request, ChatRequest):
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    if request.logprobs not in (None, False):
        choice["logprobs"] = _logprobs(request, call, turn.token_ids, turn.logprobs)
    found = _frame(request, call, stream=False)
    if request.return_token_ids:
        choice["token_ids"] = list(turn.token_ids)
        found["prompt_token_ids"] = list(call.prompt_ids)
    return found | {"choices": [choice], "usage": _usage(call, turn)}


class Chunks:
    """A streamed answer, event by event."""

    def __init__(self, request: Request, call: Call) -> None:
        self._request = request
        self._call = call
        self._token_ids: list[int] = []
        self._text = ""

    @property
    def token_ids(self) -> list[int]:
        """Tokens told so far."""
        return self._token_ids

    def opening(self) -> list[str]:
        """What comes before the first token."""
        if isinstance(self._request, ChatRequest):
            return [self._event({"delta": {"role": "assistant", "content": ""}}, first=True)]
        return []

    def tokens(self, token_ids: Sequence[int], logprobs: Sequence[float], *, last: bool = False) -> list[str]:
        """New tokens. Text that ends within a character waits for the rest of it."""
        self._token_ids += token_ids
        text = shown(self._call.tokenizer, self._token_ids, hidden=self._call.hidden)
        if not last:
            text = text.rstrip("\ufffd")
        new = text[len(self._text) :] if text.startswith(self._text) else ""
        self._text += new
        if not token_ids and not new:
            return []
        chat = isinstance(self._request, ChatRequest)
        choice: Json = {}
        choice |= {"delta": {"content": new}} if chat else {"text": new}
        if self._request.logprobs not in (None, False):
            choice["logprobs"] = _logprobs(self._request, self._call, token_ids, logprobs)
        if self._request.return_token_ids:
            choice["token_ids"] = list(token_ids)
        return [self._event(choice, first=not chat and len(self._token_ids) == len(token_ids))]

    def closing(self, turn: Turn) -> list[str]:
        """The rest of the answer, why it ended, and what it took."""
        at = len(self._token_ids)
        found = self.tokens(turn.token_ids[at:], turn.logprobs[at:], last=True)
        chat = isinstance(self._request, ChatRequest)
        choice: Json = {"delta": {}} if chat else {"text": ""}
        found.append(self._event(choice | {"finish_reason": _finish(turn)}))
        options = self._request.stream_options
        if options is not None and options.include_usage:
            last = _frame(self._request, self._call, stream=True)
            last["choices"] = []
            last["usage"] = _usage(self._call, turn)
            found.append(_sse(last))
        return [*found, "data: [DONE]\n\n"]

    def _event(self, choice: Json, *, first: bool = False) -> str:
        frame = _frame(self._request, self._call, stream=True)
        if first and self._request.return_token_ids:
            frame["prompt_token_ids"] = list(self._call.prompt_ids)
        whole: Json = {"index": 0, "finish_reason": None, "logprobs": None}
        frame["choices"] = [whole | choice]
        return _sse(frame)


def failure(error: RollArtError) -> str:
    """An error in the midst of a stream."""
    return _sse(error.to_problem().model_dump(mode="json"))


def _sse(body: Json) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _frame(request: Request, call: Call, *, stream: bool) -> Json:
    chat = isinstance(request, ChatRequest)
    record = call.record
    kind = "chat.completion" if chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{record.session_id}-{record.attempt}-{call.call_id}",
        "object": f"{kind}.chunk" if chat and stream else kind,
        "created": int(time.time()),
        "model": record.policy,
    }


def _usage(call: Call, turn: Turn) -> Json:
    prompt, new = len(call.prompt_ids), len(turn.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": turn.cached_tokens},
    }


def _finish(turn: Turn) -> str:
    return "stop" if turn.finish_reason is FinishReason.STOP else "length"


def _logprobs(request: Request, call: Call, token_ids: Sequence[int], logprobs: Sequence[float]) -> JsonValue:
    """Of the sampled tokens alone."""
    texts = [call.tokenizer.decode([i]) for i in token_ids]
    if isinstance(request, ChatRequest):
        return {
            "content": [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(texts, logprobs, strict=True)
            ]
        }
    return {"tokens": [*texts], "token_logprobs": [*logprobs], "top_logprobs": None, "text_offset": []}
