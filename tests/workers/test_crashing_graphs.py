"""Graphs at which ONNX Runtime 1.31.1 ends its process, through the command line, in one run."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from twofour.cli import application
from twofour.records.eligibility import EligibilityReport
from twofour.records.run import BuildResult, VariantCheck
from twofour.store import read_record

_MODELS = """
import torch
from torch import nn


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(64, 64, bidirectional=True, batch_first=True)
        self.head = nn.Linear(128, 32)

    def forward(self, x):
        return self.head(self.recurrent(x)[0])


def lstm():
    return Recurrent(), (torch.randn(2, 10, 64),)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models.py").write_text(_MODELS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def twofour(*arguments: str) -> Result:
    """In this process: what ends is that of the engine."""
    return CliRunner().invoke(application(), [*arguments, "--out", "r"])


@pytest.mark.full
def test_the_main_job_ends_in_one_run_with_outputs_and_times_of_both_files(folder: Path) -> None:
    done = twofour("prune-export-build", f"{folder / 'models.py'}:lstm")
    assert done.exit_code == 0, done.output
    dense, sparse = (
        read_record(VariantCheck, folder / f"r/stages/check-{variant}.json")
        for variant in ("dense", "sparse")
    )
    assert dense.agreement, dense.not_compared
    assert all(row.within for row in dense.agreement)
    assert "that of dense.onnx" in (sparse.not_compared or "")
    built = read_record(BuildResult, folder / "r/build.json")
    assert [v.error for v in built.variants] == [None, None]
    assert [v.error for v in built.times.variants if v.samples_ms] == [None] * 3
    for variant_build in built.variants:
        assert (variant_build.level is None) == (variant_build.failed_tries == ())
    assert read_record(EligibilityReport, folder / "r/eligibility.json").verdicts
    assert (folder / "r/report.html").is_file()
