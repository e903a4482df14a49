"""The engine loop: what becomes of a turn in a worker, and when the worker itself must end."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from turn_wire import turn_of

from services.generation.engines.instant import InstantEngine
from services.generation.hosted import UNHEALTHY_AFTER
from services.generation.protocol import EngineResult
from services.generation.worker import Worker
from shared.bus import Delivery, Publisher
from shared.errors import Internal, Invalid, NotFound, WeightsInvalid
from shared.events import Event, FinishReason, GenerateRequested, TurnFailed, TurnGenerated, TurnRequested

NAN = float("nan")


class Engine(InstantEngine):
    """Answers at once, unless it is held; `spoil` changes its results."""

    def __init__(self) -> None:
        super().__init__(window=64, vocab_size=100, max_batch=256)
        self.spoil: Callable[[EngineResult], EngineResult] = lambda result: result
        self.free = threading.Event()
        self.free.set()
        self.entered = threading.Event()
        self.idle = False
        self.aborted: list[str] = []
        self.refused: set[int] = set()

    def step(self) -> list[EngineResult]:
        self.entered.set()
        self.free.wait(30)
        return [] if self.idle else [self.spoil(result) for result in super().step()]

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return super().abort(request_id)

    def load(self, weights: object, *, version: int) -> None:
        if version in self.refused:
            raise WeightsInvalid("no")
        super().load({}, version=version)


class Wire:
    """The worker's two ends: deliveries go in, replies come out; each acknowledgement is recorded."""

    def __init__(self) -> None:
        self.replies: list[TurnGenerated | TurnFailed] = []
        self.partitions: list[int] = []
        self.acked: list[TurnRequested] = []
        self.wanted: list[str] = []
        self.engine = Engine()
        self.failure: list[BaseException] = []
        self.worker = Worker(
            cast(Publisher, self),
            worker_id="w1",
            device_class="bandwidth",
            max_policies=2,
            want=self.wanted.append,
        )
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:
            self.failure.append(error)

    def publish(
        self, topic: str, event: Event, *, partition: int, on_delivered: Callable[[], None], **_: object
    ) -> None:
        assert isinstance(event, TurnGenerated | TurnFailed)
        # What the asker decodes.
        self.replies.append(type(event).model_validate_json(event.model_dump_json()))
        self.partitions.append(partition)
        on_delivered()

    def send(self, *turns: TurnRequested) -> None:
        deliveries = []
        for turn in turns:
            request = GenerateRequested(
                turn=turn, worker_id="another", device_class="another", assigned_at=time.time()
            )
            deliveries.append(_InTest(request, lambda turn=turn: self.acked.append(turn)))
        self.worker.accept(cast("list[Delivery]", deliveries))

    def until(self, condition: Callable[[], object]) -> None:
        limit = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < limit, "waited in vain"
            time.sleep(0.002)

    def settled(self) -> None:
        """All that was posted before is handled."""
        done = threading.Event()
        self.worker.load("", {}, version=0, done=lambda _: done.set())
        assert done.wait(20)


@dataclasses.dataclass
class _InTest:
    event: GenerateRequested
    ack: Callable[[], None]
    traceparent: str = ""


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    made.engine.load({}, version=3)
    made.worker.host("toy", made.engine)
    made.thread.start()
    yield made
    made.engine.free.set()
    made.worker.stop()
    made.thread.join(20)
    assert not made.thread.is_alive()


def test_a_turn_is_answered_to_its_asker_under_the_workers_own_name_and_then_acknowledged(wire: Wire) -> None:
    turn = turn_of("t", reply_partition=5)
    wire.send(turn)
    wire.until(lambda: wire.acked)
    (reply,) = wire.replies
    assert isinstance(reply, TurnGenerated)
    assert (reply.worker_id, reply.device_class, wire.partitions) == ("w1", "bandwidth", [5])
    assert reply.versions == [(3, 4)]
    assert wire.acked == [turn]


def test_a_turn_that_wants_a_newer_version_waits_for_it(wire: Wire) -> None:
    wire.send(turn_of("t", min_version=4))
    wire.settled()
    assert wire.replies == []
    assert wire.wanted == ["toy"]
    assert wire.worker.load_numbers()[1] == 1
    wire.worker.load("toy", {}, version=4, done=lambda _: None)
    wire.until(lambda: wire.replies)
    assert [reply.versions for reply in wire.replies if isinstance(reply, TurnGenerated)] == [[(4, 4)]]


def test_a_failed_load_leaves_the_old_version_live_and_labelled(wire: Wire) -> None:
    wire.engine.refused = {4}
    heard: list[WeightsInvalid | None] = []
    wire.worker.load("toy", {}, version=4, done=heard.append)
    wire.send(turn_of("t"))
    wire.until(lambda: wire.replies)
    assert isinstance(heard[0], WeightsInvalid)
    assert wire.worker.versions() == {"toy": 3}
    (reply,) = wire.replies
    assert isinstance(reply, TurnGenerated)
    assert reply.versions == [(3, 4)]


def test_an_older_version_is_never_loaded(wire: Wire) -> None:
    heard: list[object] = []
    wire.worker.load("toy", {}, version=2, done=heard.append)
    wire.until(lambda: heard)
    assert wire.worker.versions() == {"toy": 3}


def test_the_same_try_delivered_twice_is_answered_once_and_both_are_acknowledged(wire: Wire) -> None:
    wire.engine.free.clear()
    turn = turn_of("t")
    wire.send(turn, turn)
    wire.engine.free.set()
    wire.until(lambda: len(wire.acked) == 2)
    assert len(wire.replies) == 1


def test_a_later_try_ends_the_earlier_one_and_touches_no_other_turn(wire: Wire) -> None:
    wire.engine.idle = True
    other = turn_of("other")
    wire.send(turn_of("t"), other)
    wire.settled()
    wire.send(turn_of("t", try_number=1))
    wire.settled()
    assert wire.engine.aborted == ["t/0/0/0"]
    wire.engine.idle = False
    wire.until(lambda: len(wire.replies) == 2)
    assert sorted((r.trajectory_id, r.try_number) for r in wire.replies) == [("other", 0), ("t", 1)]
    wire.until(lambda: len(wire.acked) == 3)


def test_an_aborted_run_is_dropped_from_engine_and_queues_without_a_reply(wire: Wire) -> None:
    wire.engine.idle = True
    wire.send(turn_of("live"), turn_of("held", min_version=9), turn_of("homeless", policy="unknown"))
    wire.send(turn_of("kept", run_id="kept"))
    wire.settled()
    assert wire.worker.run_ids() == {"run", "kept"}
    wire.worker.abort_runs(frozenset({"run"}))
    wire.until(lambda: len(wire.acked) == 3)
    assert wire.engine.aborted == ["live/0/0/0"]
    wire.engine.idle = False
    wire.until(lambda: wire.replies)
    assert [reply.trajectory_id for reply in wire.replies] == ["kept"]
    assert wire.worker.run_ids() == set()


def test_a_turn_past_its_try_deadline_leaves_the_engine_and_is_acknowledged(wire: Wire) -> None:
    wire.engine.idle = True
    wire.send(turn_of("late", try_deadline=time.time() - 1), turn_of("soon", try_deadline=time.time() + 0.1))
    wire.until(lambda: len(wire.acked) == 2)
    assert wire.engine.aborted == ["soon/0/0/0"]
    assert wire.replies == []


def test_a_prompt_that_fills_a_window_is_the_end_of_the_context_and_no_error(wire: Wire) -> None:
    wire.send(turn_of("rollout", prompt_ids=[1] * 20, context_window=20))
    wire.send(turn_of("model", prompt_ids=[1] * 64, context_window=1000))
    wire.send(turn_of("clipped", prompt_ids=[1] * 19, context_window=20))
    wire.until(lambda: len(wire.replies) == 3)
    assert {r.trajectory_id: len(r.token_ids) for r in wire.replies if isinstance(r, TurnGenerated)} == {
        "rollout": 0, "model": 0, "clipped": 1,
    }  # fmt: skip
    reasons = {r.finish_reason for r in wire.replies if isinstance(r, TurnGenerated)}
    assert reasons == {FinishReason.CONTEXT}
    assert wire.worker.failures == {}


def test_a_refused_request_costs_only_itself(wire: Wire) -> None:
    wire.send(turn_of("bad", prompt_ids=[100]), turn_of("empty", prompt_ids=[]), turn_of("good"))
    wire.until(lambda: len(wire.replies) == 3)
    codes = {r.trajectory_id: r.code for r in wire.replies if isinstance(r, TurnFailed)}
    assert codes == {"bad": Invalid.code, "empty": Invalid.code}
    assert wire.worker.failures == {Invalid.code: 2}


def test_turns_of_a_policy_that_cannot_be_had_are_refused(wire: Wire) -> None:
    wire.send(turn_of("t", policy="unknown"))
    wire.settled()
    assert wire.wanted == ["unknown"]
    wire.worker.refuse("unknown", NotFound("no policy"))
    wire.until(lambda: wire.acked)
    assert [(r.code, r.retryable) for r in wire.replies if isinstance(r, TurnFailed)] == [
        ("not_found", False)
    ]


SPOILT: dict[str, dict[str, object]] = {
    "nan": {"logprobs": [-1.0, NAN, -1.0, -1.0]},
    "minus_infinity": {"logprobs": [-1.0, float("-inf"), -1.0, -1.0]},
    "null": {"logprobs": [-1.0, None, -1.0, -1.0]},
    "short": {"logprobs": [-1.0]},
    "versions": {"versions": [(3, 1)]},
    "nothing": {"token_ids": [], "logprobs": [], "versions": []},
    "error": {"error": Internal("logits are not finite")},
}


@pytest.mark.parametrize("fault", SPOILT)
def test_a_faulty_result_fails_its_turn_by_a_counted_reason_and_no_other(wire: Wire, fault: str) -> None:
    def spoil(result: EngineResult) -> EngineResult:
        changes = SPOILT[fault] if result.request_id.startswith("bad") else {}
        return dataclasses.replace(result, **changes)

    wire.engine.spoil = spoil
    wire.send(turn_of("bad"), turn_of("good"))
    wire.until(lambda: len(wire.acked) == 2)
    kinds = {reply.trajectory_id: type(reply) for reply in wire.replies}
    assert kinds == {"bad": TurnFailed, "good": TurnGenerated}
    assert wire.worker.failures == {"internal": 1}


def test_single_faults_between_good_results_never_end_the_worker(wire: Wire) -> None:
    def spoil(result: EngineResult) -> EngineResult:
        bad = result.request_id.startswith("bad")
        return dataclasses.replace(result, error=Internal("no")) if bad else result

    wire.engine.spoil = spoil
    for i in range(UNHEALTHY_AFTER * 2):
        wire.send(turn_of(f"bad{i}"))
        wire.send(turn_of(f"good{i}"))
    wire.until(lambda: len(wire.replies) == UNHEALTHY_AFTER * 4)
    assert wire.failure == []


def test_an_engine_that_gives_nothing_but_nan_ends_its_worker_with_the_rest_unacknowledged(
    wire: Wire,
) -> None:
    wire.engine.spoil = lambda r: dataclasses.replace(r, logprobs=[NAN] * len(r.token_ids))
    wire.send(*(turn_of(f"t{i}") for i in range(UNHEALTHY_AFTER + 5)))
    wire.until(lambda: wire.failure)
    assert isinstance(wire.failure[0], Internal)
    assert "unhealthy" in str(wire.failure[0])
    assert len(wire.replies) == len(wire.acked) == UNHEALTHY_AFTER


def test_a_worker_whose_engine_hangs_reports_what_it_was_given_since(wire: Wire) -> None:
    wire.engine.free.clear()
    wire.send(turn_of("first"))
    assert wire.engine.entered.wait(20)
    wire.send(*(turn_of(str(i)) for i in range(7)))
    assert wire.worker.load_numbers()[1] == 8
    wire.engine.free.set()
    wire.until(lambda: len(wire.replies) == 8)
    wire.settled()
    assert wire.worker.load_numbers() == (0, 0, 0.0)
