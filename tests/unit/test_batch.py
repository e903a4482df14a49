"""From trajectories to tensors: ingest checks, masks, micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.training import batch
from shared.errors import Invalid
from shared.events import Sampling, TrajectoryCompleted, TrajectoryScored, TrajectoryStatus


def trajectory(
    token_ids: list[int],
    mask: list[int],
    *,
    name: str = "t",
    group: str = "g",
    status: TrajectoryStatus = TrajectoryStatus.FINISHED,
) -> TrajectoryCompleted:
    return TrajectoryCompleted(
        run_id="r", trajectory_id=name, group_id=group, member=0, attempt=0, task="t", purpose="train",
        split="train", seed=0, status=status, token_ids=token_ids, mask=mask,
        logprobs=[-1.0 if m else 0.0 for m in mask], versions=[0 if m else -1 for m in mask],
        started_at=0.0, completed_at=1.0,
    )  # fmt: skip


def scored(completed: TrajectoryCompleted, reward: float | None = 1.0) -> TrajectoryScored:
    return TrajectoryScored(trajectory=completed, reward=reward, scored_at=2.0)


def samples(*rows: tuple[list[int], list[int]]) -> list[batch.Sample]:
    items = [scored(trajectory(ids, mask, name=f"t{i}")) for i, (ids, mask) in enumerate(rows)]
    return batch.select(items, {f"t{i}": 1.0 for i in range(len(rows))}).samples


@pytest.mark.parametrize("field", ["mask", "logprobs", "versions"])
def test_array_that_was_not_cut_with_the_others_is_refused_by_name(field: str) -> None:
    ten = trajectory([5] * 10, [0] + [1] * 9)
    with pytest.raises(Invalid, match=f"{field} has 12 entries, token_ids 10") as caught:
        batch.check(ten.model_copy(update={field: [0] * 12}))
    assert [f.field for f in caught.value.fields] == [field]


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf, 0.5])
def test_unusable_logprob_of_a_sampled_token_is_refused(bad: float) -> None:
    wrong = trajectory([1, 2, 3], [0, 1, 1]).model_copy(update={"logprobs": [0.0, -1.0, bad]})
    with pytest.raises(Invalid) as caught:
        batch.check(wrong)
    assert caught.value.fields[0].field == "logprobs"


def test_nonfinite_logprob_of_context_is_no_reason_to_refuse() -> None:
    batch.check(trajectory([1, 2, 3], [0, 1, 0]).model_copy(update={"logprobs": [0.0, -1.0, math.nan]}))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mask": [0, 2, 1]}, "mask"),
        ({"mask": [1, 1, 1]}, "mask"),
        ({"token_ids": [1, 2, 9]}, "token_ids"),
        ({"token_ids": [1, -2, 3]}, "token_ids"),
        ({"sampling": Sampling(temperature=0.0)}, "sampling.temperature"),
    ],
)
def test_other_untrainable_fields_are_refused_by_name(changes: dict[str, object], field: str) -> None:
    wrong = trajectory([1, 2, 3], [0, 1, 1]).model_copy(update=changes)
    with pytest.raises(Invalid) as caught:
        batch.check(wrong, vocab_size=9)
    assert caught.value.fields[0].field == field


def test_mask_comes_from_the_trajectory_where_pad_equals_end_of_turn() -> None:
    short, long = samples(([7, 5, 6, 0], [0, 1, 1, 1]), ([7, 5, 6, 0, 3, 0], [0, 1, 1, 1, 0, 1]))
    made = batch.collate([short, long], pad_id=0)
    assert made.mask_BT.int().tolist() == [[0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 0, 1]]
    assert made.input_ids_BT[0].tolist() == [7, 5, 6, 0, 0, 0]


def test_environment_text_is_outside_the_mask_whatever_its_ids() -> None:
    mask = [0] * 5 + [1] * 4 + [0] * 3 + [1] * 5
    for tool in ([1, 2, 3], [8, 8, 8]):
        ids = [4] * 5 + [5] * 4 + tool + [6] * 5
        made = batch.collate(samples((ids, mask)))
        assert made.mask_BT[0].nonzero()[:, 0].tolist() == [5, 6, 7, 8, 12, 13, 14, 15, 16]


def test_generated_length_is_the_sum_of_the_mask() -> None:
    mask = [0] * 3 + [1] * 4 + [0] * 3 + [1] * 5
    assert samples(([1] * 15, mask))[0].sampled == 9


def test_tokens_behind_the_last_sampled_one_are_cut() -> None:
    (sample,) = samples(([1, 2, 3, 4, 5], [0, 1, 1, 0, 0]))
    assert (sample.token_ids, sample.mask, sample.logprobs) == ([1, 2, 3], [0, 1, 1], [0.0, -1.0, -1.0])


def test_what_cannot_train_is_left_out_and_counted() -> None:
    items = [
        scored(trajectory([1, 2], [0, 1], name="good")),
        scored(trajectory([1, 2], [0, 1], name="cut", status=TrajectoryStatus.TRUNCATED)),
        scored(trajectory([1, 2], [0, 1], name="failed"), None),
        scored(trajectory([1, 2], [0, 1], name="flat", group="equal")),
        scored(trajectory([1, 2], [0, 0], name="silent")),
    ]
    advantages = {"good": 1.0, "cut": -1.0, "flat": 0.0, "silent": 0.5}
    options = {"skip_groups": frozenset({"equal"})}
    masked = batch.select(items, advantages, mask_truncated=True, **options)
    assert [s.trajectory_id for s in masked.samples] == ["good"]
    assert (masked.masked_truncated, masked.unrewarded) == (1, 1)
    kept = batch.select(items, advantages, mask_truncated=False, **options)
    assert [s.trajectory_id for s in kept.samples] == ["good", "cut"]


@settings(max_examples=40)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=40), st.integers(64, 300))
def test_micro_batches_hold_every_sample_once_within_the_padded_limit(lengths: list[int], limit: int) -> None:
    made = samples(*(([1] * n, [0] * (n - 1) + [1]) for n in lengths))
    chunks = batch.split(made, max_tokens=limit)
    assert sorted(s.trajectory_id for c in chunks for s in c) == sorted(s.trajectory_id for s in made)
    for chunk in chunks:
        assert batch.collate(chunk).input_ids_BT.numel() <= limit


def test_a_sample_longer_than_the_limit_has_its_own_micro_batch() -> None:
    chunks = batch.split(samples(([1] * 90, [0] * 89 + [1]), ([1, 2], [0, 1])), max_tokens=64)
    assert [[len(s.token_ids) for s in chunk] for chunk in chunks] == [[2], [90]]


def test_survives_the_wire_and_rejects_null_logprobs() -> None:
    event = scored(trajectory([1, 2, 3], [0, 1, 1]))
    back = TrajectoryScored.model_validate_json(event.model_dump_json())
    first, second = (batch.collate(batch.select([e], {"t": 1.0}).samples) for e in (event, back))
    assert torch.equal(first.behaviour_logprobs_BT, second.behaviour_logprobs_BT)
    assert first.sampling == second.sampling
    with pytest.raises(ValueError, match="logprobs"):
        TrajectoryScored.model_validate_json(
            event.model_dump_json().replace("[0.0,-1.0,-1.0]", "[0,null,-1]")
        )
