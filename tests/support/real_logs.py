"""Where real logs of other people are, if anywhere: too many and too large for the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REAL_LOGS = Path(os.environ.get("TWOFOUR_REAL_LOGS", Path(__file__).parents[3] / "shared" / "logs"))
"""A folder that the environment names, or one beside the checkout; tests are skipped without it."""
NOT_THERE = "TWOFOUR_REAL_LOGS names no folder of real logs"


def real_log(name: str) -> Path:
    """A real log where the folder of them is there; skips the test elsewhere."""
    path = REAL_LOGS / name
    if not path.is_file():
        pytest.skip(f"{NOT_THERE} with {name}")
    return path
