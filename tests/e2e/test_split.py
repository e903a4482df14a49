"""A run whose turns are split between a prefill and a decode worker, each of which dies in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.stack import ROOT, leftovers, rollart_run

RECIPE = ROOT / "tests" / "e2e" / "faults.toml"
WORKERS = ("compute:prefill", "bandwidth:decode")


@pytest.mark.timeout(300)
def test_a_split_run_survives_the_death_of_each_worker(tmp_path: Path) -> None:
    environ = {"LAUNCHER__WORKERS": ",".join(WORKERS), "ROUTER__PHASES": "split"}
    with rollart_run(RECIPE, tmp_path, **environ) as job:
        job.until_step(1)
        for worker in WORKERS:
            done = len(job.records("step"))
            job.service(f"generation {worker}").kill()
            job.until_step(done + 2, timeout_s=60)
        summary = job.finish()
    assert (summary.state, summary.steps, summary.groups.in_flight) == ("finished", 60, 0)
    assert summary.errors.get("restart_generation") == 2
    assert leftovers(tmp_path) == []
