"""Which phases and classes a turn gets when not everything lives, and who is avoided at what price."""

from __future__ import annotations

import pytest
from router_world import record
from turn_wire import turn_of

from services.router.fleet import Fleet
from services.router.plans import NOBODY, Avoid, Option, Plan, Planner
from shared.settings import RouterSettings

SPLIT = {"phases": "split"}


def planner(*workers: str, **settings: object) -> Planner:
    """A planner for live workers, each named `role:class` or `role:class:number`."""
    fleet = Fleet()
    made = Planner(RouterSettings.model_validate(settings), fleet)
    fleet.update([record(name, *name.split(":")[:2]) for name in workers], 0.0)  # type: ignore[arg-type]
    return made


def planned(made: Planner, avoid: Avoid = NOBODY, **wish: object) -> Plan | None:
    wanted = made.wish(turn_of("t", **wish))
    return made.plan(wanted, made.default(wanted), avoid)


def names(plan: Plan | None) -> tuple[list[str], list[str], tuple[str, ...]]:
    assert plan is not None
    return (
        [one.worker.worker_id for one in plan.prefill],
        [one.worker.worker_id for one in plan.workers],
        plan.fallbacks,
    )


ALL = ("both:bandwidth", "both:compute", "prefill:compute", "decode:bandwidth")


@pytest.mark.parametrize(
    ("workers", "wish", "prefill", "main", "fallbacks"),
    [
        (ALL, {}, [], ["both:bandwidth"], ()),
        (ALL, {"affinity": "compute"}, [], ["both:compute"], ()),
        (ALL, SPLIT, ["prefill:compute"], ["decode:bandwidth"], ()),
        # Its own class, then the default one, then any.
        (ALL, {"affinity": "tpu"}, [], ["both:bandwidth"], ("class",)),
        (("both:compute", "both:edge"), {"affinity": "tpu"}, [], ["both:compute"], ("class",)),
        (("both:edge",), {}, [], ["both:edge"], ("class",)),
        # The same for each phase of a split turn.
        (
            ("prefill:bandwidth", "decode:compute", "both:bandwidth"),
            SPLIT,
            ["prefill:bandwidth"],
            ["decode:compute"],
            ("class", "prefill_class"),
        ),
        (
            ("prefill:compute", "prefill:edge", "decode:bandwidth"),
            SPLIT | {"prefill_affinity": "edge"},
            ["prefill:edge"],
            ["decode:bandwidth"],
            (),
        ),
        # One phase has nobody at all: together; nobody for that: split.
        (("both:bandwidth", "decode:bandwidth"), SPLIT, [], ["both:bandwidth"], ("phases",)),
        (("both:bandwidth", "prefill:compute"), SPLIT, [], ["both:bandwidth"], ("phases",)),
        (
            ("prefill:compute", "decode:bandwidth"),
            {"phases": "together"},
            ["prefill:compute"],
            ["decode:bandwidth"],
            ("phases",),
        ),
    ],
)
def test_a_preference_without_a_live_worker_falls_back_to_the_nearest_that_has_one(
    workers: tuple[str, ...],
    wish: dict[str, object],
    prefill: list[str],
    main: list[str],
    fallbacks: tuple[str, ...],
) -> None:
    assert names(planned(planner(*workers), **wish)) == (prefill, main, fallbacks)


@pytest.mark.parametrize("workers", [(), ("prefill:compute",), ("decode:bandwidth",)])
def test_where_no_worker_can_take_a_turn_there_is_no_plan(workers: tuple[str, ...]) -> None:
    made = planner(*workers)
    assert planned(made) is None
    assert planned(made, **SPLIT) is None


def test_the_routers_settings_speak_for_turns_that_do_not() -> None:
    made = planner(*ALL, "prefill:edge", phases="split", prefill_class="edge")
    assert names(planned(made)) == (["prefill:edge"], ["decode:bandwidth"], ())
    assert names(planned(made, phases="together", affinity="compute")) == ([], ["both:compute"], ())


def test_a_worker_to_be_avoided_costs_class_and_phases_before_it_is_taken_again() -> None:
    made = planner("both:compute", "both:bandwidth", "prefill:compute", "decode:bandwidth")
    tried: Avoid = (("both:compute",), ())
    assert names(planned(made, tried, affinity="compute")) == ([], ["both:bandwidth"], ("class",))
    both: Avoid = (("both:compute", "both:bandwidth"), ())
    assert names(planned(made, both)) == (["prefill:compute"], ["decode:bandwidth"], ("phases",))
    everybody: Avoid = (ALL, ())
    assert names(planned(made, everybody, affinity="compute")) == ([], ["both:compute"], ())


def test_the_only_worker_of_one_phase_is_used_again_beside_another_of_the_other_phase() -> None:
    made = planner("prefill:compute", "decode:bandwidth:1", "decode:bandwidth:2")
    tried = ("prefill:compute", "decode:bandwidth:1")
    assert names(planned(made, (tried, ()), **SPLIT)) == (["prefill:compute"], ["decode:bandwidth:2"], ())


def test_an_ejected_worker_comes_before_one_that_had_the_same_turn() -> None:
    made = planner("both:bandwidth:1", "both:bandwidth:2")
    ejected, tried = ["both:bandwidth:1"], ["both:bandwidth:2"]
    assert names(planned(made, ([*ejected, *tried], tried, ()))) == ([], ejected, ())


def test_options_are_the_ways_for_which_workers_live() -> None:
    made = planner(*ALL)
    wish = made.wish(turn_of("t", affinity="auto", phases="auto"))
    assert set(made.options(wish)) == {
        Option("together", "bandwidth"),
        Option("together", "compute"),
        Option("split", "bandwidth", "compute"),
    }
    fixed = made.wish(turn_of("t", affinity="compute", phases="auto"))
    assert made.options(fixed) == [Option("together", "compute")]


def test_a_worker_that_drains_or_owns_no_partition_is_not_there() -> None:
    fleet = Fleet()
    workers = [
        record("a", "both", "bandwidth", draining=True),
        record("b", "decode", "bandwidth", partitions=[]),
        record("c", "prefill", "compute"),
    ]
    fleet.update(workers, 0.0)
    assert (fleet.classes("both"), fleet.classes("decode"), fleet.classes("prefill")) == ([], [], ["compute"])
    assert fleet.find("a") is None
