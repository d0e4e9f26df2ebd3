"""Documents that can be checked are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gradientflow as gf
from gradientflow.recipe import Recipe, as_recipe

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_folders_named_in_the_text_exist(page: Path) -> None:
    for name in re.findall(r"`((?:tests|docs|benchmarks|examples|src)/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists(), name


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}


def test_every_public_name_is_in_the_reference_once() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    assert sorted(re.findall(r"^::: gradientflow\.(\w+)$", pages, re.MULTILINE)) == sorted([*gf.__all__, "errors"])


def test_recipes_in_the_documents_are_recipes() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text() + (ROOT / "README.md").read_text()
    ran = set(re.findall(r'(?:attach\(\w+, \w+, |recipe = )"([^"]+)"', text)) - {"..."}
    ran |= set(re.findall(r"--recipe (\S*[a-z]\S*?)[`\s]", text)) - {"..."}
    assert {"lazy+bf16", "lazy:4MB", "lazy:4MB+fp16"} <= ran
    for recipe in ran:
        if not recipe.endswith(".toml"):  # a file that a command before has written
            as_recipe(recipe)
    for part in re.findall(r"\| `(-\w+|\+\w+|@[\w:=]+)", text):
        Recipe.parse(f"lazy-ps{part}" if part.startswith("@") else f"lazy{part}").check()
