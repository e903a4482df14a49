"""The environment's turn path with the wire in the test's hands: a bus that records, a state that holds one
policy, a tokenizer of letters. Used by test_episode.py, and by the tests of router and worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from services.environment.episode import EpisodePlayer
from services.environment.threads import DaemonPool
from shared.bus import Bus
from shared.events import (
    Event,
    FinishReason,
    PolicyPublished,
    RolloutRequested,
    Sampling,
    TurnFailed,
    TurnGenerated,
    TurnRequested,
)
from shared.policies import Policies
from shared.settings import EnvironmentSettings, KafkaSettings
from shared.state import State
from shared.store import FileStore
from shared.turns import TurnClient

LETTERS = [chr(code) for code in range(32, 127)] + ["\n"]
HE, LLO, HELLO, EOS = (len(LETTERS) + i for i in (1, 3, 4, 5))


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of letters that joins "hello" to one token, and of which "he" and "llo" are
    tokens too."""
    words = [*LETTERS, "ll", "he", "lo", "llo", "hello"]
    vocab = {word: number for number, word in enumerate(words)}
    merges = [("l", "l"), ("h", "e"), ("ll", "o"), ("he", "llo")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')


class WireState(State):
    """Redis with one policy in it."""

    def __init__(self) -> None:
        self.version = 3

    async def policy(self, name: str) -> tuple[PolicyPublished, str] | None:
        """The newest version."""
        record = PolicyPublished(
            policy=name, version=self.version, step=0, uri="", digest="", published_at=0.0
        )
        return (record, "model") if name == "toy" else None


class Wire(Bus):
    """Hands every turn to `answer` and what that returns to the client."""

    def __init__(self, answer: Callable[[TurnRequested], list[Event]]) -> None:
        self.settings = KafkaSettings()
        self.turns: list[TurnRequested] = []
        self.client: TurnClient | None = None
        self._answer = answer
        self.publish = self._publish  # type: ignore[assignment]

    def _publish(self, topic: str, turn: Event, **_: object) -> None:
        assert isinstance(turn, TurnRequested)
        # What a consumer would decode, so that nothing is shared with the asker.
        turn = TurnRequested.model_validate_json(turn.model_dump_json())
        self.turns.append(turn)
        assert self.client is not None
        self.client._on_replies(self._answer(turn))


async def until(condition: Callable[[], object], *, seconds: float = 20) -> None:
    """Return once it holds; the test fails where it never does."""
    limit = time.monotonic() + seconds
    while True:
        if condition():
            return
        assert time.monotonic() < limit, "waited in vain"
        await asyncio.sleep(0.002)


def generated(turn: TurnRequested, ids: list[int], **changes: object) -> TurnGenerated:
    """A reply to a turn."""
    fields: dict[str, object] = {
        **turn.model_dump(include={"run_id", "trajectory_id", "attempt", "turn", "try_number", "asker"}),
        "worker_id": "w1",
        "device_class": "bandwidth",
        "token_ids": ids,
        "logprobs": [-0.5] * len(ids),
        "versions": [(max(turn.min_version, 3), len(ids))],
        "finish_reason": FinishReason.STOP,
    }
    return TurnGenerated.model_validate(fields | changes)


def failed(turn: TurnRequested, code: str, *, retryable: bool) -> TurnFailed:
    """An error in reply to a turn."""
    fields = turn.model_dump(include={"run_id", "trajectory_id", "attempt", "turn", "try_number", "asker"})
    return TurnFailed.model_validate({**fields, "code": code, "message": "", "retryable": retryable})


def player_on(
    wire: Wire, folder: Path, *, state: WireState | None = None, threads: int = 1
) -> tuple[EpisodePlayer, Policies]:
    """The real player, turn client and policies on a wire; the policy's folder lies in `folder`."""
    write_tokenizer(folder / "model")
    state = state or WireState()
    client = TurnClient(wire, state, asker="me", try_deadline_s=10)
    client.partition = 0
    wire.client = client
    policies = Policies(state, FileStore(folder))
    pool = DaemonPool(threads)
    return EpisodePlayer(client, policies, pool, EnvironmentSettings()), policies


def rollout(environment: str, *, seconds: float = 30, **changes: object) -> RolloutRequested:
    """A request of one group's only member."""
    fields: dict[str, object] = {
        "run_id": "run",
        "trajectory_id": "run/g.0#0",
        "group_id": "run/g",
        "member": 0,
        "task": "odd",
        "environment": environment,
        "seed": 7,
        "policy": "toy",
        "deadline": time.time() + seconds,
    }
    return RolloutRequested.model_validate(fields | changes)


def turn_of(trajectory: str, **changes: object) -> TurnRequested:
    """A turn as a router or a worker gets it."""
    fields: dict[str, object] = {
        "run_id": "run",
        "trajectory_id": trajectory,
        "attempt": 0,
        "turn": 0,
        "task": "odd",
        "policy": "toy",
        "prompt_ids": [1, 2, 3],
        "sampling": Sampling(max_tokens=4),
        "context_window": 64,
        "deadline": time.time() + 60,
        "try_deadline": time.time() + 10,
        "asker": "me",
        "reply_partition": 0,
    }
    return TurnRequested.model_validate(fields | changes)
