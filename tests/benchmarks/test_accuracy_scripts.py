"""The script that measures MiniLM by every method, on few sentences."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.full
@pytest.mark.parametrize("case", ["magnitude, no data", "wanda, refit"])
def test_calibrated_judges_on_docstrings_and_on_the_lines_of_a_file(
    case: str, tmp_path: Path
) -> None:
    import calibrated  # transformers and scipy, for `make test-all` alone

    judge = tmp_path / "judge.txt"
    judge.write_text("".join(calibrated.EVERYDAY.read_text().splitlines(keepends=True)[:16]))
    row = calibrated.measure(case, 16, judge)
    assert 0.3 < row["cosine"] < 1
    assert 0.3 < row["judge"] < 1
