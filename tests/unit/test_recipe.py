"""A recipe is refused by the name of what is wrong in it, before anything starts."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import recipe
from shared.errors import Invalid
from shared.recipe import Recipe
from shared.sections import Section

ROOT = Path(__file__).parents[2]
GOOD: dict[str, object] = {"tasks": {"lake": {"environment": "frozenlake"}}}


def with_value(path: str, value: object) -> dict[str, object]:
    data = copy.deepcopy(GOOD)
    inner = data
    *parents, last = path.split(".")
    for parent in parents:
        inner = inner.setdefault(parent, {})  # type: ignore[assignment]
    inner[last] = value
    return data


def problems(data: object) -> dict[str, str]:
    with pytest.raises(Invalid) as caught:
        recipe.validate(data)
    assert caught.value.fields
    json.dumps(caught.value.to_problem().model_dump(mode="json"), allow_nan=False)
    return {problem.field: problem.message for problem in caught.value.fields}


def _accepted(data: object) -> Recipe | None:
    try:
        return recipe.validate(data)
    except Invalid:
        return None


def numbers(section: type[Section], prefix: str = "") -> list[tuple[str, bool]]:
    """Every numeric key of the recipe and whether it is whole."""
    found = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found += numbers(field.annotation, f"{prefix}{name}.")
        elif field.annotation in (int, float):
            found.append((prefix + name, field.annotation is int))
    return found


NUMBERS = numbers(Recipe) + numbers(recipe.Task, "tasks.lake.")


def test_the_smallest_recipe_is_one_task_and_everything_else_has_a_default() -> None:
    found = recipe.validate(GOOD)
    assert list(found.tasks) == ["lake"]
    assert found.rollout.max_staleness == 1
    assert recipe.validate(json.loads(found.model_dump_json())) == found


def test_every_numeric_key_is_covered_here() -> None:
    assert len(NUMBERS) > 30
    assert ("training.learning_rate", False) in NUMBERS
    assert ("tasks.lake.max_turns", True) in NUMBERS


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, "NaN", "1", "", True, None, [], {}, -1e308, 10**30]
)
def test_no_number_takes_what_is_none_or_absurd(value: object) -> None:
    for path, _ in NUMBERS:
        assert path in problems(with_value(path, value)), path


def test_whole_numbers_take_no_fractions_and_none_is_negative() -> None:
    for path, whole in NUMBERS:
        if whole:
            assert path in problems(with_value(path, 1.5)), path
        assert path in problems(with_value(path, -1)), path


@pytest.mark.parametrize(
    ("data", "field", "said"),
    [
        (with_value("training.learning_rat", 5e-5), "training.learning_rat", "did you mean 'learning_rate'"),
        (with_value("learning_rate", 5e-5), "learning_rate", "it belongs in [training]"),
        (with_value("rollout.learning_rate", 5e-5), "rollout.learning_rate", "it belongs in [training]"),
        (with_value("tasks.lake.group_size", 4), "tasks.lake.group_size", "it belongs in [rollout]"),
        (with_value("training.seed", 4), "training.seed", "the top level"),
        (with_value("trainin", {}), "trainin", "did you mean 'training'"),
        (
            with_value("tasks.lake.environment", "frozenlak"),
            "tasks.lake.environment",
            "did you mean 'frozenlake'",
        ),
        (with_value("tasks.lake.environment", "no.such:Thing"), "tasks.lake.environment", "cannot load"),
        (with_value("tasks.lake.environment", "json:Nope"), "tasks.lake.environment", "cannot load"),
        (with_value("tasks.lake.environment", ""), "tasks.lake.environment", "unknown environment"),
        (with_value("tasks.lake.reward", "succes"), "tasks.lake.reward", "did you mean 'success'"),
        (with_value("tasks.lake.config", {"sise": 4}), "tasks.lake.config.sise", "unknown key"),
        (with_value("tasks.lake.config", {"size": -4}), "tasks.lake.config.size", "greater"),
        (with_value("tasks.lake.config", {"ice": math.nan}), "tasks.lake.config.ice", "finite"),
        (with_value("tasks.lake.reward_config", {"x": 1}), "tasks.lake.reward_config.x", "unknown key"),
        (with_value("training.algorithm", "gpro"), "training.algorithm", "did you mean 'grpo'"),
        (with_value("tasks", {}), "tasks", "at least 1"),
        (with_value("tasks", {"Bad Name": {"environment": "frozenlake"}}), "tasks.Bad Name.[key]", "pattern"),
        (with_value("name", "../x"), "name", "pattern"),
        (with_value("name", "a\n"), "name", "pattern"),
        (with_value("model", ""), "model", "at least 1"),
        (with_value("model", 3), "model", "string"),
        (with_value("training.betas", [0.9]), "training.betas.1", "required"),
        (with_value("tiny.heads", 3), "tiny", "hidden_size must be heads"),
        (with_value("tasks.lake.max_tokens_per_turn", 512), "(whole input)", "below rollout.context_window"),
        (with_value("warm_start.episodes", 0), "(whole input)", "warm_start.episodes must be above 0"),
        (
            with_value("rollout", {"groups_per_step": 65_536, "group_size": 1024}),
            "(whole input)",
            "rollout.groups_per_step × rollout.group_size",
        ),
        (with_value("tasks.lake.environment", "json:JSONDecoder"), "tasks.lake.environment", "`Config`"),
        (with_value("tasks.lake.reward", "json:dumps"), "tasks.lake.reward", "`Config`"),
        ([], "(whole input)", "dictionary"),
        (None, "(whole input)", "dictionary"),
        ({}, "tasks", "required"),
    ],
)
def test_each_mistake_is_told_by_its_key_and_its_fix(data: object, field: str, said: str) -> None:
    found = problems(data)
    assert field in found, found
    assert said in found[field]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise OSError('no display')", "OSError: no display"),
        ("import sys; sys.exit(7)", "SystemExit: 7"),
        ("def broken(:", "SyntaxError"),
    ],
)
@pytest.mark.parametrize(("key", "name"), [("environment", "Env"), ("reward", "Scorer")])
def test_a_plugin_that_fails_at_import_is_a_wrong_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str, key: str, name: str
) -> None:
    (tmp_path / "plugin_that_fails.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    field = f"tasks.lake.{key}"
    assert said in problems(with_value(field, f"plugin_that_fails:{name}"))[field]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "a\0b"])
def test_text_that_cannot_be_stored_is_refused_wherever_it_is(text: str) -> None:
    assert "model" in problems(with_value("model", text))
    problems(with_value("tasks.lake.environment", text))
    problems(with_value("tasks.lake.config", {"size": text}))
    problems(with_value("tasks.lake.config", {text: 1}))


def test_all_mistakes_are_told_at_once() -> None:
    data = with_value("training.steps", 0)
    data["rollout"] = {"group_siz": 1}
    assert set(problems(data)) == {"training.steps", "rollout.group_siz"}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*Recipe.model_fields, "lake", "environment", "config", "steps"]),
                inner,
                max_size=3,
            )
        ),
        max_leaves=12,
    )
)
def test_anything_at_all_is_a_recipe_or_invalid(data: object) -> None:
    if _accepted(data) is None:
        assert problems(data)


def test_files_that_cannot_be_read_are_told_by_their_path(tmp_path: Path) -> None:
    bad = {
        "syntax.toml": b"[training",
        "latin.toml": "name = 'Zürich'".encode("latin-1"),
        "twice.toml": b"a=1\na=2",
        "deep.toml": b"a=" + b"[" * 5000 + b"]" * 5000,
        "large.toml": b"#" * 5_000_000,
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    for path in (tmp_path / "missing.toml", tmp_path, *(tmp_path / name for name in bad)):
        with pytest.raises(Invalid) as caught:
            recipe.load(path)
        assert [problem.field for problem in caught.value.fields] == [str(path)]


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_the_recipes_that_ship_are_valid_and_have_the_name_of_their_file(path: Path) -> None:
    assert recipe.load(path).name == path.stem
