"""Checkpoints: whatever is killed or full, the newest complete one loads."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.training import checkpoint
from shared.errors import NotFound, Unavailable


def state(value: float) -> dict[str, object]:
    return {"weight": torch.full((64,), value), "steps_done": int(value)}


def save(folder: Path, step: int, *, keep: int = 2) -> Path:
    return checkpoint.save(folder, step=step, state=state(step), ledger={"step": step}, keep=keep)


def in_child(action: Callable[[], object]) -> int:
    """Run in a forked process; its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except Unavailable:
            os._exit(7)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(event_number: int, folder: Path) -> None:
    """SIGKILL this process at its n-th file operation below `folder`."""
    seen = 0

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in WATCHED and str(folder) in str(arguments):
            seen += 1
            if seen == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}


def test_comes_back_as_saved(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, step=3, state=state(3), ledger={"next": {"maze": 7}, "offsets": [1, 2]})
    assert checkpoint.latest(tmp_path) == path
    loaded = checkpoint.load(path)
    assert loaded.step == 3
    assert loaded.ledger == {"next": {"maze": 7}, "offsets": [1, 2]}
    assert isinstance(loaded.state["weight"], torch.Tensor)
    assert torch.equal(loaded.state["weight"], torch.full((64,), 3.0))


def test_nothing_there_is_none(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "absent") is None
    with pytest.raises(NotFound):
        checkpoint.load(tmp_path)


def test_newest_complete_ones_are_kept(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (9, 10, 11)]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in paths[1:])


def test_saving_a_step_again_is_not_fatal_and_the_later_one_wins(tmp_path: Path) -> None:
    first, second = save(tmp_path, 4), save(tmp_path, 4)
    assert first != second
    assert checkpoint.latest(tmp_path) == second


@pytest.mark.parametrize("damage", ["no_marker", "half_state", "flipped_bit", "no_ledger", "bad_marker"])
def test_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    tensors = (bad / "state.pt").read_bytes()
    match damage:
        case "no_marker":
            (bad / "complete.json").unlink()
        case "half_state":
            (bad / "state.pt").write_bytes(tensors[: len(tensors) // 2])
        case "flipped_bit":
            (bad / "state.pt").write_bytes(tensors[:-1] + bytes([tensors[-1] ^ 1]))
        case "no_ledger":
            (bad / "ledger.json").unlink()
        case "bad_marker":
            (bad / "complete.json").write_text("{")
    assert checkpoint.latest(tmp_path) == good
    with pytest.raises(NotFound):
        checkpoint.load(bad)


def test_kill_at_any_file_operation_leaves_the_old_or_the_new_one_loadable(tmp_path: Path) -> None:
    outcomes: list[int] = []
    for number in range(1, 200):
        folder = tmp_path / str(number)
        save(folder, 1, keep=1)

        def crash(folder: Path = folder, number: int = number) -> None:
            die_at(number, folder)
            save(folder, 2, keep=1)

        code = in_child(crash)
        path = checkpoint.latest(folder)
        assert path is not None, f"nothing loadable after a kill at operation {number}"
        outcomes.append(checkpoint.load(path).step)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        save(folder, 3, keep=1)
        assert [p.name for p in folder.iterdir()] == ["step-00000003-0"], "leftovers of the crash remain"
        shutil.rmtree(folder)
    assert code == 0
    # The kills reached both sides of the moment at which the new one becomes the truth.
    assert outcomes.count(1) >= 5
    assert outcomes.count(2) >= 3
    assert outcomes == sorted(outcomes)


@pytest.mark.parametrize("limit", [0, 1, 500, 1500])
def test_full_disk_is_an_error_that_leaves_the_old_one_alone(tmp_path: Path, limit: int) -> None:
    old = save(tmp_path, 1)
    content = {p.name: p.read_bytes() for p in old.iterdir()}

    def save_with_little_space() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        save(tmp_path, 2, keep=1)

    assert in_child(save_with_little_space) == 7
    assert [p.name for p in tmp_path.iterdir()] == [old.name]
    assert {p.name: p.read_bytes() for p in old.iterdir()} == content


def test_ledger_with_nan_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        checkpoint.save(tmp_path, step=1, state=state(1), ledger={"x": float("nan")})
    assert list(tmp_path.iterdir()) == []
