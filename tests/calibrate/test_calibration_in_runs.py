"""Runs with calibration data: notes, what is done again when data change, errors of the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.onnx_models import save, two_weights
from support.small_run import MODEL, Recorder
from typer.testing import CliRunner

from twofour.cli import application
from twofour.main_job import run_prune
from twofour.records.options import CalibrationOptions, RunOptions
from twofour.records.weights import Selection
from twofour.reports.pruning_document import prune_document
from twofour.reports.terminal import plain_text, render

CODE = "import numpy as np\ndef batches():\n    yield np.load({file!r})\n"


def did(model: str, folder: Path, data: str) -> list[str]:
    recorder = Recorder()
    options = RunOptions(
        calibration=CalibrationOptions(data=data), selection=Selection(all_layers=True)
    )
    run_prune(model, folder / "run", options, recorder)
    return recorder.did


@pytest.mark.parametrize(("source", "shape"), [("onnx", (40, 8, 6, 6)), ("torch", (40, 3, 16, 16))])
def test_a_file_that_the_users_code_reads_is_seen_when_it_changes(
    tmp_path: Path, source: str, shape: tuple[int, ...]
) -> None:
    model = MODEL if source == "torch" else str(save(two_weights(), tmp_path / "model.onnx"))
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    np.save(tmp_path / "x.npy", values)
    (tmp_path / "mine.py").write_text(CODE.format(file=str(tmp_path / "x.npy")))
    data = f"{tmp_path / 'mine.py'}:batches"
    assert "prune" in did(model, tmp_path, data)
    assert did(model, tmp_path, data) == []
    assert list((tmp_path / "run").rglob("*.part")) == []
    np.save(tmp_path / "x.npy", np.concatenate([values, values]))
    assert "prune" in did(model, tmp_path, data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("missing.npz", "there is no such file or folder"),
        ("empty.npy", "is not a readable .npy file"),
        ("other.npz", "contains y; the model takes x"),
        ("mine.py:batches", "raised OSError: no disk (mine.py, line 2"),
        ("texts.txt", "which no tokenizer gives"),
    ],
)
def test_bad_data_are_exit_2_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save(two_weights(), tmp_path / "model.onnx")
    (tmp_path / "empty.npy").touch()
    np.savez(tmp_path / "other.npz", y=np.ones((4, 8, 6, 6)))
    (tmp_path / "mine.py").write_text("def batches():\n    raise OSError('no disk')\n")
    (tmp_path / "texts.txt").write_text("a text\n")
    done = CliRunner().invoke(application(), ["prune", "model.onnx", "--calibrate", data])
    assert done.exit_code == 2, done.output
    assert reason in " ".join(done.output.split())


def test_notes_on_the_data_stand_in_the_record_and_are_said_once(tmp_path: Path) -> None:
    model = str(save(two_weights(), tmp_path / "model.onnx"))
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).normal(size=(40, 8, 6, 6)), y=[1])
    recorder = Recorder()
    options = RunOptions(calibration=CalibrationOptions(data=str(tmp_path / "x.npz")))
    _, result, _ = run_prune(model, tmp_path / "run", options, recorder)
    assert result.calibration is not None
    assert result.calibration.samples == 40
    assert [note.split(": ")[-1] for note in result.calibration.notes] == [
        f"{tmp_path / 'x.npz'} has 40 samples, fewer than the 256 that calibration may use",
        "y is not an input of the model and is left out",
    ]
    assert not {*recorder.notes} & {*result.calibration.notes}
    lines = plain_text(render(prune_document(result)), width=200)
    assert all(lines.count(note) == 1 for note in result.calibration.notes)
