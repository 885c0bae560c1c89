"""What several tests of commands look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.small_run import MODEL
from typer.testing import CliRunner

from twofour.cli import application


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run folder of the small torch model."""
    out = tmp_path_factory.mktemp("cli") / "small"
    arguments = ["prune-export-build", MODEL, "--out", str(out), "--quiet"]
    result = CliRunner().invoke(application(), arguments)
    assert result.exit_code == 0, result.output
    return out
