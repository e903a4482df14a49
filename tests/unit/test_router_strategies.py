"""Which worker gets a turn: sticky, least loaded, and never one that lets turns lie."""

from __future__ import annotations

import pytest
from router_world import record
from turn_wire import turn_of

from services.router.standing import Standing
from services.router.strategies import Candidate, LeastLoaded, StickyLeastLoaded
from shared.events import Role


def worker(name: str, *, running: int = 0, waiting: int = 0, role: Role = "both") -> Candidate:
    return Candidate(record(name, role, "bandwidth", running=running, waiting=waiting))


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
    busy, idle = worker("a", running=8), worker("b")
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


def test_a_worker_with_far_more_in_hand_than_the_least_loaded_loses_its_trajectories() -> None:
    strategy = StickyLeastLoaded()
    turn = turn_of("t", last_worker="a")
    for mine, least, kept in ((8, 0, True), (9, 0, False), (28, 10, True), (29, 10, False)):
        busy, idle = worker("a", running=mine), worker("b", running=least)
        assert (strategy.choose(turn, [busy, idle]) is busy) == kept


def test_each_phase_of_a_split_turn_stays_with_its_own_worker() -> None:
    strategy = StickyLeastLoaded()
    turn = turn_of("t", last_worker="d2", last_prefill_worker="p2")
    for role, expected in (("prefill", "p2"), ("decode", "d2")):
        some = [worker(f"{role[0]}{i}", running=i, role=role) for i in range(4)]
        assert strategy.choose(turn, some).worker.worker_id == expected


def test_an_answer_takes_off_what_no_report_has_counted() -> None:
    one = worker("a", running=2)
    one.unreported.extend([1.0, 2.0])
    one.answered(0.5)
    assert one.load == 4, "assigned before: a report has counted it"
    one.answered(1.0)
    one.answered(2.0)
    one.answered(2.0)
    assert one.load == 2


def split_standing(*, answers: tuple[str, ...]) -> Standing:
    """A split turn was assigned to p and d, these workers then answered others, and its try ran out."""
    standing = Standing()
    standing.assigned(turn_of("t", try_deadline=10.0), ("p", "d"), 0.0, tried=())
    if answers:
        named = {"p": "last_prefill_worker", "d": "last_worker"}
        standing.seen(turn_of("other", **{named[name]: name for name in answers}), 5.0)
    assert standing.seen(turn_of("t", try_number=1), 10.0) == ("p", "d")
    return standing


def test_of_a_split_turn_the_worker_that_answered_nobody_since_is_ejected() -> None:
    assert split_standing(answers=("p",)).ejected(10.1) == ["d"]
    assert split_standing(answers=("d",)).ejected(10.1) == ["p"]
    assert split_standing(answers=("p", "d")).ejected(10.1) == []


def test_where_both_may_be_the_silent_one_both_are_out_until_one_answers() -> None:
    standing = split_standing(answers=())
    assert standing.ejected(10.1) == ["p", "d"]
    standing.seen(turn_of("other", last_worker="x", last_prefill_worker="p"), 10.2)
    assert standing.ejected(10.3) == ["d"]


def test_of_two_that_may_be_silent_it_is_the_one_that_still_has_turns_in_hand() -> None:
    for holding in ("p", "d"):
        standing = Standing(lambda worker, holding=holding: 5.0 if worker == holding else -1.0)
        standing.assigned(turn_of("t", try_deadline=10.0), ("p", "d"), 0.0, tried=())
        standing.seen(turn_of("t", try_number=1), 10.0)
        assert standing.ejected(10.1) == [holding]


def test_an_answer_does_not_bring_a_worker_back_that_was_ejected_alone() -> None:
    standing = split_standing(answers=("p",))
    standing.seen(turn_of("other", last_worker="d"), 10.2)
    assert standing.ejected(10.3) == ["d"]


def test_what_a_later_try_names_was_before_the_silence() -> None:
    standing = Standing()
    standing.assigned(turn_of("t", try_deadline=10.0), ("p", "d"), 0.0, tried=())
    standing.seen(turn_of("other", try_number=1, last_prefill_worker="p", last_worker="d"), 5.0)
    standing.seen(turn_of("t", try_number=1), 10.0)
    assert standing.ejected(10.1) == ["p", "d"]
