"""Every archived trajectory is found again unchanged, whatever its id and however the writer died."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.archive import TrajectoryArchive, safe_name, to_line
from shared.events import Message, TrajectoryCompleted, TrajectoryScored, TurnRecord


def scored(
    trajectory_id: str = "run/g-7.3#0", *, task: str = "lake", reward: float | None = 1.0, text: str = "go"
) -> TrajectoryScored:
    return TrajectoryScored(
        trajectory=TrajectoryCompleted(
            run_id="run", trajectory_id=trajectory_id, group_id="run/g-7", member=3, attempt=0, task=task,
            purpose="train", split="train", seed=5, status="finished", token_ids=[1, 2, 3], mask=[0, 1, 1],
            logprobs=[0.0, -0.1, -1e-9], versions=[-1, 4, 5], start_version=4,
            turns=[TurnRecord(start=1, sampled=2, reward=1.0)],
            messages=[Message(role="user", content=text), Message(role="assistant", content="left\n")],
            started_at=1.5, completed_at=2.25,
        ),
        reward=reward, components={"return": 1.0}, scored_at=3.0,
    )  # fmt: skip


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_line_reads_back_unchanged_and_reads_well() -> None:
    original = scored(text='a "quote"\u2028 Zürich \x00')
    line = to_line(original)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert TrajectoryScored.model_validate_json(line) == original
    keys = list(json.loads(line)["trajectory"])
    assert keys[0] == "messages"
    assert set(keys[-4:]) == {"token_ids", "mask", "logprobs", "versions"}
    assert line.startswith(b'{"reward":1.0')
    assert set(keys) == set(TrajectoryCompleted.model_fields)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.text(max_size=12), st.text(max_size=20)), min_size=1, max_size=6, unique=True))
def test_any_id_and_task_is_found_and_stays_in_the_folder(
    tmp_path_factory: pytest.TempPathFactory, names: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    archive = TrajectoryArchive(folder / "trajectories")
    all_ids = [f"{task}|{name}" for task, name in names]
    for (task, _), trajectory_id in zip(names, all_ids, strict=True):
        archive.append(scored(trajectory_id, task=task))
    archive.flush()
    reader = TrajectoryArchive(folder / "trajectories")
    for trajectory_id in all_ids:
        found = reader.find(trajectory_id)
        assert found is not None
        assert found.trajectory.trajectory_id == trajectory_id
    assert sorted(item.trajectory.trajectory_id for item in reader.iterate()) == sorted(all_ids)
    assert all(name.count("/") == 2 and name.startswith("trajectories/") for name in files(folder))


@pytest.mark.parametrize(
    "evil", ["../../x", "..", "/etc/passwd", "a/../../b", "~", ".hidden", "a\x00b", "c:\\d", "x" * 500]
)
def test_path_tricks_stay_inside_the_folder(tmp_path: Path, evil: str) -> None:
    archive = TrajectoryArchive(tmp_path / "trajectories")
    original = scored(f"run/{evil}.0#0", task=evil)
    archive.append(original)
    archive.flush()
    (name,) = files(tmp_path)
    assert name.count("/") == 2
    assert name.startswith("trajectories/")
    assert ".." not in name.split("/")
    assert archive.find(original.trajectory.trajectory_id) == original


@given(st.text(max_size=8), st.text(max_size=8))
def test_different_texts_have_different_names(one: str, other: str) -> None:
    assert (safe_name(one) == safe_name(other)) == (one == other)


def test_a_bucket_holds_few_groups_and_each_task_its_own(tmp_path: Path) -> None:
    archive = TrajectoryArchive(tmp_path)
    for group in range(64):
        for task in ("lake", "guess"):
            archive.append(scored(f"run/{task}-{group}.0#0", task=task))
    archive.flush()
    assert files(tmp_path / "lake") == [
        "lake-000000-000015.jsonl", "lake-000016-000031.jsonl", "lake-000032-000047.jsonl",
        "lake-000048-000063.jsonl",
    ]  # fmt: skip
    assert len(files(tmp_path)) == 8


def test_a_torn_last_line_is_left_out_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    archive = TrajectoryArchive(tmp_path)
    archive.append(scored("run/g-1.0#0"))
    archive.flush()
    path = next(tmp_path.rglob("*.jsonl"))
    with path.open("ab") as file:
        file.write(to_line(scored("run/g-1.1#0"))[:100])
    after = TrajectoryArchive(tmp_path)
    assert [item.trajectory.trajectory_id for item in after.iterate()] == ["run/g-1.0#0"]
    after.append(scored("run/g-1.2#0"))
    after.flush()
    assert [item.trajectory.trajectory_id for item in after.iterate()] == ["run/g-1.0#0", "run/g-1.2#0"]


def test_an_absent_trajectory_and_an_absent_folder_give_nothing(tmp_path: Path) -> None:
    archive = TrajectoryArchive(tmp_path / "none")
    assert archive.find("run/g-1.0#0") is None
    assert list(archive.iterate()) == []
    archive.append(scored("run/g-1.0#0", reward=None))
    assert archive.find("run/g-1.1#0") is None
    assert archive.find("run/g-1.0#1") is None


def test_a_buffer_that_cannot_be_written_is_kept(tmp_path: Path) -> None:
    archive = TrajectoryArchive(tmp_path / "trajectories")
    (tmp_path / "trajectories").write_text("in the way")
    archive.append(scored())
    with pytest.raises(OSError):
        archive.flush()
    (tmp_path / "trajectories").unlink()
    assert archive.find("run/g-7.3#0") == scored()
