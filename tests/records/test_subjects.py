"""Records by subject: found by name alone, and imported only where they are needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from twofour import records
from twofour.records.eligibility import Verdict
from twofour.records.log import BuildLog


def _imported(code: str) -> set[str]:
    """Modules of records and rich that a piece of Python brings in."""
    listing = "print(*[m for m in sys.modules if m.startswith(('twofour.records.', 'rich.'))])"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; {listing}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(done.stdout.split())


def test_a_record_is_found_by_its_name_alone() -> None:
    assert records.Verdict is Verdict
    assert records.BuildLog is BuildLog
    with pytest.raises(AttributeError, match="attribute 'Verdicts'"):
        _ = records.Verdicts


@pytest.mark.parametrize("name", ["dataclass", "field", "BadInputError", "re", "Path"])
def test_what_a_subject_merely_imports_is_no_record(name: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute {name!r}"):
        getattr(records, name)


def test_the_package_imports_no_record_by_itself() -> None:
    assert _imported("import twofour.records") == set()


def test_the_command_line_starts_with_the_options_alone_and_without_rich() -> None:
    assert _imported("import twofour.cli; twofour.cli.application()") == {
        "twofour.records.options", "twofour.records.weights",
    }  # fmt: skip
