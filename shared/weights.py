"""Published weights: buckets of tensors and a manifest, written last, that proves them.

`training` publishes, `generation` pulls. Torch-free: a tensor is its dtype name, shape and bytes.
Layout in the store:

    weights/{policy}/model/…                        config and tokenizer, written once
    weights/{policy}/v000012/{attempt}/bucket-0000.safetensors
    weights/{policy}/v000012/{attempt}/manifest.json    the marker of completeness

`{attempt}` is a checksum of the tensors and the time: what an interrupted attempt left behind, or what a
trainer writes whose lease was taken over, is never mistaken for part of another attempt, nor changes it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
from pydantic import BaseModel, ConfigDict, ValidationError

from shared.errors import NotFound, WeightsInvalid
from shared.store import ObjectStore

BUCKET_BYTES = 1 << 30
_NUMPY_NAME = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


@dataclass(frozen=True)
class RawTensor:
    """One tensor without a framework."""

    dtype: str
    """safetensors name: `F32`, `BF16`, …"""
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview
    """Little-endian, contiguous."""

    @property
    def checksum(self) -> str:
        """SHA-256 of dtype, shape and data."""
        digest = hashlib.sha256(f"{self.dtype}{self.shape}".encode())
        digest.update(self.data)
        return digest.hexdigest()


class TensorEntry(BaseModel):
    """One tensor in a manifest."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    bucket: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


class Manifest(BaseModel):
    """What a version consists of."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    policy: str
    version: int
    step: int
    tensors: dict[str, TensorEntry]
    created_at: float


def version_uri(policy: str, version: int) -> str:
    """Key prefix of a version's folder in the store: all attempts at it."""
    return f"weights/{policy}/v{version:06d}"


def model_uri(policy: str) -> str:
    """Key prefix of a policy's config and tokenizer."""
    return f"weights/{policy}/model"


def publish_model(store: ObjectStore, *, policy: str, folder: Path) -> str:
    """Copy a model folder (config, tokenizer; no weights) into the store. Returns its key prefix."""
    prefix = model_uri(policy)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
    return prefix


def publish(
    store: ObjectStore,
    tensors: Mapping[str, RawTensor],
    *,
    policy: str,
    version: int,
    step: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[str, str]:
    """Write one version, manifest last. Returns its key prefix and the manifest's SHA-256."""
    entries: dict[str, TensorEntry] = {}
    buckets = {
        f"bucket-{i:04d}.safetensors": names for i, names in enumerate(_buckets(tensors, bucket_bytes))
    }
    for bucket, names in buckets.items():
        for name in names:
            t = tensors[name]
            entries[name] = TensorEntry(bucket=bucket, dtype=t.dtype, shape=t.shape, sha256=t.checksum)
    created_at = time.time()
    attempt = hashlib.sha256(f"{step} {created_at}\n".encode())
    for name, entry in entries.items():
        attempt.update(f"{name} {entry.model_dump_json()}\n".encode())
    prefix = f"{version_uri(policy, version)}/{attempt.hexdigest()[:16]}"
    for bucket, names in buckets.items():
        store.put(f"{prefix}/{bucket}", _serialize({name: tensors[name] for name in names}))
    manifest = Manifest(policy=policy, version=version, step=step, tensors=entries, created_at=created_at)
    data = manifest.model_dump_json().encode()
    store.put(f"{prefix}/manifest.json", data)
    return prefix, hashlib.sha256(data).hexdigest()


def pull(store: ObjectStore, uri: str, *, digest: str | None = None) -> dict[str, RawTensor]:
    """Every tensor of a version, each checked against the manifest. Raises WeightsInvalid as `buckets`
    does."""
    return {name: tensor for bucket in buckets(store, uri, digest=digest) for name, tensor in bucket.items()}


def buckets(store: ObjectStore, uri: str, *, digest: str | None = None) -> Iterator[dict[str, RawTensor]]:
    """The tensors of a version bucket by bucket, each checked against the manifest as it comes.

    Raises WeightsInvalid where the manifest or a bucket is missing or unreadable, a tensor of the manifest is
    missing from its bucket, or a checksum, dtype or shape differs. What a bucket holds beyond the manifest is
    left out.
    """
    manifest = read_manifest(store, uri, digest=digest)
    names: dict[str, list[str]] = {}
    for name, entry in manifest.tensors.items():
        names.setdefault(entry.bucket, []).append(name)
    for bucket in sorted(names):
        found = _read_bucket(store, f"{uri}/{bucket}")
        for name in names[bucket]:
            entry, tensor = manifest.tensors[name], found.get(name)
            if tensor is None:
                raise WeightsInvalid(f"{uri}: tensor {name} is missing from {bucket}")
            if tensor.shape != entry.shape or tensor.dtype != entry.dtype or tensor.checksum != entry.sha256:
                raise WeightsInvalid(f"{uri}: tensor {name} differs from its manifest")
        yield {name: found[name] for name in names[bucket]}


def read_manifest(store: ObjectStore, uri: str, *, digest: str | None = None) -> Manifest:
    """What a version consists of. Raises WeightsInvalid where it is missing, unreadable or another one."""
    raw = _read(store, f"{uri}/manifest.json")
    if digest is not None and hashlib.sha256(raw).hexdigest() != digest:
        raise WeightsInvalid(f"{uri}: the manifest is not the published one")
    try:
        return Manifest.model_validate_json(raw)
    except ValidationError as error:
        raise WeightsInvalid(f"{uri}: manifest unreadable: {error}") from error


def _serialize(tensors: Mapping[str, RawTensor]) -> bytes:
    """A bucket in safetensors format. The arrays keep the buffers alive while their addresses are used."""
    arrays = {name: np.frombuffer(tensor.data, dtype=np.uint8) for name, tensor in tensors.items()}
    specs = {
        name: safetensors.TensorSpec(
            dtype=_NUMPY_NAME[tensor.dtype],
            shape=list(tensor.shape),
            data_ptr=arrays[name].ctypes.data,
            data_len=arrays[name].nbytes,
        )
        for name, tensor in tensors.items()
    }
    return bytes(safetensors.serialize(specs))


def _read(store: ObjectStore, key: str) -> bytes:
    try:
        return store.get(key)
    except NotFound as error:
        raise WeightsInvalid(f"{key} is missing") from error
    except OSError as error:
        raise WeightsInvalid(f"{key} cannot be read: {error}") from error


def _read_bucket(store: ObjectStore, key: str) -> dict[str, RawTensor]:
    try:
        items = safetensors.deserialize(_read(store, key))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise WeightsInvalid(f"{key} is corrupt: {error}") from error
    return {
        name: RawTensor(dtype=item["dtype"], shape=tuple(item["shape"]), data=item["data"])
        for name, item in items
    }


def _buckets(tensors: Mapping[str, RawTensor], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + len(tensor.data) > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += len(tensor.data)
    if names:
        yield names
