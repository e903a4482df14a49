"""Reads a topic for people: every partition, no group, nothing acknowledged. Used by `rollart tail`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition
from pydantic import BaseModel, ConfigDict, JsonValue
from pydantic_core import from_json

from shared.bus import codec
from shared.errors import Invalid, Unavailable
from shared.settings import KafkaSettings
from shared.store import ObjectStore

_POLL_S = 0.2
_ANSWER_S = 10.0


class Tailed(BaseModel):
    """One message as it lies in the topic."""

    model_config = ConfigDict(frozen=True)
    topic: str
    partition: int
    offset: int
    time: float
    """When it was produced, since the epoch."""
    key: str
    headers: dict[str, str]
    event: JsonValue
    """The decoded event; the text where it is none of ours."""
    fault: str = ""
    """Why it could not be decoded."""


def tail(
    settings: KafkaSettings, topic: str, *, store: ObjectStore, from_start: bool, follow: bool = True
) -> Iterator[Tailed]:
    """Messages of a topic (without prefix) as they come; with `follow=False` up to its present end.

    Raises Invalid for a topic that does not exist, Unavailable when no broker answers.
    """
    name = settings.prefix + topic.removeprefix(settings.prefix)
    config = codec.common_settings(settings, "tail") | {
        "group.id": f"{settings.prefix}tail.{uuid.uuid4().hex}",
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
    }
    consumer = Consumer(config)
    try:
        left = _assign(consumer, settings, name, from_start=from_start)
        yield from _messages(consumer, store, settings.prefix, left, follow=follow)
    except KafkaException as error:
        raise Unavailable(f"no Kafka broker answers at {settings.bootstrap}: {error}") from error
    finally:
        consumer.close()


def _assign(consumer: Consumer, settings: KafkaSettings, name: str, *, from_start: bool) -> dict[int, int]:
    """Start reading; partition → its present end, of those that have something to read."""
    known = consumer.list_topics(timeout=_ANSWER_S).topics
    if name not in known or not known[name].partitions:
        prefix = settings.prefix
        ours = ", ".join(sorted(t.removeprefix(prefix) for t in known if t.startswith(prefix)))
        raise Invalid(f"TOPIC: no topic is named {name.removeprefix(prefix)!r}; known: {ours or 'none'}")
    left: dict[int, int] = {}
    starts = []
    for number in known[name].partitions:
        low, high = consumer.get_watermark_offsets(TopicPartition(name, number), timeout=_ANSWER_S)
        start = low if from_start else high
        starts.append(TopicPartition(name, number, start))
        if start < high:
            left[number] = high
    consumer.assign(starts)
    return left


def _messages(
    consumer: Consumer, store: ObjectStore, prefix: str, left: dict[int, int], *, follow: bool
) -> Iterator[Tailed]:
    quiet_since = time.monotonic()
    while follow or left:
        message = consumer.poll(_POLL_S)
        if message is None or message.error() is not None:
            if left and time.monotonic() - quiet_since > _ANSWER_S and not follow:
                raise Unavailable("the broker stopped answering before the end of the topic")
            continue
        quiet_since = time.monotonic()
        number = message.partition() or 0
        if (message.offset() or 0) + 1 >= left.get(number, 0):
            left.pop(number, None)
        yield _decode(message, store, prefix)


def _decode(message: Message, store: ObjectStore, prefix: str) -> Tailed:
    raw = dict(message.headers() or ())
    headers = {str(k): v if isinstance(v, bytes) else str(v or "").encode() for k, v in raw.items()}
    payload = message.value()
    value = payload if isinstance(payload, bytes) else None
    fault = ""
    event: JsonValue
    try:
        event = from_json(codec.decode(value, headers, store).model_dump_json())
    except codec.Undecodable as error:
        event, fault = (value or b"").decode("utf-8", "backslashreplace"), error.message
    key = message.key() or b""
    return Tailed(
        topic=(message.topic() or "").removeprefix(prefix),
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        time=message.timestamp()[1] / 1000,
        key=key.decode("utf-8", "backslashreplace") if isinstance(key, bytes) else key,
        headers={name: text.decode("utf-8", "backslashreplace") for name, text in headers.items()},
        event=event,
        fault=fault,
    )
