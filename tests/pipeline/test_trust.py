"""A folder of anyone's runs no code: not by what run.json names, not by the files in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.onnx_models import gemm, save, weights
from typer.testing import CliRunner, Result

from twofour.cli import application
from twofour.errors import BadInputError
from twofour.records.options import Trust
from twofour.records.run import RunManifest, StageRecord
from twofour.sources.source import identity, refuse_untrusted
from twofour.store import write_record

MODEL = Path(__file__).parents[1] / "support" / "small_model.py"
EVIL = """
from pathlib import Path
Path({mark!r}).write_text("run")
def make():
    import torch
    return torch.nn.Linear(8, 8), torch.ones(2, 8)
def batches():
    yield from ()
def evaluate(predict):
    return 1.0
"""
PLANTED = ("numpy", "onnxruntime", "torch", "json", "sitecustomize", "usercustomize", "tensorrt")


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder as somebody could send it: with evil.py, which leaves a file; entered."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    model = save(gemm(weights(64, 16), trans_b=1), folder / "dense.onnx")
    shutil.copyfile(model, folder / "sparse.onnx")
    save_file({"w": np.zeros((2, 2), np.float32)}, folder / "weights.safetensors")
    manifest = RunManifest(source="evil.py:make", twofour_version="0", stages=())
    write_record(folder / "run.json", manifest)
    (folder / "evil.py").write_text(EVIL.format(mark=str(tmp_path / "mark")))
    monkeypatch.chdir(folder)
    return folder


def naming(folder: Path, source: str, **more: object) -> None:
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "source": source, **more}))


def twofour(*arguments: str) -> Result:
    return CliRunner().invoke(application(), list(arguments))


ENGINES = ("--engines", "torch:eager", "--rounds", "1")


@pytest.mark.parametrize(
    ("command", "source"),
    [
        (("compare", *ENGINES), "evil.py:make"),
        (("sensitivity",), "evil.py:make"),
        (("sensitivity",), "evil:make"),
        (("sensitivity",), "{folder}/evil.py:make"),
    ],
)
def test_code_that_a_folder_names_is_not_run(
    shipped: Path, command: tuple[str, ...], source: str
) -> None:
    named = source.format(folder=shipped)
    naming(shipped, named)
    result = twofour(command[0], ".", *command[1:])
    assert result.exit_code == 2
    assert f"run.json names code that this command would run: {named}" in result.stderr
    assert f"--source {named}" in result.stderr
    assert "(--trust)" in result.stderr
    assert not (shipped.parent / "mark").exists()


def test_neither_is_the_code_of_a_dense_reference(shipped: Path) -> None:
    allowed = f"{MODEL.resolve()}:make"
    naming(shipped, allowed, dense_reference="evil.py:make")
    result = twofour("compare", ".", *ENGINES, "--source", allowed)
    assert result.exit_code == 2
    assert "would run: evil.py:make" in result.stderr
    assert not (shipped.parent / "mark").exists()


def test_what_needs_no_code_reads_the_folder_without_a_word(shipped: Path) -> None:
    assert twofour("report", ".").exit_code == 0
    assert twofour("report", "--onnx", "sparse.onnx").exit_code == 0
    assert twofour("validate", "sparse.onnx").exit_code == 4
    assert not (shipped.parent / "mark").exists()


def test_code_that_the_user_names_too_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the text of run.json, or as it was named to the run."""
    monkeypatch.chdir(MODEL.parent)
    allowed = identity(f"{MODEL}:make")
    for sources in ((allowed,), ("small_model.py:make",), ("other.py:f", allowed)):
        refuse_untrusted(tmp_path, allowed, Trust(sources=sources))
    for other in ("small_model.py:other", "small_model:make", ""):
        with pytest.raises(BadInputError):
            refuse_untrusted(tmp_path, allowed, Trust(sources=(other,)))
    refuse_untrusted(tmp_path, allowed, Trust(everything=True))


def test_sources_that_are_data_need_no_trust(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save(gemm(weights(64, 16), trans_b=1), tmp_path / "m.onnx")
    for source in (str(tmp_path), str(tmp_path / "m.onnx"), "timm:resnet18", "nothing"):
        refuse_untrusted(tmp_path, source, Trust())


@pytest.mark.parametrize("name", ["../outside", "/proc/kcore", "C:\\x"])
def test_a_record_that_names_files_elsewhere_is_refused_by_every_command(
    shipped: Path, name: str
) -> None:
    """None is opened: not hashed, not loaded."""
    stage = StageRecord(stage="prune", key="k", outputs={"prune.json": "0" * 64, name: "0" * 64})
    source = f"{MODEL.resolve()}:make"
    manifest = RunManifest(source=source, twofour_version="0", stages=(stage,))
    write_record(shipped / "run.json", manifest)
    for command in (
        ("compare", ".", "--engines", "onnxruntime:cpu"),
        ("report", "."),
        ("validate", "."),
        ("sensitivity", ".", "--trust"),
        ("prune", source, "--out", "."),
    ):
        result = twofour(*command)
        assert result.exit_code == 2, command
        assert f"outside of its folder: {name!r}" in result.stderr, command


def test_files_named_like_libraries_are_not_imported(shipped: Path) -> None:
    """By the command itself or by any process that it starts."""
    mark = shipped.parent / "mark"
    for name in PLANTED:
        (shipped / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write({name!r})\n")
    search = os.pathsep.join(entry for entry in sys.path if entry)
    code = "import sys; sys.path.remove(''); from twofour.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor"],  # it tries every engine in a process of its own
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not mark.exists(), mark.read_text()
