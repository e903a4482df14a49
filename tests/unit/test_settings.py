"""A misspelt or absurd variable ends the process by name; it is never a default used in silence."""

from __future__ import annotations

import os

import pytest

from services.launcher import environment
from shared.errors import Invalid
from shared.settings import Group, Settings, load_settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = tuple(f"{name.upper()}__" for name in Settings.model_fields)
    for name in list(os.environ):
        if name.upper().startswith(("ROLLART_", *sections)):
            monkeypatch.delenv(name)


def refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> dict[str, str]:
    with monkeypatch.context() as patch:
        patch.setenv(name, value)
        with pytest.raises(Invalid) as caught:
            load_settings()
    return {problem.field: problem.message for problem in caught.value.fields}


def test_without_variables_everything_is_embedded() -> None:
    found = load_settings()
    assert (found.kafka.bootstrap, found.redis.url, found.http.port) == ("embedded", "embedded", 0)
    assert found.keys == frozenset()


def test_variables_are_read_into_their_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "KAFKA__BOOTSTRAP": "broker:9092", "GENERATION__DEVICE_CLASS": "compute", "http__port": "8080",
        "ROLLART_API_KEYS": " a, b ,,", "ROLLART_STORE": "file:///weights", "ROLLART_WORKER_ID": "w",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    found = load_settings()
    assert (found.kafka.bootstrap, found.generation.device_class, found.http.port) == (
        "broker:9092",
        "compute",
        8080,
    )
    assert found.keys == frozenset({"a", "b"})
    assert (found.store_uri, found.process_id) == ("file:///weights", "w")
    assert found.kafka.prefix == "rollart."


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("KAFKA__BOOTSTRAB", "did you mean KAFKA__BOOTSTRAP?"),
        ("ROLLART_API_KEY", "did you mean ROLLART_API_KEYS?"),
        ("ROLLART_NOTHING_LIKE_IT_AT_ALL_ANYWHERE", "unknown setting"),
        ("HTTP__PORT__X", "unknown setting"),
        ("generation__engin", "did you mean GENERATION__ENGINE?"),
    ],
)
def test_a_misspelt_variable_is_told_with_the_right_one(
    monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    found = refused(monkeypatch, name, "1")
    assert list(found) == [name]
    assert said in found[name]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("HTTP__PORT", ["-1", "65536", "x", "", "1.5", "nan", "1e9"]),
        ("HTTP__GRACE_S", ["nan", "inf", "-1", "601", ""]),
        ("KAFKA__PROTOCOL", ["classical", ""]),
        ("KAFKA__PREFIX", ["a b", "a/b"]),
        ("KAFKA__PARTITIONS", ["0", "1" + "0" * 30]),
        ("KAFKA__BOOTSTRAP", [""]),
        ("REDIS__URL", [""]),
        ("GENERATION__ROLE", ["prefil"]),
        ("GENERATION__DEVICE_CLASS", ["Compute", "", "a" * 40, "a.b"]),
        ("GENERATION__MAX_BATCH", ["0", "true"]),
        ("ENVIRONMENT__TRY_DEADLINE_S", ["0", "NaN", "Infinity"]),
        ("REWARD__TIMEOUT_S", ["0", "1e308"]),
        ("TELEMETRY__LOG_LEVEL", ["loud"]),
    ],
)
def test_a_value_out_of_range_is_told_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, values: list[str]
) -> None:
    for value in values:
        assert name in refused(monkeypatch, name, value), value


def test_variables_of_others_and_of_the_command_line_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KAFKA_HOME", "ROLLART_URL", "ROLLART_KEY", "ROLLART_CHILD", "PATHOLOGY", "HTTP_PROXY"):
        monkeypatch.setenv(name, "x")
    load_settings()


def test_a_child_loads_the_very_settings_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA__FETCH_WAIT_MS", "5")
    monkeypatch.setenv("ROUTER__STRATEGY", "least_loaded")
    monkeypatch.setenv("ROLLART_RUNS_DIR", "/elsewhere")
    parent = load_settings()
    for name, value in environment(parent).items():
        monkeypatch.setenv(name, value)
    assert load_settings() == parent


def test_every_section_is_strict_and_refuses_what_is_not_finite() -> None:
    sections = [f.annotation for f in Settings.model_fields.values() if isinstance(f.annotation, type)]
    groups = [section for section in sections if issubclass(section, Group)]
    assert len(groups) >= 8
    for group in groups:
        assert group.model_config.get("extra") == "forbid"
        assert group.model_config.get("allow_inf_nan") is False
