"""The built-in environments: deterministic by seed, disjoint splits, patient with nonsense."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic import ValidationError

from services.environment.envs.frozen_lake import FrozenLake, draw_layout, split_of
from services.environment.envs.guess_number import GuessNumber
from services.environment.protocol import Demonstrator, Step
from shared import registry
from shared.errors import Invalid


def lake(**config: object) -> FrozenLake:
    return FrozenLake(FrozenLake.Config.model_validate(config))


def game(**config: object) -> GuessNumber:
    return GuessNumber(GuessNumber.Config.model_validate(config))


def play(environment: FrozenLake | GuessNumber, *, seed: int, skill: float, turns: int) -> list[str | Step]:
    rng = random.Random(seed)
    seen: list[str | Step] = [environment.reset(seed=seed, split="train")]
    for _ in range(turns):
        step = environment.step(environment.scripted_action(rng, skill=skill))
        seen.append(step)
        if step.terminated:
            break
    environment.close()
    return seen


def success(make: Callable[[], FrozenLake | GuessNumber], *, skill: float, turns: int) -> float:
    rewards = [play(make(), seed=seed, skill=skill, turns=turns)[-1] for seed in range(100)]
    return sum(step.reward for step in rewards if isinstance(step, Step)) / len(rewards)


def test_no_map_of_the_eval_split_occurs_in_the_train_split() -> None:
    train = {draw_layout(seed, split="train", size=4, ice=0.8) for seed in range(250)}
    held_out = {draw_layout(seed, split="eval", size=4, ice=0.8) for seed in range(250)}
    assert not train & held_out
    assert len(train) > 150
    assert len(held_out) > 80
    assert {split_of(layout) for layout in held_out} == {"eval"}


def test_every_map_can_be_solved_by_the_scripted_player() -> None:
    assert success(lake, skill=1.0, turns=16) == 1.0


def test_scripted_play_gets_better_with_skill() -> None:
    for make, turns in ((lake, 12), (game, 5)):
        results = [success(make, skill=skill, turns=turns) for skill in (0.0, 0.5, 1.0)]
        assert results[0] < results[1] < results[2] == 1.0


@pytest.mark.parametrize("make", [lake, game])
def test_the_same_seed_gives_the_same_episode_beside_noisy_neighbours(
    make: Callable[[], FrozenLake | GuessNumber],
) -> None:
    def episode(seed: int) -> list[str | Step]:
        return play(make(), seed=seed, skill=0.5, turns=8)

    with ThreadPoolExecutor(8) as pool:
        wanted = [pool.submit(episode, 7) for _ in range(4)]
        noise = [pool.submit(episode, seed) for seed in range(100, 140)]
        episodes = [future.result() for future in wanted]
        others = [future.result() for future in noise]
    assert all(other == episodes[0] for other in episodes)
    assert any(other != episodes[0] for other in others)


def test_slippery_ice_is_the_same_for_the_same_seed() -> None:
    def slide() -> list[str]:
        environment = lake(is_slippery=True, ice=0.95)
        return [
            environment.reset(seed=3, split="train"),
            *(environment.step("right").observation for _ in range(6)),
        ]

    assert slide() == slide()


def test_the_player_is_told_what_lies_around_it() -> None:
    environment = lake()
    environment.reset(seed=0, split="train")
    environment._layout = ("SFFF", "FHFF", "FFFF", "FFFG")
    assert environment._describe() == "left edge\ndown ice\nright ice\nup edge\ngoal down right"


def test_the_player_sees_its_trail() -> None:
    environment = lake()
    environment.reset(seed=0, split="train")
    way = next(word for word in ("down", "right") if f"{word} ice" in environment._describe())
    back = {"down": "up trail", "right": "left trail"}[way]
    assert back in environment.step(way).observation


def test_scripted_moves_never_end_in_a_hole() -> None:
    for seed in range(50):
        last = play(lake(ice=0.6), seed=seed, skill=0.0, turns=30)[-1]
        assert isinstance(last, Step)
        assert last.terminated == (last.reward == 1.0)


def test_the_compass_follows_the_player() -> None:
    environment = lake()
    environment.reset(seed=0, split="train")
    places = {(0, 0): "goal down right", (3, 0): "goal right", (0, 3): "goal down", (3, 3): "goal here"}
    for (row, column), expected in places.items():
        assert environment._compass(row, column) == expected


def test_a_malformed_move_is_not_executed_and_spends_a_turn() -> None:
    environment = lake()
    first = environment.reset(seed=1, split="train")
    for text in ("", "north", '{"move": ', "left or right", "leftright", "\x00\u202e"):
        step = environment.step(text)
        assert step.observation.startswith("Answer left, down, right or up.")
        assert step.observation.splitlines()[1:] == first.splitlines()[1:]
        assert (step.reward, step.terminated, step.truncated) == (0.0, False, False)


def test_a_move_is_found_in_a_sentence() -> None:
    plain, wordy = lake(), lake()
    plain.reset(seed=1, split="train")
    wordy.reset(seed=1, split="train")
    assert plain.step("right") == wordy.step("I will go RIGHT.")


def test_a_guess_is_answered_with_what_is_left() -> None:
    environment = game(highest=16, guesses=5)
    environment.reset(seed=1, split="train")
    environment._secret = 11
    assert environment.step("8").observation == "higher\nfrom 9 to 16"
    assert environment.step("12").observation == "lower\nfrom 9 to 11"
    assert environment.step("3").observation == "higher\nfrom 9 to 11"
    assert environment.step("the answer is 11") == Step("correct", 1.0, True, False)


def test_a_malformed_guess_is_a_guess_lost() -> None:
    environment = game(highest=16, guesses=3)
    environment.reset(seed=1, split="train")
    assert environment.step("high").observation == "Answer one number.\nfrom 1 to 16"
    assert not environment.step("1 2").terminated
    assert environment.step("9" * 10_000) == Step("Answer one number.\nfrom 1 to 16", 0.0, True, False)


def test_the_game_is_lost_with_the_last_guess() -> None:
    environment = game(highest=16, guesses=2)
    environment.reset(seed=1, split="train")
    environment._secret = 11
    assert not environment.step("1").terminated
    last = environment.step("2")
    assert last.terminated
    assert last.reward == 0.0


def test_every_secret_occurs() -> None:
    secrets = set()
    for seed in range(200):
        environment = game(highest=9, guesses=4)
        environment.reset(seed=seed, split="train")
        secrets.add(environment._secret)
    assert secrets == set(range(1, 10))


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (FrozenLake, {"sizes": 4}),
        (FrozenLake, {"size": 2}),
        (FrozenLake, {"size": True}),
        (FrozenLake, {"size": "4"}),
        (FrozenLake, {"ice": float("nan")}),
        (FrozenLake, {"ice": float("inf")}),
        (GuessNumber, {"highest": 10**30}),
        (GuessNumber, {"guesses": 0}),
        (GuessNumber, {"highest": 4, "guesses": 4}),
    ],
)
def test_a_wrong_config_is_refused(
    make: type[FrozenLake] | type[GuessNumber], config: dict[str, object]
) -> None:
    with pytest.raises(ValidationError):
        make.Config.model_validate(config)


def test_the_registry_names_the_wrong_key() -> None:
    with pytest.raises(Invalid) as caught:
        registry.configure("environment", "frozenlake", {"is_slipery": True}, field="tasks.walk.config")
    assert [problem.field for problem in caught.value.fields] == ["tasks.walk.config.is_slipery"]


def test_both_can_play_themselves() -> None:
    assert isinstance(lake(), Demonstrator)
    assert isinstance(game(), Demonstrator)


def test_checking_a_config_imports_neither_gymnasium_nor_numpy() -> None:
    code = (
        "import sys; from shared import registry;"
        "registry.configure('environment', 'frozenlake', {'size': 5});"
        "registry.configure('environment', 'guess_number', {});"
        "sys.exit(bool({'gymnasium', 'numpy', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
