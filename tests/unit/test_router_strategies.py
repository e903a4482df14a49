"""Which worker gets a turn: sticky, least loaded, and never one that lets turns lie."""

from __future__ import annotations

import pytest
from turn_wire import turn_of

from services.router.standing import Standing
from services.router.strategies import Candidate, LeastLoaded, StickyLeastLoaded
from shared.state import WorkerRecord


def worker(name: str, *, running: int = 0, waiting: int = 0) -> Candidate:
    return Candidate(
        WorkerRecord(
            worker_id=name,
            role="both",
            device_class="bandwidth",
            gpu_model="",
            url="",
            partitions=[0],
            running=running,
            waiting=waiting,
            kv_usage=0.0,
            policies={},
            updated_at=0.0,
        )
    )


def test_the_least_loaded_counts_what_its_report_cannot_know_yet() -> None:
    busy, queued, fresh = worker("a", running=2), worker("b", waiting=1), worker("c")
    strategy = LeastLoaded()
    assert strategy.choose(turn_of("t"), [busy, queued, fresh]) is fresh
    fresh.unreported.extend([1.0, 2.0])
    assert strategy.choose(turn_of("t"), [busy, queued, fresh]) is queued


def test_ties_are_the_same_worker_each_time() -> None:
    some = [worker("b"), worker("a"), worker("c")]
    assert {LeastLoaded().choose(turn_of(str(i)), some).worker.worker_id for i in range(9)} == {"a"}


def test_a_trajectory_stays_with_the_worker_that_holds_its_kv_while_that_is_a_candidate() -> None:
    busy, idle = worker("a", running=9), worker("b")
    strategy = StickyLeastLoaded()
    assert strategy.choose(turn_of("t", last_worker="a"), [busy, idle]) is busy
    assert strategy.choose(turn_of("t", last_worker="gone"), [busy, idle]) is idle
    assert strategy.choose(turn_of("t"), [busy, idle]) is idle


def test_a_try_that_passed_its_deadline_ejects_a_worker_that_answered_nobody_since() -> None:
    standing = Standing()
    assert standing.seen(turn_of("t"), 0.0) == ()
    standing.assigned(turn_of("t", try_deadline=10.0), "a", 0.0, tried=())
    assert standing.seen(turn_of("t", try_number=1), 10.0) == ("a",)
    assert standing.ejected(10.1) == ["a"]
    assert standing.ejected(1000.0) == []
    standing.assigned(turn_of("t", try_number=1, try_deadline=20.0), "b", 10.0, tried=("a",))
    assert standing.seen(turn_of("t", try_number=2), 20.0) == ("a", "b")


def test_a_slow_turn_does_not_eject_a_worker_that_answers_others() -> None:
    standing = Standing()
    standing.assigned(turn_of("slow", try_deadline=10.0), "a", 0.0, tried=())
    standing.seen(turn_of("other", last_worker="a"), 5.0)
    assert standing.seen(turn_of("slow", try_number=1), 10.0) == ("a",)
    assert standing.ejected(10.1) == []


def test_a_failed_try_is_no_proof_of_silence() -> None:
    standing = Standing()
    standing.assigned(turn_of("t", try_deadline=10.0), "a", 0.0, tried=())
    assert standing.seen(turn_of("t", try_number=1), 1.0) == ("a",)
    assert standing.ejected(1.1) == []


@pytest.mark.parametrize("change", [{"turn": 1}, {"attempt": 1}])
def test_tries_of_another_turn_or_attempt_are_not_held_against_a_worker(change: dict[str, int]) -> None:
    standing = Standing()
    standing.assigned(turn_of("t", try_deadline=10.0), "a", 0.0, tried=())
    assert standing.seen(turn_of("t", try_number=1, **change), 10.0) == ()
    assert standing.ejected(10.1) == []


def test_a_worker_that_stays_silent_is_out_for_longer_each_time() -> None:
    standing = Standing()
    now, spans = 0.0, []
    for i in range(3):
        standing.assigned(turn_of(f"t{i}", try_deadline=now + 10), "a", now, tried=())
        now += 10
        standing.seen(turn_of(f"t{i}", try_number=1), now)
        began = now
        while standing.ejected(now):
            now += 1
        spans.append(now - began)
    assert spans[0] < spans[1] < spans[2]


def test_what_is_known_of_a_worker_ends_with_it() -> None:
    standing = Standing()
    standing.assigned(turn_of("t", try_deadline=10.0), "a", 0.0, tried=())
    standing.seen(turn_of("t", try_number=1), 10.0)
    standing.forget_all_but({"b"})
    assert standing.ejected(10.1) == []
