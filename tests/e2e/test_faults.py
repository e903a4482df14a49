"""Processes die by SIGKILL in the middle of a run: it completes, nothing is lost, the summary tells."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.stack import ROOT, Job, leftovers, rollart_run

RECIPE = ROOT / "tests" / "e2e" / "faults.toml"
GOES_ON_WITHIN_S = 10.0
SERVICES = ("environment", "reward", "router", "generation")


def kill_each(job: Job) -> dict[str, float]:
    """SIGKILL one service after the other; seconds until the next step after each."""
    pauses = {}
    for service in SERVICES:
        before = len(job.records("step"))
        job.until_step(before + 2)
        done = len(job.records("step"))
        job.service(service).kill()
        killed_at = time.monotonic()
        job.until_step(done + 2, timeout_s=60)
        pauses[service] = time.monotonic() - killed_at
    return pauses


@pytest.mark.timeout(300)
def test_killed_services_come_back_and_the_run_completes(tmp_path: Path) -> None:
    with rollart_run(RECIPE, tmp_path) as job:
        job.until_step(1)
        pauses = kill_each(job)
        summary = job.finish()
    assert summary.state == "finished"
    assert summary.steps == 60
    assert {f"restart_{service}": summary.errors.get(f"restart_{service}") for service in SERVICES} == {
        f"restart_{service}": 1 for service in SERVICES
    }
    assert summary.groups.in_flight == 0
    assert leftovers(tmp_path) == []
    print("seconds until work went on:", {name: round(pause, 1) for name, pause in pauses.items()})
