"""The object store: whole objects or none, and never outside its folder."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from shared.errors import Invalid, NotFound, StorageFull
from shared.store import FileStore, open_store


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


def test_what_is_put_can_be_listed_read_replaced_and_deleted(store: FileStore) -> None:
    for key in ("a/1", "a/b/2", "ab/3"):
        store.put(key, key.encode())
    store.put("a/1", b"new")
    assert store.list("a") == ["a/1", "a/b/2"]
    assert store.list("") == ["a/1", "a/b/2", "ab/3"]
    assert store.get("a/1") == b"new"
    assert store.folder("a").joinpath("b/2").read_bytes() == b"a/b/2"
    store.delete("a")
    store.delete("a")
    assert store.list("") == ["ab/3"]
    for missing in ("a/1", "ab", "ab/3/4", "nothing"):
        with pytest.raises(NotFound):
            store.get(missing)
    with pytest.raises(NotFound):
        store.folder("a")


@pytest.mark.parametrize("key", ["", ".", "..", "../x", "/etc/passwd", "a/../../x", "a\0b"])
def test_no_key_leaves_the_store_or_is_the_store(store: FileStore, key: str) -> None:
    store.put("kept", b"1")
    for act in (store.get, store.delete, store.folder):
        with pytest.raises(Invalid):
            act(key)
    with pytest.raises(Invalid):
        store.put(key, b"")
    assert store.list("") == ["kept"]


def test_a_reader_sees_a_whole_object_while_it_is_replaced(store: FileStore) -> None:
    versions = [bytes([i]) * 200_000 for i in range(40)]
    store.put("k", versions[0])

    def write() -> None:
        for data in versions:
            store.put("k", data)

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        assert store.get("k") in versions
    assert store.get("k") == versions[-1]


def test_a_full_disk_is_said_so_and_leaves_the_old_object_alone(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("k", b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageFull, match="'k'"):
        store.put("k", b"new")
    assert store.get("k") == b"old"
    assert [path.name for path in store.root.rglob("*")] == ["k"], "nothing is left behind"


def test_objects_can_be_read_by_other_users(store: FileStore) -> None:
    before = os.umask(0o022)
    try:
        store.put("k", b"1")
    finally:
        os.umask(before)
    assert stat.S_IMODE((store.root / "k").stat().st_mode) == 0o644


def test_a_store_is_opened_by_its_uri_and_an_unknown_scheme_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    store = open_store(folder.as_uri())
    store.put("k", b"1")
    assert (folder / "k").read_bytes() == b"1"
    for uri in ("ftp://x", "file://host/x", "nonsense"):
        with pytest.raises(Invalid) as refused:
            open_store(uri)
        assert refused.value.fields[0].field == "ROLLART_STORE"
