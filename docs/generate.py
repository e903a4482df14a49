"""Writes the reference pages from where their facts are defined: `make docs`.

Recipe keys, settings, metrics and topics are documented in the code that reads them; these pages only show
it. A test compares them with what is committed.
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shared import metrics, topics
from shared.recipe import Recipe, Task
from shared.sections import Section
from shared.settings import Group, Settings
from tests import cases

HERE = Path(__file__).parent
_MADE = "<!-- Made by `make docs`; edit the code it comes from. -->\n"


def recipe_page() -> str:
    """Every recipe key."""
    lines = [_MADE, "# The recipe\n", _doc(Recipe)]
    lines.append("\nA recipe is a TOML file, or the same as JSON over REST.\n")
    lines += ["\n## Top level\n", *_table(Recipe, skip_sections=True)]
    for name, field in Recipe.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            lines += [f"\n## [{name}]\n", _doc(kind) + "\n", *_table(kind)]
    lines += ["\n## [tasks.NAME]\n", _doc(Task) + "\n", *_table(Task)]
    return "\n".join(lines) + "\n"


def settings_page() -> str:
    """Every environment variable."""
    lines = [_MADE, "# Settings\n"]
    lines.append("Environment variables of every process. An unknown one of ours is refused by name.\n")
    lines += ["| variable | default | |", "|---|---|---|"]
    for field in Settings.model_fields.values():
        if isinstance(field.validation_alias, str):
            lines.append(f"| `{field.validation_alias}` | {_default(field)} | {_text(field)} |")
    for name, field in Settings.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Group):
            lines += [f"\n## {name}\n", "| variable | default | |", "|---|---|---|"]
            for key, inner in kind.model_fields.items():
                variable = f"{name.upper()}__{key.upper()}"
                lines.append(f"| `{variable}` | {_default(inner)} | {_text(inner)} |")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Every Prometheus metric."""
    lines = [
        _MADE,
        "# Metrics\n",
        "`GET /metrics` of every service. Ids are never labels.\n",
    ]
    lines += ["| metric | kind | labels | |", "|---|---|---|---|"]
    for item in vars(metrics).values():
        if isinstance(item, MetricWrapperBase):
            family = next(iter(item.describe()))
            labels = ", ".join(item._labelnames) or "–"
            lines.append(f"| `{family.name}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(lines) + "\n"


def topics_page() -> str:
    """Every topic."""
    return f"{_MADE}\n# Topics\n\n{(topics.__doc__ or '').strip()}\n"


def _doc(kind: type[BaseModel]) -> str:
    return " ".join((kind.__doc__ or "").split())


def _table(kind: type[BaseModel], *, skip_sections: bool = False) -> list[str]:
    lines = ["| key | range | default | |", "|---|---|---|---|"]
    for name, field in kind.model_fields.items():
        section = isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        if not (skip_sections and section):
            lines.append(f"| `{name}` | {_range(field)} | {_default(field)} | {_text(field)} |")
    return lines


def _range(field: FieldInfo) -> str:
    signs = {"gt": "> ", "ge": "≥ ", "lt": "< ", "le": "≤ "}
    found = [
        f"{sign}{_number(getattr(rule, name))}"
        for rule in field.metadata
        for name, sign in signs.items()
        if getattr(rule, name, None) is not None
    ]
    choices = getattr(field.annotation, "__args__", ())
    if len(choices) == 2 and choices[1] is type(None):
        choices = getattr(choices[0], "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices):
        found.append(", ".join(f"`{choice}`" for choice in choices))
    return ", ".join(found)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    if value is None or value == "":
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


PAGES = {
    "recipe.md": recipe_page,
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "topics.md": topics_page,
    "cases.md": cases.page,
}


def main() -> None:
    """Write every page."""
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
