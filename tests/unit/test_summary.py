"""The summary is strict, stable and finite, and conservation is checked with its numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.errors import ConservationViolated
from shared.summary import (
    Groups,
    Lag,
    Summary,
    TaskSummary,
    check_conservation,
    read_summary,
    write_atomically,
    write_summary,
)


def summary(**changes: object) -> Summary:
    return Summary.model_validate(
        {"run_id": "r", "state": "finished", "wall_s": 1.5, "steps": 2, "versions": 2, **changes}
    )


def test_the_keys_are_the_documented_ones() -> None:
    full = summary(tasks={"lake": {}}, stages={"router": {}})
    shape = json.loads(full.model_dump_json())
    assert list(shape) == [
        "run_id", "state", "wall_s", "steps", "versions", "tokens", "tokens_per_s", "tasks", "lag", "stages",
        "step_time", "weights", "groups", "errors",
    ]  # fmt: skip
    assert list(shape["tokens"]) == ["sampled", "trained"]
    assert list(shape["tasks"]["lake"]) == ["reward_before", "reward_after", "episodes", "turns_mean"]
    assert list(shape["lag"]) == ["histogram", "max"]
    assert list(shape["stages"]["router"]) == ["busy_s", "share"]
    assert list(shape["step_time"]) == ["mean_s", "wait_s", "train_s", "publish_s"]
    assert list(shape["weights"]) == ["push_s", "pull_s", "exposed_s"]
    assert list(shape["groups"]) == ["issued", "trained", "dropped", "in_flight"]
    assert shape["tasks"]["lake"]["reward_before"] is None


@given(st.integers(0, 9), st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)), st.integers(0, 9))
def test_conservation_holds_exactly_when_the_numbers_add_up(
    trained: int, dropped: dict[str, int], in_flight: int
) -> None:
    total = trained + sum(dropped.values()) + in_flight
    parts = {"trained": trained, "dropped": dropped, "in_flight": in_flight}
    check_conservation(Groups.model_validate({"issued": total, **parts}))
    with pytest.raises(ConservationViolated, match=f"{total + 1} groups issued, but {total} accounted for"):
        check_conservation(Groups.model_validate({"issued": total + 1, **parts}))


def test_a_violation_names_every_reason() -> None:
    with pytest.raises(ConservationViolated, match=r"dropped 3 \(failed 1, stale 2\) \+ in flight 1"):
        check_conservation(Groups(issued=9, trained=4, dropped={"stale": 2, "failed": 1}, in_flight=1))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValidationError):
        summary(wall_s=value)
    with pytest.raises(ValidationError):
        TaskSummary(reward_after=value)


def test_unknown_keys_negative_counts_and_odd_lags_are_refused() -> None:
    for wrong in ({"step": 1}, {"steps": -1}, {"state": "done"}, {"errors": {"x": -1}}):
        with pytest.raises(ValidationError):
            summary(**wrong)
    with pytest.raises(ValidationError):
        Lag(histogram={"-1": 3})


def test_a_written_summary_reads_back_the_same(tmp_path: Path) -> None:
    original = summary(lag={"histogram": {"0": 3, "1": 2}, "max": 1}, errors={"restart_router": 1})
    write_summary(tmp_path / "summary.json", original)
    assert read_summary(tmp_path / "summary.json") == original
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_write_that_fails_leaves_the_old_file_and_no_scraps(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "file", "new \ud800")
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
