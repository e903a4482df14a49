"""The metrics survive a kill, and the report is one safe, self-contained file for every kind of run."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from services.training.metrics_log import MetricsLog, read_metrics
from services.training.report import write_report
from shared.records import AnyRecord, EvaluationRecord, PhaseRecord, StepRecord, WarmStartRecord
from shared.summary import Groups, Summary, TaskSummary, write_summary

START = 1_700_000_000.0
EVIL = "<script>alert(1)</script>"


def step(number: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": number, "version": number, "time": START + 10 + number, "elapsed_s": 10.0 + number,
        "reward": {"lake": 0.3 + number / 100, "guess": 0.5}, "episodes": {"lake": 8, "guess": 8},
        "turns_mean": {"lake": 5.0, "guess": 3.0}, "lag": {"0": 4, "1": 12}, "tokens_sampled": 900,
        "tokens_trained": 800, "tokens_per_s": 850.0, "wait_s": 0.4, "train_s": 0.5, "publish_s": 0.1,
        "step_s": 1.0, "loss": 0.01, "entropy": 0.7, "stages": {"router": 0.1, "generation": 0.9},
    }  # fmt: skip
    return StepRecord.model_validate(values | changes)


def evaluation(at: int, lake: float) -> EvaluationRecord:
    return EvaluationRecord(
        version=at, step=at, time=START + 9 + 2 * at, reward={"lake": lake}, episodes={"lake": 64}
    )


def summary(**changes: Any) -> Summary:
    values: dict[str, Any] = {
        "run_id": "run-1",
        "state": "finished",
        "wall_s": 75.0,
        "steps": 3,
        "versions": 3,
    }
    return Summary.model_validate(values | changes)


def record_run(folder: Path, *records: AnyRecord) -> None:
    with MetricsLog(folder) as metrics:
        for record in records:
            metrics.write(record)


def report_of(folder: Path) -> str:
    text = write_report(folder).read_text(encoding="utf-8")
    assert text.rstrip().endswith("</html>")
    assert [path.name for path in folder.glob("*.tmp")] == []
    return text


class _Outside(HTMLParser):
    """Collects what a page would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"script", "link", "img", "iframe", "object", "embed", "base"}:
            self.found.append(tag)
        for name, value in attrs:
            if name.startswith("on") or (
                name in {"src", "href", "xlink:href"} and not (value or "").startswith("#")
            ):
                self.found.append(f"{tag} {name}={value}")


def test_records_read_back_the_same_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    records: list[AnyRecord] = [
        WarmStartRecord(step=1, time=START, loss=3.0),
        PhaseRecord(phase="warm_start", start=START, end=START + 5, detail={"episodes": 64}),
        evaluation(0, 0.3),
        step(1),
    ]
    record_run(tmp_path, *records)
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == records
    with path.open("ab") as file:
        file.write(b'{"kind":"step","step":2,')
    assert read_metrics(path) == records
    record_run(tmp_path, step(2))
    assert read_metrics(path) == [*records, step(2)]
    assert list((tmp_path / "tensorboard").glob("events.out.*"))


def test_a_record_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as metrics:
        metrics.write(step(1))
        assert read_metrics(tmp_path / "metrics.jsonl") == [step(1)]


def test_of_a_step_done_again_after_a_resume_the_later_one_counts(tmp_path: Path) -> None:
    record_run(tmp_path, step(1), step(2, loss=1.0), step(2, loss=2.0), step(3))
    steps = [r for r in read_metrics(tmp_path / "metrics.jsonl") if isinstance(r, StepRecord)]
    assert [(s.step, s.loss) for s in steps] == [(1, 0.01), (2, 2.0), (3, 0.01)]


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record_run(tmp_path, step(1), step(2))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, round(e.value, 4)) for e in events.Scalars("reward/lake")] == [(1, 0.31), (2, 0.32)]
    assert [e.value for e in events.Scalars("lag/max")] == [1.0, 1.0]
    assert {"loss/policy", "time/wait_s", "tokens_per_s"} <= set(events.Tags()["scalars"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_measurement_that_is_not_finite_is_null_on_disk(tmp_path: Path, value: float) -> None:
    record_run(tmp_path, step(1, loss=value, reward={"lake": value}))
    line = json.loads(
        (tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON")
    )
    assert line["loss"] is None
    assert line["reward"] == {"lake": None}


def test_a_finished_run_shows_its_numbers_and_every_plot(tmp_path: Path) -> None:
    record_run(
        tmp_path,
        *[WarmStartRecord(step=n, time=START + n / 10, loss=4.0 / n) for n in range(1, 20)],
        evaluation(0, 0.25),
        *[step(n) for n in range(1, 21)],
        evaluation(20, 0.875),
    )
    write_summary(
        tmp_path / "summary.json",
        summary(
            tasks={"lake": TaskSummary(reward_before=0.25, reward_after=0.875, episodes=1600, turns_mean=5)},
            groups=Groups(issued=9, trained=6, dropped={"stale": 2}, in_flight=1),
            errors={"restart_router": 1},
        ),
    )
    text = report_of(tmp_path)
    for shown in (
        "0.250",
        "0.875",
        "+0.625",
        "1,600",
        "restart_router",
        "Conserved: 9 = 6 + 2 + 1",
        "1 min 15 s",
    ):
        assert shown in text
    titles = re.findall(r"<figure.*?<h3>(.*?)</h3>", text, re.DOTALL)
    assert titles[:6] == [
        "Reward over steps", "Reward over time", "Trainer time per step", "Stage activity", "Lag",
        "Tokens per second",
    ]  # fmt: skip
    assert "Warm-start loss" in titles
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == len(titles)
    for drawing in drawings:
        ElementTree.fromstring(drawing)
        assert "#0404" not in drawing
        assert "nan" not in drawing.lower()


def test_groups_that_do_not_add_up_are_shown_as_such(tmp_path: Path) -> None:
    write_summary(tmp_path / "summary.json", summary(state="failed", groups=Groups(issued=9, trained=6)))
    assert "Not conserved" in report_of(tmp_path)


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_run_without_steps_has_a_report(tmp_path: Path, state: str) -> None:
    write_summary(tmp_path / "summary.json", summary(state=state, steps=0, versions=0))
    text = report_of(tmp_path)
    assert f'class="state {state}"' in text
    assert "No step was taken" in text


def test_an_empty_folder_and_broken_files_have_a_report(tmp_path: Path) -> None:
    assert "unfinished" in report_of(tmp_path)
    for name in ("summary.json", "recipe.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes(b'\xff{"\n')
    assert "unfinished" in report_of(tmp_path)


def test_one_step_without_any_number_still_gives_a_report(tmp_path: Path) -> None:
    empty = StepRecord(step=1, version=1, time=START, elapsed_s=0.0, reward={"lake": math.nan})
    record_run(tmp_path, empty)
    assert re.search(r">nan<", report_of(tmp_path), re.IGNORECASE) is None


def test_no_text_of_a_user_becomes_markup_and_nothing_is_fetched(tmp_path: Path) -> None:
    record_run(
        tmp_path,
        *[step(n, reward={EVIL: 0.5, "$x^2$": 0.1}, stages={EVIL: 0.5}) for n in (1, 2)],
        PhaseRecord(phase=EVIL, start=START, end=START + 1, detail={EVIL: 1.0}),
        EvaluationRecord(version=0, step=0, time=START, reward={EVIL: 0.5}, episodes={EVIL: 1}),
    )
    write_summary(
        tmp_path / "summary.json",
        summary(run_id=EVIL, groups=Groups(issued=1, dropped={EVIL: 1}), errors={EVIL: 1}, stages={EVIL: {}}),
    )
    (tmp_path / "recipe.json").write_text(json.dumps({"name": f"</pre>{EVIL}"}))
    text = report_of(tmp_path)
    assert EVIL not in text
    assert "$x^2$" in text
    outside = _Outside()
    outside.feed(text)
    assert outside.found == []


def test_writing_again_replaces_the_report(tmp_path: Path) -> None:
    first = report_of(tmp_path)
    record_run(tmp_path, step(1))
    assert report_of(tmp_path) != first
