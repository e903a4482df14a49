"""Events as Kafka messages: headers, claim checks, decoding. Used by the other modules of the bus only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, ValidationError

from shared import events
from shared.errors import Invalid, NotFound
from shared.events import Event
from shared.settings import KafkaSettings
from shared.store import ObjectStore

SCHEMA = "1"
Headers = list[tuple[str, bytes]]

EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        events.RolloutRequested, events.TurnRequested, events.GenerateRequested, events.TurnGenerated,
        events.TurnFailed, events.TrajectoryCompleted, events.TrajectoryScored, events.PolicyPublished,
    )
}  # fmt: skip
"""Every event that may travel, by its name in the `event` header."""

_NAME = {kind: f"{name}/{SCHEMA}".encode() for name, kind in EVENTS.items()}
_KIND = {header: kind for kind, header in _NAME.items()}


class Claim(BaseModel):
    """What a message carries in place of a payload that is too large for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    key: str
    sha256: str
    size: int


class Undecodable(Invalid):
    """A message that is not one of our events; `reason` is the dead-letter reason."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def common_settings(settings: KafkaSettings, client_id: str) -> dict[str, str | int | bool]:
    """What every client of ours sets."""
    return {"bootstrap.servers": settings.bootstrap, "client.id": client_id, "log_level": 3}


def encode(event: Event, *, run_id: str, traceparent: str, purpose: str) -> tuple[bytes, Headers]:
    """Payload and headers of an event."""
    headers: Headers = [("event", _NAME[type(event)]), ("run", run_id.encode())]
    if purpose:
        headers.append(("purpose", purpose.encode()))
    if traceparent:
        headers.append(("traceparent", traceparent.encode()))
    return event.model_dump_json().encode(), headers


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
        raise Undecodable("unknown_event", f"header event={name!r} is none of ours")
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


def _redeem(store: ObjectStore, value: bytes) -> bytes:
    claim = Claim.model_validate_json(value)
    try:
        payload = store.get(claim.key)
    except NotFound as error:
        raise Undecodable("claim_missing", error.message) from error
    if hashlib.sha256(payload).hexdigest() != claim.sha256:
        raise Undecodable("claim_corrupt", f"{claim.key} is not what was checked in")
    return payload
