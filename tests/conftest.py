"""Options of the whole suite."""

from collections.abc import Callable
from pathlib import Path

import pytest

Golden = Callable[[Path, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regen", action="store_true", help="rewrite the golden files")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare text with a golden file; with --regen, write the file and skip."""

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--regen"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            pytest.skip(f"{path.name} was rewritten")
        assert text == path.read_text(encoding="utf-8"), f"{path.name}: look, then --regen"

    return compare
