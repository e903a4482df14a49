"""Published weights: what is pulled is what was published, whole, or is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shared import weights
from shared.errors import WeightsInvalid
from shared.store import FileStore
from shared.weights import RawTensor


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path)


def tensors(seed: int = 0) -> dict[str, RawTensor]:
    rng = np.random.default_rng(seed)
    made = {
        f"layer.{i}.weight": RawTensor("F32", (3, 5), rng.normal(size=(3, 5)).astype("<f4").tobytes())
        for i in range(6)
    }
    made["half"] = RawTensor("BF16", (4,), rng.bytes(8))
    made["scalar"] = RawTensor("I64", (), (7).to_bytes(8, "little"))
    made["none"] = RawTensor("F32", (0, 3), b"")
    return made


def publish(store: FileStore, *, seed: int = 0, version: int = 1) -> tuple[str, str]:
    return weights.publish(store, tensors(seed), policy="p", version=version, step=version, bucket_bytes=150)


def same(found: dict[str, RawTensor], expected: dict[str, RawTensor]) -> bool:
    return {n: t.checksum for n, t in found.items()} == {n: t.checksum for n, t in expected.items()}


def test_tensors_in_several_buckets_come_back_equal(store: FileStore) -> None:
    uri, digest = publish(store)
    assert len([key for key in store.list(uri) if "bucket" in key]) >= 3
    found = weights.pull(store, uri, digest=digest)
    manifest = weights.read_manifest(store, uri, digest=digest)
    assert (manifest.policy, manifest.version) == ("p", 1)
    assert same(found, tensors())
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
        n: (t.dtype, t.shape) for n, t in tensors().items()
    }


def test_a_half_written_version_is_refused(store: FileStore) -> None:
    class Dies(FileStore):
        left = 2

        def put(self, key: str, data: bytes) -> None:
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            super().put(key, data)

    with pytest.raises(KeyboardInterrupt):
        publish(Dies(store.root))
    (half,) = {key.rsplit("/", 1)[0] for key in store.list("weights")}
    with pytest.raises(WeightsInvalid, match="missing"):
        weights.pull(store, half)
    uri, digest = publish(store, seed=1)
    assert uri != half
    assert same(weights.pull(store, uri, digest=digest), tensors(1))


def test_a_later_attempt_at_the_same_version_changes_nothing_of_the_published_one(store: FileStore) -> None:
    uri, digest = publish(store, seed=0)
    for seed in (0, 1):
        again, _ = publish(store, seed=seed)
        assert again != uri
    assert same(weights.pull(store, uri, digest=digest), tensors(0))
    store.delete(weights.version_uri("p", 1))
    assert store.list("weights") == []


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete", "empty", "manifest"])
def test_a_damaged_version_is_refused(store: FileStore, harm: str) -> None:
    uri, digest = publish(store)
    key = next(key for key in store.list(uri) if "bucket" in key)
    data = store.get(key)
    if harm == "flip":
        store.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    elif harm == "truncate":
        store.put(key, data[: len(data) // 2])
    elif harm == "delete":
        store.delete(key)
    elif harm == "empty":
        store.put(key, b"")
    else:
        store.put(f"{uri}/manifest.json", b'{"policy": "p"}')
        with pytest.raises(WeightsInvalid, match="unreadable"):
            weights.pull(store, uri)
    with pytest.raises(WeightsInvalid):
        weights.pull(store, uri, digest=digest)


@pytest.mark.parametrize("change", ["missing", "shape", "dtype"])
def test_a_tensor_that_differs_from_the_manifest_is_refused(store: FileStore, change: str) -> None:
    uri, _ = publish(store)
    manifest = weights.Manifest.model_validate_json(store.get(f"{uri}/manifest.json"))
    entries = dict(manifest.tensors)
    entry = entries["layer.0.weight"]
    if change == "missing":
        entries["layer.9.weight"] = entry
    elif change == "shape":
        entries["layer.0.weight"] = entry.model_copy(update={"shape": (5, 3)})
    else:
        entries["layer.0.weight"] = entry.model_copy(update={"dtype": "I32"})
    forged = manifest.model_copy(update={"tensors": entries}).model_dump_json().encode()
    store.put(f"{uri}/manifest.json", forged)
    with pytest.raises(WeightsInvalid, match=r"layer\."):
        weights.pull(store, uri)


def test_a_manifest_that_is_not_the_published_one_is_refused(store: FileStore) -> None:
    uri, _ = publish(store)
    with pytest.raises(WeightsInvalid, match="not the published one"):
        weights.pull(store, uri, digest="0" * 64)


def test_a_store_that_cannot_be_read_is_invalid_weights_not_a_crash(store: FileStore) -> None:
    class Broken(FileStore):
        def get(self, key: str) -> bytes:
            raise OSError("stale file handle")

    uri, digest = publish(store)
    with pytest.raises(WeightsInvalid, match="stale file handle"):
        weights.pull(Broken(store.root), uri, digest=digest)
