"""The engine loop: what becomes of a turn in a worker, and when the worker itself must end."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import pytest
from turn_wire import turn_of

from services.generation.engines.instant import InstantEngine
from services.generation.hosted import UNHEALTHY_AFTER, Assigned
from services.generation.protocol import EngineResult, WeightLoad, load_weights
from services.generation.worker import Worker
from shared.bus import Delivery, Publisher
from shared.errors import Internal, Invalid, NotFound, WeightsInvalid
from shared.events import (
    DecodeRequested,
    DecodeTarget,
    Event,
    FinishReason,
    GenerateRequested,
    Prefilled,
    PrefillRequested,
    Role,
    TurnFailed,
    TurnGenerated,
    TurnProgressed,
    TurnRequested,
)
from shared.weights import RawTensor

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
        self.peeked: Callable[[int], list[int]] = lambda start: []
        self.closed = False

    def step(self) -> list[EngineResult]:
        self.entered.set()
        self.free.wait(30)
        return [] if self.idle else [self.spoil(result) for result in super().step()]

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return super().abort(request_id)

    def peek(self, request_id: str, start: int) -> tuple[list[int], list[float]]:
        tokens = self.peeked(start)
        return tokens, [-1.0] * len(tokens)

    def close(self) -> None:
        self.closed = True

    def begin_load(self, version: int) -> WeightLoad:
        return _Update(super().begin_load(version), refused=version in self.refused)


@dataclasses.dataclass
class _Update:
    """Takes any weights; refuses at the last moment where it is told to."""

    inner: WeightLoad
    refused: bool

    def add(self, tensors: Mapping[str, RawTensor]) -> None:
        self.inner.add(tensors)

    def check(self) -> None:
        self.inner.check()

    def swap(self) -> None:
        if self.refused:
            raise WeightsInvalid("no")
        self.inner.swap()


class Wire:
    """The worker's two ends: deliveries go in, replies come out; each acknowledgement is recorded."""

    def __init__(self, role: Role = "both") -> None:
        self.replies: list[TurnGenerated | TurnFailed] = []
        self.progress: list[TurnProgressed] = []
        self.handed_on: list[tuple[str, int, DecodeRequested]] = []
        self.partitions: list[int] = []
        self.acked: list[TurnRequested] = []
        self.wanted: list[str] = []
        self.engine = Engine()
        self.failure: list[BaseException] = []
        self.worker = Worker(
            cast(Publisher, self),
            worker_id="w1",
            role=role,
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
        self,
        topic: str,
        event: Event,
        *,
        partition: int,
        on_delivered: Callable[[], None] = lambda: None,
        **_: object,
    ) -> None:
        # What the other side decodes.
        event = type(event).model_validate_json(event.model_dump_json())
        if isinstance(event, DecodeRequested):
            self.handed_on.append((topic, partition, event))
        elif isinstance(event, TurnProgressed):
            self.progress.append(event)
        else:
            assert isinstance(event, TurnGenerated | TurnFailed)
            self.replies.append(event)
            self.partitions.append(partition)
        on_delivered()

    def send(self, *turns: TurnRequested) -> None:
        requests = [
            GenerateRequested(turn=turn, worker_id="another", device_class="another", assigned_at=time.time())
            for turn in turns
        ]
        self.assign(*requests)

    def prefill(self, *turns: TurnRequested) -> None:
        target = DecodeTarget(worker_id="d1", device_class="bandwidth", partition=7)
        requests = [
            PrefillRequested(
                turn=turn, worker_id="w1", device_class="compute", decode=target, assigned_at=time.time()
            )
            for turn in turns
        ]
        self.assign(*requests)

    def assign(self, *requests: Assigned) -> None:
        deliveries = [
            _InTest(request, lambda turn=request.turn: self.acked.append(turn)) for request in requests
        ]
        self.worker.accept(cast("list[Delivery]", deliveries))

    def swap(self, reference: str, version: int, done: Callable[[WeightsInvalid | None], None]) -> None:
        update = self.worker.begin_load(reference, version)
        assert update is not None
        self.worker.swap(reference, update, version=version, done=done)

    def until(self, condition: Callable[[], object]) -> None:
        limit = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < limit, "waited in vain"
            time.sleep(0.002)

    def settled(self) -> None:
        """All that was posted before is handled."""
        done = threading.Event()
        self.worker.after_commands(done.set)
        assert done.wait(20)


@dataclasses.dataclass
class _InTest:
    event: Assigned
    ack: Callable[[], None]
    traceparent: str = ""


@contextlib.contextmanager
def running(role: Role) -> Iterator[Wire]:
    made = Wire(role)
    load_weights(made.engine, {}, version=3)
    made.worker.host("toy", made.engine)
    made.thread.start()
    yield made
    made.engine.free.set()
    made.worker.stop()
    made.thread.join(20)
    assert not made.thread.is_alive()


@pytest.fixture
def wire() -> Iterator[Wire]:
    with running("both") as made:
        yield made


@pytest.fixture
def prefill() -> Iterator[Wire]:
    with running("prefill") as made:
        yield made


@pytest.fixture
def decode() -> Iterator[Wire]:
    with running("decode") as made:
        yield made


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
    wire.swap("toy", 4, lambda _: None)
    wire.until(lambda: wire.replies)
    assert [reply.versions for reply in wire.replies if isinstance(reply, TurnGenerated)] == [[(4, 4)]]


def test_a_failed_load_leaves_the_old_version_live_and_labelled(wire: Wire) -> None:
    wire.engine.refused = {4}
    heard: list[WeightsInvalid | None] = []
    wire.swap("toy", 4, heard.append)
    wire.send(turn_of("t"))
    wire.until(lambda: wire.replies)
    assert isinstance(heard[0], WeightsInvalid)
    assert wire.worker.versions() == {"toy": 3}
    (reply,) = wire.replies
    assert isinstance(reply, TurnGenerated)
    assert reply.versions == [(3, 4)]


def test_an_older_version_is_never_loaded(wire: Wire) -> None:
    heard: list[object] = []
    wire.swap("toy", 2, heard.append)
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


def handed_over(turn: TurnRequested, *, version: int = 3) -> DecodeRequested:
    prefilled = Prefilled(
        worker_id="p1",
        device_class="compute",
        token_ids=[1],
        logprobs=[-0.5],
        versions=[(version, 1)],
        version=version,
        cached_tokens=2,
        queued_s=1.0,
        prefill_s=2.0,
        kv_transfer_params={"remote_request_id": "x"},
    )
    return DecodeRequested(
        turn=turn, worker_id="w1", device_class="bandwidth", prefilled=prefilled, assigned_at=time.time()
    )


def test_a_prefill_worker_hands_the_turn_on_where_the_router_said_and_then_acknowledges(
    prefill: Wire,
) -> None:
    turn = turn_of("t")
    prefill.prefill(turn)
    prefill.until(lambda: prefill.acked)
    ((topic, partition, request),) = prefill.handed_on
    assert (topic, partition, request.worker_id) == ("decode.bandwidth", 7, "d1")
    assert (request.turn, request.prefilled.worker_id, request.prefilled.version) == (turn, "w1", 3)
    assert len(request.prefilled.token_ids) == 1
    assert prefill.replies == []


def test_a_prefill_worker_answers_itself_where_the_first_token_is_the_last(prefill: Wire) -> None:
    one = turn_of("one", sampling={"max_tokens": 1})
    prefill.prefill(one, turn_of("full", prompt_ids=[1] * 64), turn_of("bad", prompt_ids=[100]))
    prefill.until(lambda: len(prefill.acked) == 3)
    kinds = {reply.trajectory_id: type(reply) for reply in prefill.replies}
    assert kinds == {"one": TurnGenerated, "full": TurnGenerated, "bad": TurnFailed}
    assert prefill.handed_on == []


def test_a_decode_worker_answers_with_both_workers_times_and_says_whose_kv_it_used(decode: Wire) -> None:
    decode.assign(handed_over(turn_of("t", prompt_ids=[1, 2, 3])))
    decode.until(lambda: decode.acked)
    (reply,) = decode.replies
    assert isinstance(reply, TurnGenerated)
    assert reply.handover is not None
    assert (reply.handover.prefill_worker, reply.handover.transferred_tokens) == ("p1", 3)
    assert (reply.cached_tokens, reply.timings.prefill_s) == (3, 2.0)
    assert reply.timings.queued_s >= 1.0
    profile = decode.worker.profiles.snapshot()[reply_task(decode)]
    assert (profile.prefills, profile.decodes, profile.generated_tokens) == (0, 1, 4)


def reply_task(wire: Wire) -> str:
    return wire.acked[0].task


def test_kv_of_a_newer_version_waits_until_the_decode_worker_has_it(decode: Wire) -> None:
    decode.assign(handed_over(turn_of("t"), version=4))
    decode.settled()
    assert (decode.replies, decode.wanted) == ([], ["toy"])
    decode.swap("toy", 4, lambda _: None)
    decode.until(lambda: decode.replies)


def test_a_recomputed_prompt_is_counted_by_its_reason(decode: Wire) -> None:
    decode.engine.spoil = lambda r: dataclasses.replace(
        r, recomputed="late", transferred_tokens=0, cached_tokens=0
    )
    decode.assign(handed_over(turn_of("t")))
    decode.until(lambda: decode.acked)
    (reply,) = decode.replies
    assert isinstance(reply, TurnGenerated)
    assert reply.handover is not None
    assert reply.handover.recomputed == "late"
    assert decode.worker.recomputed == {"late": 1}


@pytest.mark.parametrize("by", ["run", "trajectory", "try", "deadline"])
def test_kv_of_a_turn_that_is_given_up_after_its_hand_over_is_freed(prefill: Wire, by: str) -> None:
    seconds = 0.2 if by == "deadline" else 60
    prefill.prefill(turn_of("t", try_deadline=time.time() + seconds))
    prefill.until(lambda: prefill.handed_on)
    assert prefill.engine.aborted == []
    match by:
        case "run":
            prefill.worker.abort_runs(frozenset({"run"}))
        case "trajectory":
            prefill.worker.abort_attempts({"t/0": time.time()})
        case "try":
            prefill.prefill(turn_of("t", try_number=1))
        case _:
            pass
    prefill.until(lambda: prefill.engine.aborted)
    assert prefill.engine.aborted == ["t/0/0/0"]


def test_an_aborted_attempt_drops_what_was_assigned_before_and_nothing_later(wire: Wire) -> None:
    wire.engine.idle = True
    wire.send(turn_of("t"), turn_of("other"))
    wire.settled()
    aborted_at = time.time()
    wire.worker.abort_attempts({"t/0": aborted_at})
    wire.until(lambda: len(wire.acked) == 1)
    wire.send(turn_of("t"))
    wire.worker.abort_attempts({"t/0": aborted_at})
    wire.settled()
    wire.engine.idle = False
    wire.until(lambda: len(wire.replies) == 2)
    assert wire.engine.aborted == ["t/0/0/0"]
    assert {reply.trajectory_id for reply in wire.replies} == {"t", "other"}


def test_a_streamed_turn_tells_its_tokens_as_they_come_and_then_all_of_them(wire: Wire) -> None:
    sampled: list[int] = []
    wire.engine.idle = True
    wire.engine.peeked = lambda start: sampled[start:]
    wire.send(turn_of("t", stream=True), turn_of("quiet"))
    for token in (5, 6, 7):
        sampled.append(token)
        wire.until(lambda token=token: [t for p in wire.progress for t in p.token_ids][-1:] == [token])
    wire.engine.idle = False
    wire.until(lambda: len(wire.replies) == 2)
    assert [(p.start, p.token_ids) for p in wire.progress] == [(0, [5]), (1, [6]), (2, [7])]
    assert {p.trajectory_id for p in wire.progress} == {"t"}


def test_an_engine_is_closed_when_its_policy_leaves_and_when_the_worker_ends(wire: Wire) -> None:
    second, third = Engine(), Engine()
    for name, engine in (("b", second), ("c", third)):
        wire.worker.host(name, engine)
    wire.settled()
    assert [e.closed for e in (wire.engine, second, third)] == [True, False, False]
    wire.worker.stop()
    wire.thread.join(20)
    assert (second.closed, third.closed) == (True, True)
