"""Events as Kafka messages: headers, claim checks, decoding. Used by the other modules of the bus only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticSerializationError

from shared import events
from shared.errors import Invalid, NotFound
from shared.events import Event
from shared.settings import KafkaSettings
from shared.store import ObjectStore

SCHEMA = "1"
FRAMING_BYTES = 16_384
"""Headers and key on top of the largest inline payload."""
Headers = list[tuple[str, bytes]]

EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        events.RolloutRequested, events.TurnRequested, events.GenerateRequested, events.PrefillRequested,
        events.DecodeRequested, events.TurnGenerated, events.TurnProgressed, events.TurnFailed,
        events.TrajectoryCompleted, events.TrajectoryScored, events.PolicyPublished,
    )
}  # fmt: skip
"""Every event that may travel, by its name in the `event` header."""

_NAME = {kind: f"{name}/{SCHEMA}".encode() for name, kind in EVENTS.items()}
_KIND = {header: kind for kind, header in _NAME.items()}


class Claim(BaseModel):
    """What a message carries in place of a payload that is too large for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    key: str = Field(pattern=r"^payloads/[0-9a-f]{2}/[0-9a-f]+$")
    sha256: str
    size: int


class Undecodable(Invalid):
    """A message that is not one of our events; `reason` is the dead-letter reason."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def common_settings(settings: KafkaSettings, client_id: str) -> dict[str, str | int | bool]:
    """What every client of ours sets."""
    return {
        "bootstrap.servers": settings.bootstrap,
        "client.id": client_id,
        "log_level": 3,
        # A broker that comes back is noticed at once, not after the default's ten seconds.
        "reconnect.backoff.max.ms": 1000,
    }


def fetch_bytes(settings: KafkaSettings) -> int:
    """Of one fetch from one partition: at least the largest message of ours."""
    return max(1_048_576, settings.inline_limit_bytes * 2)


def encode(event: Event, *, run_id: str, traceparent: str, purpose: str) -> tuple[bytes, Headers]:
    """Payload and headers of an event. Raises Invalid for text that UTF-8 cannot hold."""
    headers: Headers = [("event", _NAME[type(event)]), ("run", run_id.encode())]
    if purpose:
        headers.append(("purpose", purpose.encode()))
    if traceparent:
        headers.append(("traceparent", traceparent.encode()))
    try:
        return bytes(event.__pydantic_serializer__.to_json(event)), headers
    except (PydanticSerializationError, UnicodeEncodeError) as error:
        raise Invalid(f"{type(event).__name__} cannot be encoded: {error}") from error


def check_in(store: ObjectStore, payload: bytes) -> bytes:
    """Move a payload to the store and return the claim for it."""
    digest = hashlib.sha256(payload).hexdigest()
    key = f"payloads/{digest[:2]}/{digest}"
    store.put(key, payload)
    return Claim(key=key, sha256=digest, size=len(payload)).model_dump_json().encode()


def decode(value: bytes | None, headers: Mapping[str, bytes], store: ObjectStore) -> Event:
    """The event in a message. Raises Undecodable."""
    name = headers.get("event", b"")
    kind = _KIND.get(name)
    if kind is None:
        known = (name or b"").rpartition(b"/")[0].decode("ascii", "replace") in EVENTS
        reason = "unknown_version" if known else "unknown_event"
        raise Undecodable(reason, f"header event={name!r} is none of ours")
    if value is None:
        raise Undecodable("empty", "the message has no payload")
    try:
        if "claim" in headers:
            value = _redeem(store, value)
        return kind.model_validate_json(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        reason = "not_json" if first["type"] == "json_invalid" else "wrong_schema"
        path = ".".join(str(part) for part in first["loc"])
        raise Undecodable(reason, f"{kind.__name__} {path}: {first['msg']}") from error


def dead_letter(
    value: bytes | None,
    headers: Headers,
    *,
    origin: str,
    reason: str,
    error: str,
    store: ObjectStore,
    settings: KafkaSettings,
) -> tuple[bytes | None, Headers]:
    """A message as it goes to `deadletters`: its bytes and headers, with where it lay and what is wrong.

    Whatever it is, the broker must take it: a payload too large for us goes to the store, headers beyond
    what the framing allows are left out.
    """
    kept: Headers = []
    room = FRAMING_BYTES // 2
    for name, text in headers:
        room -= len(name.encode()) + len(text or b"")
        if room >= 0:
            kept.append((name, text))
    if value is not None and len(value) > settings.inline_limit_bytes:
        value = check_in(store, value)
        kept.append(("claim", b"1"))
    kept += [("origin", origin.encode()), ("reason", reason.encode())]
    kept.append(("error", error.encode("utf-8", "backslashreplace")[:4096]))
    return value, kept


def _redeem(store: ObjectStore, value: bytes) -> bytes:
    claim = Claim.model_validate_json(value)
    try:
        payload = store.get(claim.key)
    except NotFound as error:
        raise Undecodable("claim_missing", error.message) from error
    if hashlib.sha256(payload).hexdigest() != claim.sha256:
        raise Undecodable("claim_corrupt", f"{claim.key} is not what was checked in")
    return payload
