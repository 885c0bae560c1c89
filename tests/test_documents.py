"""What the documents name is there."""

import re
from pathlib import Path

import house
import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "twofour"
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"]
_PATH = re.compile(r"`([\w/]+\.(?:py|md)|[\w/]+/)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = _PATH.findall(page.read_text())
    beside = [
        name for name in named if "/" not in name
    ]  # such as `open.py` of the folder before it
    gone = [n for n in named if n not in beside and not any((r / n).exists() for r in (ROOT, SRC))]
    assert len(named) > 10
    assert gone == []


def test_every_file_that_a_decision_names_is_there() -> None:
    """But for the two that are about what went and what moved."""
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    gone = [
        (page.name, name)
        for page in pages
        if page.name[:4] not in {"0009", "0013"}
        for name in re.findall(r"`(\w+/[\w/]+\.py)`", page.read_text())
        if not any((root / name).exists() for root in (ROOT, SRC, SRC.parent, SRC / "sources"))
    ]
    assert len(pages) > 10
    assert gone == []


def test_the_picture_of_the_house_is_that_of_the_import_contract() -> None:
    assert house.picture() in PAGES[1].read_text()
