"""Events as messages: whatever lies in a topic is an event of ours or is refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.bus import codec
from shared.bus.codec import Undecodable, check_in, dead_letter, decode, encode
from shared.bus.delivery import Partition
from shared.errors import Invalid
from shared.events import PolicyPublished, TurnFailed
from shared.settings import KafkaSettings
from shared.store import FileStore

EVENT = PolicyPublished(policy="p", version=1, step=1, uri="ü💡", digest="d", published_at=0.5)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path)


def test_an_event_reads_back_as_it_was_written(store: FileStore) -> None:
    payload, headers = encode(EVENT, run_id="r", traceparent="t", purpose="eval")
    assert decode(payload, dict(headers), store) == EVENT
    assert dict(headers) == {
        "event": b"PolicyPublished/1",
        "run": b"r",
        "purpose": b"eval",
        "traceparent": b"t",
    }


def test_unknown_fields_are_tolerated_and_unknown_versions_refused(store: FileStore) -> None:
    payload, headers = encode(EVENT, run_id="", traceparent="", purpose="")
    assert decode(payload[:-1] + b',"new": 1}', dict(headers), store) == EVENT
    with pytest.raises(Undecodable) as refused:
        decode(payload, {"event": b"PolicyPublished/2"}, store)
    assert refused.value.reason == "unknown_version"


@pytest.mark.parametrize(
    ("value", "headers", "reason"),
    [
        (b"{}", {}, "unknown_event"),
        (b"{}", {"event": b"\xff/1"}, "unknown_event"),
        (None, {"event": b"PolicyPublished/1"}, "empty"),
        (b"", {"event": b"PolicyPublished/1"}, "not_json"),
        (b"{" * 5000, {"event": b"PolicyPublished/1"}, "not_json"),
        (b'{"policy":"\\ud800"}', {"event": b"PolicyPublished/1"}, "not_json"),
        (b"[]", {"event": b"PolicyPublished/1"}, "wrong_schema"),
        (b'{"published_at": NaN}', {"event": b"PolicyPublished/1"}, "wrong_schema"),
        (b"{}", {"event": b"PolicyPublished/1", "claim": b"1"}, "wrong_schema"),
    ],
)
def test_what_is_no_event_of_ours_is_refused_with_a_reason(
    store: FileStore, value: bytes | None, headers: dict[str, bytes], reason: str
) -> None:
    with pytest.raises(Undecodable) as refused:
        decode(value, headers, store)
    assert refused.value.reason == reason


@given(value=st.binary(max_size=200), claimed=st.booleans())
def test_no_bytes_raise_anything_but_undecodable(
    tmp_path_factory: pytest.TempPathFactory, value: bytes, claimed: bool
) -> None:
    store = FileStore(tmp_path_factory.getbasetemp() / "store")
    headers = {"event": b"TurnFailed/1"} | ({"claim": b"1"} if claimed else {})
    with pytest.raises(Undecodable):
        decode(value, headers, store)


def test_a_claim_is_redeemed_only_for_what_was_checked_in(store: FileStore) -> None:
    payload, headers = encode(EVENT, run_id="", traceparent="", purpose="")
    claim = check_in(store, payload)
    tags = dict(headers) | {"claim": b"1"}
    assert decode(claim, tags, store) == EVENT
    (key,) = store.list("")
    store.put(key, payload + b" ")
    with pytest.raises(Undecodable) as refused:
        decode(claim, tags, store)
    assert refused.value.reason == "claim_corrupt"
    store.delete(key)
    with pytest.raises(Undecodable) as refused:
        decode(claim, tags, store)
    assert refused.value.reason == "claim_missing"


@pytest.mark.parametrize("key", ["../../etc/passwd", "payloads/aa/../../x", "payloads/aa/\0", "/etc/passwd"])
def test_a_claim_that_leaves_the_store_is_refused(store: FileStore, key: str) -> None:
    claim = codec.Claim.model_construct(key=key, sha256="", size=1).model_dump_json().encode()
    with pytest.raises(Undecodable) as refused:
        decode(claim, {"event": b"PolicyPublished/1", "claim": b"1"}, store)
    assert refused.value.reason == "wrong_schema"


def test_text_that_utf8_cannot_hold_is_refused_at_the_producer() -> None:
    failed = TurnFailed(
        run_id="r", trajectory_id="t", attempt=0, turn=0, try_number=0, asker="a", code="c",
        message="\ud800", retryable=False,
    )  # fmt: skip
    with pytest.raises(Invalid, match="TurnFailed"):
        encode(failed, run_id="", traceparent="", purpose="")


@given(
    value=st.none() | st.binary(max_size=3000),
    headers=st.lists(st.tuples(st.text(max_size=20), st.none() | st.binary(max_size=4000)), max_size=20),
    error=st.text(max_size=9000),
)
def test_a_dead_letter_always_fits_and_says_where_it_lay(
    tmp_path_factory: pytest.TempPathFactory,
    value: bytes | None,
    headers: list[tuple[str, bytes]],
    error: str,
) -> None:
    settings = KafkaSettings(inline_limit_bytes=1000)
    store = FileStore(tmp_path_factory.getbasetemp() / "store")
    payload, tags = dead_letter(
        value, headers, origin="turns/0/1", reason="not_json", error=error, store=store, settings=settings
    )
    assert len(payload or b"") <= 1000
    assert sum(len(k.encode()) + len(v or b"") for k, v in tags) <= codec.FRAMING_BYTES
    assert tags[-3:-1] == [("origin", b"turns/0/1"), ("reason", b"not_json")]


# The low watermark


@given(st.permutations(range(8)), st.integers(0, 8))
def test_the_watermark_is_the_first_offset_not_acknowledged(order: list[int], acked: int) -> None:
    partition = Partition()
    for offset in range(8):
        partition.delivered(offset)
    for offset in order[:acked]:
        assert partition.ack(offset)
        assert partition.ack(offset), "a second acknowledgement changes nothing"
    done = set(order[:acked])
    first = next((offset for offset in range(8) if offset not in done), 8)
    assert (partition.watermark or 0) == first
    assert list(partition.outstanding) == list(range(first, 8))
    assert partition.acked == {offset for offset in done if offset > first}


def test_after_a_rewind_what_comes_again_counts_again() -> None:
    partition = Partition()
    for offset in range(5):
        partition.delivered(offset)
    for offset in (0, 1, 3):
        partition.ack(offset)
    partition.rewind(1)
    assert partition.watermark == 1
    for offset in range(1, 5):
        partition.delivered(offset)
    for offset in (4, 2, 1):
        partition.ack(offset)
    assert partition.watermark == 3
    partition.ack(3)
    assert partition.watermark == 5
    assert not partition.acked


def test_a_fenced_partition_counts_no_acknowledgement() -> None:
    partition = Partition()
    partition.delivered(0)
    partition.fence()
    assert not partition.ack(0)
    assert partition.watermark is None
