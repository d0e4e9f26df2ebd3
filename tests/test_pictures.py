"""Pictures in the documents are of the project as it is."""

from __future__ import annotations

from pathlib import Path

import pictures
import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", pictures.ALL)
def test_a_picture_is_up_to_date(name: str) -> None:
    drawn = str(pictures.ALL[name]())
    kept = (pictures.PICTURES / f"{name}.svg").read_text()
    assert drawn == kept, "what it shows has changed: look at what `python docs/pictures.py` makes, and keep it"


def test_every_picture_is_on_a_page_with_words_for_those_who_do_not_see_it() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    kept = {path.stem for path in pictures.PICTURES.glob("*.svg")}
    assert kept == set(pictures.ALL)
    for name in kept:
        words = pages.partition(f"](pictures/{name}.svg)")[0].rpartition("![")[2]
        assert f"![{words}](pictures/{name}.svg)" in pages and len(words) > 30, name
