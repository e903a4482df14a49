"""`auto`: the cheapest hardware by what workers report, told with its reason, and not changed for noise."""

from __future__ import annotations

import pytest
from router_world import AUTO, KINDS, Shape, World, record
from turn_wire import turn_of

from services.router.affinity import DWELL_S, EXPLORED, MIN_TURNS
from services.router.measured import HALF_LIFE_S, Measured
from services.router.plans import Option
from services.router.report import report
from shared.settings import RouterSettings
from shared.state.records import TaskProfile

READS = Shape(prompt_tokens=20_000, generated_tokens=4)
WRITES = Shape(prompt_tokens=60, generated_tokens=400)
BOTH = Shape(prompt_tokens=8_000, generated_tokens=100)
ON_COMPUTE, ON_BANDWIDTH = Option("together", "compute"), Option("together", "bandwidth")
SPLIT = Option("split", "bandwidth", "compute")
WHOLE = KINDS[:2]


def test_a_prefill_heavy_task_goes_to_compute_and_a_decode_heavy_one_to_bandwidth() -> None:
    world = World(kinds=WHOLE)
    assert world.choice("reads").acting == ON_BANDWIDTH
    world.play(40, {"reads": READS, "writes": WRITES})
    assert world.choice("reads").acting == ON_COMPUTE
    assert world.choice("writes").acting == ON_BANDWIDTH
    reads = world.choice("reads")
    assert "together on compute costs 0.638" in reads.why
    assert "2.85 × (0.2 s prefill + 0.024 s decode)" in reads.why
    assert "together on bandwidth 1.22" in reads.why
    assert (reads.switches, world.choice("writes").switches) == (1, 0)


def test_a_split_is_chosen_where_it_pays_and_only_there() -> None:
    world = World()
    world.play(40, {"mixed": BOTH, "writes": WRITES})
    # 2.85 × 0.08 + 0.5 against 2.85 × 0.68 and 0.48 + 0.5.
    assert world.choice("mixed").acting == SPLIT
    assert world.choice("writes").acting == ON_BANDWIDTH
    costly = World(transfer_s=0.5)
    costly.play(40, {"mixed": BOTH})
    assert costly.choice("mixed").acting == ON_BANDWIDTH


def test_prices_decide_as_much_as_seconds() -> None:
    world = World(kinds=WHOLE, settings=RouterSettings(class_costs={"compute": 9.0}))
    world.play(40, {"reads": READS})
    assert world.choice("reads").acting == ON_BANDWIDTH


@pytest.mark.parametrize("excess", [0.0, 0.1])
def test_noise_of_a_tenth_changes_nothing(excess: float) -> None:
    # The same cost on both classes, or a tenth more on the one that is used.
    speed = {"compute": 1e-5, "bandwidth": 2.85e-5 * (1 + excess)}
    world = World(kinds=WHOLE, noise=0.1, prefill_s=speed, decode_s={"compute": 0.0, "bandwidth": 0.0})
    world.play(300, {"reads": READS}, rate=10)
    assert world.choice("reads").switches == 0


def test_a_real_change_switches_once_and_not_before_the_dwell_time() -> None:
    world = World(kinds=WHOLE)
    world.play(20, {"reads": READS})
    chosen = world.choice("reads")
    assert chosen.acting == ON_COMPUTE
    since = chosen.since
    world.prefill_s = {"compute": 6e-5, "bandwidth": 1e-5}
    world.play(10, {"reads": READS})
    assert world.choice("reads").switches == 1
    world.play(200, {"reads": READS})
    assert world.choice("reads").acting == ON_BANDWIDTH
    assert world.choice("reads").switches == 2
    assert world.choice("reads").since - since >= DWELL_S


def test_a_small_share_of_whole_trajectories_explores_and_only_while_something_is_unknown() -> None:
    world = World()
    world.play(1, {"mixed": BOTH}, rate=1600)
    aside = [turn for turn, option in world.picked if option != ON_BANDWIDTH]
    assert 0.6 * 1600 / EXPLORED < len(aside) < 1.4 * 1600 / EXPLORED
    assert world.choice("mixed").explored == len(aside)
    assert {option for _, option in world.picked} == {ON_BANDWIDTH, ON_COMPUTE, SPLIT}
    # Known now: nobody is sent aside any more.
    world.picked.clear()
    world.play(1, {"mixed": BOTH}, rate=1600)
    assert len({option for _, option in world.picked}) == 1
    # Long ago: it is measured again.
    world.now += 10 * HALF_LIFE_S
    world.beat()
    assert world.choice("mixed").unsure


def test_later_turns_of_a_trajectory_stay_where_its_first_one_went() -> None:
    world = World()
    world.play(40, {"mixed": BOTH})
    assert world.choice("mixed").acting == SPLIT
    (_, planner), affinity = world.fleets[0], world.routers[0]
    for last, prefill, expected in (
        ("both-compute", None, ON_COMPUTE),
        ("decode-bandwidth", "prefill-compute", SPLIT),
        ("gone", None, SPLIT),
        ("decode-bandwidth", "gone", SPLIT),
    ):
        turn = turn_of("t", task="mixed", last_worker=last, last_prefill_worker=prefill, **AUTO)
        wish = planner.wish(turn)
        assert affinity.pick(turn, wish, affinity.choice("mixed", wish, world.now)) == expected


def test_a_class_whose_workers_die_is_no_option_and_is_taken_again_when_they_return() -> None:
    world = World(kinds=WHOLE)
    world.play(40, {"reads": READS})
    world.kinds = WHOLE[1:]
    world.play(3, {"reads": READS})
    away = world.choice("reads")
    assert (away.current, away.acting) == (ON_COMPUTE, ON_BANDWIDTH)
    assert away.why == "together on compute has no live workers"
    world.kinds = WHOLE
    world.play(1, {"reads": READS})
    assert world.choice("reads").acting == ON_COMPUTE
    assert world.choice("reads").switches == 1
    world.kinds = WHOLE[1:]
    world.play(int(DWELL_S) + 3, {"reads": READS})
    assert world.choice("reads").current == ON_BANDWIDTH
    assert world.choice("reads").switches == 2


def test_what_a_recipe_fixes_is_left_fixed() -> None:
    world = World()
    for wish, only in (
        ({"affinity": "bandwidth", "phases": "together"}, ON_BANDWIDTH),
        ({"affinity": "bandwidth", "prefill_affinity": "compute", "phases": "split"}, SPLIT),
        ({"affinity": "auto", "phases": "split"}, SPLIT),
    ):
        world.picked.clear()
        world.play(5, {"reads": READS}, **wish)
        assert {option for _, option in world.picked} == {only}
    world.picked.clear()
    world.play(60, {"reads": READS}, affinity="auto", phases="together")
    assert {option for _, option in world.picked} == {ON_BANDWIDTH, ON_COMPUTE}
    assert world.choice("reads", affinity="auto", phases="together").acting == ON_COMPUTE


def test_routers_side_by_side_choose_alike() -> None:
    world = World(noise=0.1)
    world.add_router()
    world.play(60, {"reads": READS, "writes": WRITES, "mixed": BOTH})
    for task in ("reads", "writes", "mixed"):
        assert world.choice(task, 0).acting == world.choice(task, 1).acting
    # One that starts later learns what the others know from the workers' sums.
    world.add_router()
    world.play(10, {"reads": READS, "writes": WRITES, "mixed": BOTH})
    for task in ("reads", "writes", "mixed"):
        assert world.choice(task, 2).acting == world.choice(task, 0).acting


def test_the_report_tells_the_choice_its_reason_and_every_figure() -> None:
    world = World()
    world.play(40, {"mixed": BOTH})
    found = report(world.routers[0], world.fleets[0][1], world.now)
    (task,) = found.tasks
    assert (task.task, task.phases, task.device_class, task.prefill_class) == (
        "mixed", "split", "bandwidth", "compute",
    )  # fmt: skip
    assert (task.prompt_tokens, task.generated_tokens) == (pytest.approx(8000), pytest.approx(100))
    assert task.cached_share == 0
    costs = {(o.phases, o.device_class, o.prefill_class): o.cost for o in task.options}
    assert costs == {
        ("together", "compute", None): pytest.approx(2.85 * (0.08 + 0.6)),
        ("together", "bandwidth", None): pytest.approx(0.48 + 0.5),
        ("split", "bandwidth", "compute"): pytest.approx(2.85 * 0.08 + 0.5 + 0.001),
    }
    assert (task.switches, task.fallbacks) == (1, [])
    assert task.assigned == 0, "counted by whoever assigns"


def test_cached_prompts_cost_what_is_computed_of_them() -> None:
    measured = Measured()
    for name, role, cached in (("a", "both", 90), ("b", "prefill", 50)):
        profile = TaskProfile(prefills=10, prompt_tokens=1000, cached_tokens=10 * cached, prefill_s=1.0)
        measured.observe([record(name, role, "compute", tasks={"t": profile}, updated_at=5.0)])
    both, prefill = measured.cell("t", "both", "compute"), measured.cell("t", "prefill", "compute")
    assert both is not None
    assert prefill is not None
    assert (both.computed_share, both.prefill_s_per_token) == (pytest.approx(0.1), pytest.approx(0.01))
    assert (prefill.computed_share, prefill.prefill_s_per_token) == (pytest.approx(0.5), pytest.approx(0.002))


def test_heartbeats_count_once_by_their_differences_and_lose_half_their_weight_a_minute() -> None:
    measured = Measured()

    def beat(at: float, turns: int) -> None:
        profile = TaskProfile(decodes=turns, generated_tokens=turns, decode_s=float(turns))
        measured.observe([record("a", "both", "compute", tasks={"t": profile}, updated_at=at)])

    beat(0.0, 10)
    beat(0.0, 10)
    beat(1.0, 12)
    beat(0.5, 99)
    cell = measured.cell("t", "both", "compute")
    assert cell is not None
    assert cell.seen == 12
    assert cell.turns(1.0 + HALF_LIFE_S) == pytest.approx(6, rel=0.02)
    # Started again under its id: its sums begin anew.
    beat(2.0, 3)
    assert cell.seen == 15
    # Long known to others, new to us: worth no more than a minute or so of turns.
    profile = TaskProfile(decodes=100_000, generated_tokens=100_000, decode_s=1e5)
    measured.observe([record("b", "both", "compute", tasks={"t": profile}, updated_at=2.0)])
    assert MIN_TURNS < cell.seen < 100
