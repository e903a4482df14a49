"""Which processes a stack has: what LAUNCHER__WORKERS means, and what is refused."""

from __future__ import annotations

import pytest

from services.launcher import Launcher
from services.processes import describe, kv_ports, plan
from shared.errors import Invalid
from shared.settings import LauncherSettings, Settings

FLEET = {
    "generation-compute-prefill": "compute:prefill",
    "generation-bandwidth-decode-1": "bandwidth:decode",
    "generation-bandwidth-decode-2": "bandwidth:decode",
}


def fleet(workers: str = "compute:prefill, bandwidth:decode*2", **generation: object) -> Settings:
    settings = Settings()
    changes = {
        "launcher": LauncherSettings(workers=workers),
        "generation": settings.generation.model_copy(update=generation),
    }
    return settings.model_copy(update=changes)


def test_a_single_worker_keeps_the_name_of_its_service_and_its_settings() -> None:
    assert [one.name for one in plan(Settings(), ["generation"])] == ["generation"]
    assert plan(Settings(), ["generation"])[0].settings == Settings()
    (one,) = plan(fleet("compute:both"), ["generation"])
    assert (one.name, one.worker) == ("generation", "compute:both")


def test_callers_are_stopped_before_workers_and_other_services_are_not_multiplied() -> None:
    names = [one.name for one in plan(fleet())]
    assert names == ["gateway", "training", "environment", "reward", "router", *FLEET]


@pytest.mark.parametrize(
    ("workers", "fix"),
    [
        ("compute", "class:role"),
        ("compute:prefil,bandwidth:decode", "prefill, decode, both"),
        ("compute:both,", "class:role"),
        ("Compute:both", "a-z"),
        ("auto:both", "class of its hardware"),
        ("compute:both*0", "1 to 64"),
        ("compute:both*-1", "1 to 64"),
        ("compute:both*", "1 to 64"),
        ("compute:both*two", "1 to 64"),
        ("compute:both*65", "at most 64"),
        ("compute:both*99999999999999999999", "1 to 64"),
        ("compute:both*40,bandwidth:both*40", "at most 64"),
        ("compute:prefill", "no worker of role `decode`"),
        ("bandwidth:decode*2", "no worker of role `prefill`"),
    ],
)
def test_a_wrong_fleet_is_refused_by_its_variable_with_the_fix_before_a_stack_is_made(
    workers: str, fix: str
) -> None:
    with pytest.raises(Invalid) as raised:
        Launcher(fleet(workers))
    (problem,) = raised.value.fields
    assert problem.field == "LAUNCHER__WORKERS"
    assert fix in problem.message


def test_prefill_workers_of_one_machine_get_ranges_of_ports_that_do_not_meet() -> None:
    settings = fleet("compute:prefill*2,other:prefill,bandwidth:decode", kv_port=30_000, max_policies=3)
    ports = [kv_ports(one.settings.generation) for one in plan(settings, ["generation"])]
    assert ports == [range(30_000, 30_003), range(30_003, 30_006), range(30_006, 30_009), range(0)]
    free = plan(fleet("compute:prefill*2,bandwidth:decode"), ["generation"])
    assert [one.settings.generation.kv_port for one in free] == [0, 0, 0]
    with pytest.raises(Invalid, match=r"GENERATION__KV_PORT.*65535"):
        plan(fleet("compute:prefill*2,bandwidth:decode", kv_port=65_532, max_policies=3), ["generation"])


def test_workers_are_described_as_people_read_them() -> None:
    assert describe(plan(fleet())) == "compute:prefill, bandwidth:decode ×2"
    assert describe(plan(Settings())) == "bandwidth:both"
