"""The bare pipeline: the same three messages between three processes, and nothing else.

asker → turns → router → generate → worker → replies → asker. One producer and one consumer each, pydantic
JSON at every hop, no headers, no acknowledgements, no health, no retries. It is what the turn path could
cost at best, and is measured beside it by `benchmarks.turn`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time

import uvloop
from confluent_kafka import Consumer, Producer, TopicPartition
from pydantic import BaseModel, ConfigDict

from benchmarks.turn_load import PROMPT, Level, measure, reply_logprobs, reply_tokens
from shared.topics import TopicPlan

PREFIX = os.environ.get("KAFKA__PREFIX", "rollart.") + "bare."
TOPICS = [TopicPlan("bare.turns", 8), TopicPlan("bare.generate", 8), TopicPlan("bare.replies", 1)]


class Turn(BaseModel):
    """What the asker sends."""

    model_config = ConfigDict(frozen=True)
    run: str
    trajectory: str
    turn: int
    try_number: int
    task: str
    prompt: list[int]
    temperature: float
    max_tokens: int
    deadline: float
    worker: str | None = None


class Generate(BaseModel):
    """What the router sends."""

    model_config = ConfigDict(frozen=True)
    turn: Turn
    worker: str


class Reply(BaseModel):
    """What the worker sends."""

    model_config = ConfigDict(frozen=True)
    trajectory: str
    turn: int
    try_number: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int]]
    finish: str
    cached: int


def _common() -> dict[str, str | int | bool]:
    return {"bootstrap.servers": os.environ["KAFKA__BOOTSTRAP"], "log_level": 3}


def _producer() -> Producer:
    return Producer(_common() | {"linger.ms": 0, "enable.idempotence": True, "acks": "all"})


def _consumer(group: str) -> Consumer:
    config = _common() | {
        "group.id": PREFIX + group,
        "group.protocol": "consumer",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    if wait := os.environ.get("KAFKA__FETCH_WAIT_MS"):
        config["fetch.wait.max.ms"] = int(wait)
    return Consumer(config)


def _route(value: bytes) -> bytes:
    turn = Turn.model_validate_json(value)
    return Generate.model_construct(turn=turn, worker="w0").model_dump_json().encode()


def _work(value: bytes) -> bytes:
    turn = Generate.model_validate_json(value).turn
    return (
        Reply(
            trajectory=turn.trajectory,
            turn=turn.turn,
            try_number=turn.try_number,
            tokens=reply_tokens(),
            logprobs=reply_logprobs(),
            versions=[(0, len(reply_tokens()))],
            finish="length",
            cached=0,
        )
        .model_dump_json()
        .encode()
    )


def stage(source: str, target: str) -> None:
    """Router or worker: consume, decode, encode, produce, until killed."""
    transform = _route if source == "turns" else _work
    producer, consumer = _producer(), _consumer(source)
    consumer.subscribe([PREFIX + source])
    print("ready", flush=True)
    while True:
        first = consumer.poll(0.2)
        if first is None:
            continue
        for message in [first, *consumer.consume(127, 0)]:
            if message.error() is None:
                producer.produce(PREFIX + target, transform(message.value() or b""), message.key())
        producer.poll(0)


async def ask(levels: list[Level]) -> None:
    """The asker: keeps so many turns in flight; prints one JSON line per level."""
    producer = _producer()
    loop = asyncio.get_running_loop()
    pending: dict[str, asyncio.Future[Reply]] = {}
    consumer = _consumer("asker")
    _, high = consumer.get_watermark_offsets(TopicPartition(PREFIX + "replies", 0), timeout=10)
    consumer.assign([TopicPartition(PREFIX + "replies", 0, high)])

    def resolve(replies: list[Reply]) -> None:
        for reply in replies:
            future = pending.pop(reply.trajectory, None)
            if future is not None:
                future.set_result(reply)

    def read() -> None:
        while True:
            first = consumer.poll(0.2)
            if first is None:
                continue
            messages = [first, *consumer.consume(127, 0)]
            replies = [Reply.model_validate_json(m.value() or b"") for m in messages if m.error() is None]
            loop.call_soon_threadsafe(resolve, replies)

    threading.Thread(target=read, daemon=True).start()

    async def turn(trajectory: str) -> None:
        future = pending[trajectory] = loop.create_future()
        request = Turn(
            run="bench",
            trajectory=trajectory,
            turn=0,
            try_number=0,
            task="bench",
            prompt=PROMPT,
            temperature=1.0,
            max_tokens=20,
            deadline=time.time() + 60,
        )
        producer.produce(PREFIX + "turns", request.model_dump_json().encode(), trajectory)
        producer.poll(0)
        await future

    for level in levels:
        print(json.dumps(await measure(turn, level)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(ask([Level(*item) for item in json.loads(sys.argv[2])]))
    else:
        stage(sys.argv[1], sys.argv[2])
