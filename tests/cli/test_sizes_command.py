"""`twofour sizes`: files of weights and run folders, and the figures of the record."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import save_file
from support import onnx_models as om
from typer.testing import CliRunner, Result

from twofour.cli import application
from twofour.pipeline import weight_sizes
from twofour.records.run import ModelSizes
from twofour.store import from_json


def sizes(*arguments: str | Path) -> Result:
    return CliRunner().invoke(application(), ["sizes", *map(str, arguments)])


def record(*arguments: str | Path) -> ModelSizes:
    result = sizes(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return from_json(ModelSizes, result.stdout)


def bytes_of(*arguments: str | Path) -> dict[str, int]:
    return {one.format: one.size_bytes for one in record(*arguments).sizes}


def test_a_run_is_measured_in_the_file_that_it_left(tmp_path: Path) -> None:
    made, checkpoint = tmp_path / "onnx", tmp_path / "net.safetensors"
    onnx = om.save(om.matmul(om.weights(16, 8)), tmp_path / "net.onnx")
    save_file({"fc.weight": om.weights(8, 16)}, checkpoint)
    arguments = ["prune", str(onnx), "--all-layers", "--out", str(made), "--quiet"]
    pruned = CliRunner().invoke(application(), arguments)
    assert pruned.exit_code == 0, pruned.stderr
    assert [record(path).holding for path in (onnx, checkpoint, made)] == [0, 0, 1]
    dense, found = bytes_of(onnx), bytes_of(made)
    assert bytes_of(checkpoint)["dense"] == dense["dense"] == found["dense"] == 512
    assert dense["2:4"] == found["2:4"] == 64 * 4 + 16
    assert (dense["bitmask"], found["bitmask"]) == (512 + 16, 256 + 16)
    assert found["COO"] == 64 * (4 + 2)


def test_the_shape_of_the_largest_weight_is_converted(tmp_path: Path) -> None:
    arrays = {f"{n}.weight": om.weights(rows, 64) for n, rows in (("a", 8), ("b", 64))}
    save_file(arrays, tmp_path / "two.safetensors")
    found = record(tmp_path / "two.safetensors")
    assert found.converted == "b"
    assert [x.format for x in found.conversions] == ["COO", "CSR"]
    for row, indices in zip(found.conversions, (2, 1), strict=True):
        assert row.peak_bytes >= 64 * 64 * (4 + 8 * indices)
        assert len(row.samples_ms) == 5
    shown = sizes(tmp_path / "two.safetensors").stdout
    assert "2:4 holds in 0" in shown
    assert "0.009338" in shown, "MiB as 2:4"
    assert "Converting ones and zeros" in shown


def test_of_a_weight_that_is_too_large_to_convert_the_first_rows_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sizes, "_MOST", 8 * 64)
    save_file({"lm_head.weight": om.weights(64, 64)}, tmp_path / "head.safetensors")
    found = record(tmp_path / "head.safetensors")
    assert found.converted == "lm_head (its first 8 rows)"
    assert found.conversions[0].peak_bytes < 64 * 64 * (4 + 8 * 2)


def test_a_partly_pruned_file_has_sizes_in_every_format(tmp_path: Path) -> None:
    arrays = {f"{name}.weight": om.weights(32, 32) for name in ("pruned", "dense")}
    arrays["pruned.weight"][:, ::2] = 0
    save_file(arrays, tmp_path / "partly.safetensors")
    assert record(tmp_path / "partly.safetensors").holding == 1
    for more in ((), ("--format", "markdown")):
        shown = sizes(tmp_path / "partly.safetensors", *more)
        assert (shown.exit_code, "2 weights, 2:4 holds in 1" in shown.stdout) == (0, True)


def test_a_model_that_is_no_file_is_refused(tmp_path: Path) -> None:
    result = sizes(tmp_path / "net.py:make")
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
