"""The trainer on a tiny model: same distribution as sampling, split invariance, refusal, resume."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from services.training import batch, checkpoint
from services.training.logprobs import TokenScorer
from services.training.mismatch import mismatch
from services.training.trainer import StepStats, Trainer, learning_rate
from shared.errors import Internal, Invalid
from shared.events import Sampling, TrajectoryCompleted, TrajectoryScored, TrajectoryStatus
from shared.recipe import Recipe, Training

VOCAB = 24
Groups = dict[str, list[TrajectoryScored]]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    """Tiny tensors lose more to thread hand-over than they gain."""
    torch.set_num_threads(1)


def tiny(*, seed: int = 0, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
            tie_word_embeddings=tied, initializer_range=0.3,
        )
    )  # fmt: skip


def recipe(**training: object) -> Recipe:
    return Recipe.model_validate(
        {"tasks": {"t": {"environment": "frozenlake"}}, "training": {"learning_rate": 1e-2, **training}}
    )


@torch.no_grad()
def behaviour_logprobs(model: PreTrainedModel, ids: list[int], temperature: float) -> list[float]:
    """log p(token t | tokens before t) by the plain forward pass; 0.0 for the first."""
    logits = model(input_ids=torch.tensor([ids])).logits[0].float()
    table = torch.log_softmax(logits / temperature, dim=-1)
    return [0.0] + [table[t - 1, ids[t]].item() for t in range(1, len(ids))]


def play(
    model: PreTrainedModel,
    group: str,
    member: int,
    reward: float | None,
    *,
    temperature: float = 1.0,
    status: TrajectoryStatus = TrajectoryStatus.FINISHED,
) -> TrajectoryScored:
    """A trajectory of 2–4 turns with the log-probabilities that `model` gives its tokens."""
    rng = torch.Generator().manual_seed(member * 1000 + sum(map(ord, group)))
    ids: list[int] = []
    mask: list[int] = []
    for _ in range(2 + member % 3):
        ids += torch.randint(0, VOCAB, (6,), generator=rng).tolist()
        mask += [0, 0, 0, 0, 1, 1]
    ids.append(1)
    mask.append(0)
    stored = behaviour_logprobs(model, ids, temperature)
    completed = TrajectoryCompleted(
        run_id="r", trajectory_id=f"r/{group}.{member}#0", group_id=f"r/{group}", member=member, attempt=0,
        task="t", purpose="train", split="train", seed=0, status=status, token_ids=ids, mask=mask,
        logprobs=[value if m else 0.0 for value, m in zip(stored, mask, strict=True)],
        versions=[0 if m else -1 for m in mask], sampling=Sampling(temperature=temperature),
        started_at=0.0, completed_at=1.0,
    )  # fmt: skip
    return TrajectoryScored(trajectory=completed, reward=reward, scored_at=2.0)


def played(model: PreTrainedModel, rewards: Mapping[str, list[float | None]], **options: float) -> Groups:
    return {
        f"r/{group}": [play(model, group, member, r, **options) for member, r in enumerate(values)]  # type: ignore[arg-type]
        for group, values in rewards.items()
    }


def parameters(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def largest_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


REWARDS: dict[str, list[float | None]] = {"a": [0.0, 1.0, 0.0, 1.0], "b": [1.0, 0.0, 3.0]}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_equal_weights_give_ratio_one_at_any_temperature(temperature: float) -> None:
    model = tiny()
    stats = Trainer(model, recipe=recipe()).step(played(model, REWARDS, temperature=temperature))
    assert stats.mismatch_kl == pytest.approx(0.0, abs=1e-8)
    assert stats.ratio_max == pytest.approx(1.0, abs=1e-4)
    assert stats.ess == pytest.approx(1.0, abs=1e-6)
    assert stats.chi2 == pytest.approx(0.0, abs=1e-4)
    assert stats.clip_fraction_positive == stats.clip_fraction_negative == 0.0


def test_a_sampler_that_is_not_the_trained_policy_raises_the_alarm_at_equal_weights_only() -> None:
    recipe_ = recipe()
    agreeing, other = played(tiny(), REWARDS), played(tiny(seed=5), REWARDS)
    version = max(other["r/a"][0].trajectory.versions)
    expected = ((agreeing, version, False), (other, version, True), (other, version + 1, False))
    for groups, at, alarm in expected:
        stats = Trainer(tiny(), recipe=recipe_).step(groups)
        members = [scored for group in groups.values() for scored in group]
        said = mismatch(stats, members, version=at, limit=recipe_.training.max_mismatch_kl)
        assert (said is not None) == alarm


def test_temperature_divides_logits_before_the_softmax() -> None:
    scorer = TokenScorer(_fixed_logits([2.0, 0.0]))
    sample = batch.Sample("t", [1, 0], [0, 1], [0.0, 0.0], 1.0, Sampling(temperature=0.5))
    logprobs_BT, _ = scorer(batch.collate([sample]), entropy_grad=False)
    assert logprobs_BT[0, 1].item() == pytest.approx(-0.018150, abs=1e-6)


@pytest.mark.parametrize(
    ("sampling", "support"),
    [
        (Sampling(top_k=2), [0, 1]),
        (Sampling(top_p=0.7), [0, 1]),
        (Sampling(top_p=0.01), [0]),
        (Sampling(top_k=3, top_p=0.99), [0, 1, 2]),
        (Sampling(top_k=9), [0, 1, 2, 3]),
    ],
)
def test_logprobs_are_renormalised_over_the_sampling_support(sampling: Sampling, support: list[int]) -> None:
    weights = [8.0, 4.0, 2.0, 1.0]
    scorer = TokenScorer(_fixed_logits([math.log(w) for w in weights]))
    for token in range(4):
        sample = batch.Sample("t", [1, token], [0, 1], [0.0, 0.0], 1.0, sampling)
        logprobs_BT, entropy_BT = scorer(batch.collate([sample]), entropy_grad=False)
        mass = [weights[i] for i in {*support, token}]
        probs = [m / sum(mass) for m in mass]
        assert logprobs_BT[0, 1].item() == pytest.approx(math.log(weights[token] / sum(mass)), abs=1e-6)
        assert entropy_BT[0, 1].item() == pytest.approx(-sum(p * math.log(p) for p in probs), abs=1e-6)


def _fixed_logits(logits: list[float]) -> LlamaForCausalLM:
    """A model whose logits are the same at every position: embeddings all equal, layers that add nothing."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(logits), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                    num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=False, rms_norm_eps=0.0)
    )  # fmt: skip
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "proj" in name:
                tensor.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight.copy_(torch.tensor(logits)[:, None].expand(-1, 8) / 8)
    return model


def test_head_on_sampled_positions_equals_full_logits() -> None:
    torch.manual_seed(0)
    capped = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, pad_token_id=0,
            final_logit_softcapping=0.5, initializer_range=0.5,
        )
    )  # fmt: skip
    for model, expected in ((tiny(), True), (tiny(tied=False), True), (capped, False)):
        scorer = TokenScorer(model)
        assert scorer.uses_head_on_sampled_only is expected
        samples = batch.select(
            (members := played(model, REWARDS))["r/a"] + members["r/b"], _ones(members)
        ).samples
        for chunk in batch.split(samples, max_tokens=64):
            made = batch.collate(chunk)
            with torch.no_grad():
                logprobs_BT, _ = scorer(made, entropy_grad=False)
            torch.testing.assert_close(logprobs_BT, made.behaviour_logprobs_BT, rtol=0, atol=1e-5)


def _ones(groups: Groups) -> dict[str, float]:
    return {item.trajectory.trajectory_id: 1.0 for members in groups.values() for item in members}


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
def test_result_does_not_depend_on_micro_batches_or_order(aggregation: str) -> None:
    groups = played(tiny(seed=1), REWARDS)
    shuffled = {name: list(reversed(groups[name])) for name in reversed(groups)}
    results: list[tuple[StepStats, dict[str, Tensor]]] = []
    for size, batch_groups in ((16_384, groups), (64, groups), (100, shuffled)):
        model = tiny()
        settings = recipe(
            micro_batch_tokens=size, loss_aggregation=aggregation, entropy_coef=0.01, grad_clip=1000.0
        )
        trainer = Trainer(model, recipe=settings)
        trainer._optimiser = torch.optim.SGD(model.parameters(), lr=1.0)  # plain gradients, not their signs
        results.append((trainer.step(batch_groups), parameters(trainer)))
    first_stats, first = results[0]
    assert largest_difference(first, tiny().state_dict()) > 1e-4
    for stats, found in results[1:]:
        assert stats.loss == pytest.approx(first_stats.loss, rel=1e-6, abs=1e-6)
        assert stats.entropy == pytest.approx(first_stats.entropy, abs=1e-5)
        assert largest_difference(found, first) < 1e-6


def test_training_raises_the_probability_of_what_was_rewarded() -> None:
    model = tiny()
    groups = played(model, REWARDS)
    trainer = Trainer(model, recipe=recipe(epochs=4))
    before = copy.deepcopy(trainer.model)
    stats = trainer.step(groups)
    assert (stats.optimiser_steps, stats.sequences) == (4, 7)
    gains = {0.0: 0.0, 1.0: 0.0}
    for item in groups["r/a"]:
        ids, mask = item.trajectory.token_ids, item.trajectory.mask
        new, old = (behaviour_logprobs(m, ids, 1.0) for m in (trainer.model, before))
        gain = sum((n - o) * m for n, o, m in zip(new, old, mask, strict=True))
        gains[item.reward or 0.0] += gain
    assert gains[1.0] > 0 > gains[0.0]


def test_groups_without_a_gradient_are_counted_and_change_nothing() -> None:
    model = tiny()
    others: dict[str, list[float | None]] = {"equal": [1.0] * 4, "single": [2.0, None], "void": [None, None]}
    alone, together = Trainer(tiny(), recipe=recipe()), Trainer(tiny(), recipe=recipe())
    alone.step(played(model, REWARDS))
    stats = together.step(played(model, {**others, **REWARDS}))
    assert (stats.zero_variance_groups, stats.singleton_groups, stats.unrewarded) == (1, 1, 3)
    assert stats.sequences == 7
    assert largest_difference(parameters(alone), parameters(together)) < 1e-6


def test_a_batch_without_any_gradient_leaves_the_model_but_counts_as_a_step() -> None:
    model = tiny()
    trainer = Trainer(model, recipe=recipe(weight_decay=0.5))
    before = parameters(trainer)
    stats = trainer.step(played(model, {"equal": [1.0] * 3}))
    assert (stats.optimiser_steps, stats.skipped, stats.zero_variance_groups) == (0, 0, 1)
    assert largest_difference(parameters(trainer), before) == 0.0
    assert trainer.steps_done == 1


def test_masked_truncated_trajectories_stay_in_their_groups_statistics() -> None:
    model = tiny()
    rewards = [0.0, 1.0, 5.0]
    groups = {"r/a": [
        play(model, "a", i, r, status=TrajectoryStatus.TRUNCATED if i == 2 else TrajectoryStatus.FINISHED)
        for i, r in enumerate(rewards)
    ]}  # fmt: skip
    stats = Trainer(model, recipe=recipe(mask_truncated=True)).step(groups)
    assert (stats.masked_truncated, stats.sequences) == (1, 2)
    kept = groups["r/a"][:2]
    assert stats.tokens_trained == sum(sum(item.trajectory.mask) for item in kept)
    # Both kept ones are below the mean of the three, so the loss Σ −A over the tokens is positive.
    deviation = math.sqrt(sum((r - 2) ** 2 for r in rewards) / 3)
    tokens = [sum(item.trajectory.mask) for item in kept]
    expected = (2 * tokens[0] + 1 * tokens[1]) / deviation / sum(tokens)
    assert stats.loss == pytest.approx(expected, rel=1e-4)


def test_untrainable_trajectory_is_left_out_and_the_rest_is_trained() -> None:
    model = tiny()
    groups = played(model, REWARDS)
    for change in ({"logprobs": [math.nan] * 100}, {"token_ids": [VOCAB] * 100}):
        good = groups["r/a"][0]
        n = len(good.trajectory.token_ids)
        wrong = good.trajectory.model_copy(update={name: values[:n] for name, values in change.items()})
        bad = {**groups, "r/a": [good.model_copy(update={"trajectory": wrong}), *groups["r/a"][1:]]}
        stats = Trainer(tiny(), recipe=recipe()).step(bad)
        assert (stats.rejected, stats.sequences, stats.optimiser_steps) == (1, 6, 1)


def test_nonfinite_model_takes_no_step_and_says_so() -> None:
    groups = played(tiny(), REWARDS)
    model = tiny()
    with torch.no_grad():
        model.model.norm.weight[0] = math.nan
    trainer = Trainer(model, recipe=recipe(epochs=3, weight_decay=0.5))
    before = parameters(trainer)
    stats = trainer.step(groups)
    assert (stats.skipped, stats.optimiser_steps, stats.tokens_trained) == (1, 0, 0)
    for name, tensor in parameters(trainer).items():
        assert torch.equal(tensor, before[name]) or name == "model.norm.weight"


def test_a_trajectory_twice_in_one_batch_is_refused() -> None:
    model = tiny()
    groups = played(model, REWARDS)
    groups["r/a"].append(groups["r/a"][0])
    with pytest.raises(Internal, match="twice"):
        Trainer(model, recipe=recipe()).step(groups)


def test_off_policy_data_shows_in_the_diagnostics() -> None:
    stats = Trainer(tiny(), recipe=recipe(epochs=2)).step(played(tiny(seed=5), REWARDS))
    assert stats.mismatch_kl > 0.01
    assert 0.0 < stats.ess < 0.99
    assert stats.chi2 > -1.0
    assert stats.ratio_max > 1.28
    assert stats.clip_fraction_positive > 0.0
    assert stats.clip_fraction_negative > 0.0


def test_learning_rate_warms_up_linearly_and_is_reported() -> None:
    training = Training(learning_rate=0.4, warmup_steps=4)
    assert [learning_rate(s, training) for s in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert learning_rate(0, Training(learning_rate=0.4, warmup_steps=0)) == 0.4
    falling = Training(learning_rate=0.4, warmup_steps=2, steps=7, final_learning_rate_share=0.5)
    assert [learning_rate(s, falling) for s in range(9)] == pytest.approx(
        [0.2, 0.4, 0.4, 0.35, 0.3, 0.25, 0.2, 0.2, 0.2]
    )


def test_two_steps_resume_two_steps_equals_four_steps(tmp_path: Path) -> None:
    settings = recipe(warmup_steps=3, weight_decay=0.1, epochs=2)
    batches = [played(tiny(seed=s), REWARDS) for s in range(4)]
    straight = Trainer(tiny(), recipe=settings)
    rates = [straight.step(groups).learning_rate for groups in batches]
    first = Trainer(tiny(), recipe=settings)
    resumed_rates = [first.step(groups).learning_rate for groups in batches[:2]]
    path = checkpoint.save(tmp_path, step=2, state=first.state_dict(), ledger={})
    second = Trainer(tiny(seed=9), recipe=settings)
    second.load_state_dict(checkpoint.load(path).state)
    moments = [s["exp_avg_sq"].abs().max().item() for s in second._optimiser.state.values()]
    assert moments
    assert min(moments) > 0
    resumed_rates += [second.step(groups).learning_rate for groups in batches[2:]]
    assert resumed_rates == rates
    assert largest_difference(parameters(straight), parameters(second)) < 1e-6


def test_state_of_another_model_is_refused() -> None:
    other = _fixed_logits([0.0, 1.0])
    with pytest.raises(Invalid, match="not a state"):
        Trainer(tiny(), recipe=recipe()).load_state_dict(Trainer(other, recipe=recipe()).state_dict())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_raw_weights_hold_every_tensor_and_tied_ones_once(tied: bool, dtype: torch.dtype) -> None:
    model = tiny(tied=tied)
    model.to(dtype)  # type: ignore[arg-type]
    raw = Trainer(model, recipe=recipe()).raw_weights()
    assert ("lm_head.weight" in raw) is not tied
    for name, tensor in model.state_dict().items():
        if name not in raw:
            continue
        assert raw[name].shape == tuple(tensor.shape)
        assert raw[name].dtype == {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
        back = torch.frombuffer(bytearray(raw[name].data), dtype=dtype).view(tensor.shape)
        assert torch.equal(back, tensor)
    assert set(model.state_dict()) - set(raw) == ({"lm_head.weight"} if tied else set())
