"""The pages that are made from code are up to date, and what they point at exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import generate
from tests import cases

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(generate.PAGES))
def test_a_generated_page_is_what_its_code_says(name: str) -> None:
    committed = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert committed == generate.PAGES[name](), "run `make docs`"


def test_every_case_names_tests_that_exist() -> None:
    for node in cases.node_ids():
        path, _, test = node.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {test}\(", text, re.MULTILINE), node


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} → {target}"


def test_every_recipe_key_and_setting_is_documented_where_it_is_defined() -> None:
    for name in ("recipe.md", "settings.md"):
        rows = [line for line in generate.PAGES[name]().splitlines() if line.startswith("| `")]
        undocumented = [row for row in rows if row.rstrip().endswith("|  |")]
        assert undocumented == []
