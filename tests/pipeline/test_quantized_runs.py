"""Runs with --quantize: both files are rounded alike, after the float ones were checked."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx.numpy_helper import to_array
from support.onnx_models import load, save, two_weights
from support.small_run import Recorder

from twofour.errors import BadInputError, PatternBrokenError
from twofour.graph.opened import open_onnx
from twofour.jobs import run_all
from twofour.pipeline.validating import validate_path
from twofour.pruning.verify import validate_onnx
from twofour.records.options import (
    BudgetOptions,
    CalibrationOptions,
    Precision,
    Quantization,
    RunOptions,
)
from twofour.records.weights import ReasonCode, Selection

NET = """
import torch
def make():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    return net.eval(), (torch.randn(4, 16),)
def evaluate(predict):
    import numpy as np
    values = np.random.default_rng(1).standard_normal((64, 16)).astype(np.float32)
    return {"mean": float(np.abs(predict(values)[0]).mean())}
"""
TRAINED = """
import torch, torch.ao.quantization as ao
def make():
    torch.manual_seed(0)
    layers = ao.QuantStub(), torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)
    net = torch.nn.Sequential(*layers)
    def fake(kind, **given):
        return ao.FakeQuantize.with_args(
            observer=kind, quant_min=-128, quant_max=127, dtype=torch.qint8, **given)
    net.qconfig = ao.QConfig(
        activation=fake(ao.MinMaxObserver, qscheme=torch.per_tensor_symmetric),
        weight=fake(ao.PerChannelMinMaxObserver, qscheme=torch.per_channel_symmetric))
    ao.prepare_qat(net.train(), inplace=True)
    net(torch.randn(64, 16))
    return net.eval(), (torch.randn(4, 16),)
"""


def options_of(folder: Path, asked: Quantization, *shape: int) -> RunOptions:
    data = np.random.default_rng(0).standard_normal((64, *shape)).astype(np.float32)
    np.savez(folder / "data.npz", data)
    calibration = CalibrationOptions(data=str(folder / "data.npz"))
    selection = Selection(all_layers=True)
    return RunOptions(quantize=asked, calibration=calibration, selection=selection)


@pytest.mark.parametrize("asked", Quantization)
def test_a_module_is_rounded_dense_and_sparse(asked: Quantization, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    options = replace(options_of(tmp_path, asked, 16), metric=f"{tmp_path / 'net.py'}:evaluate")
    source, folder = f"{tmp_path / 'net.py'}:make", tmp_path / "run"
    result = run_all(source, folder, options)
    for name in ("dense", "sparse"):
        ops = [node.op_type for node in load(folder / f"{name}.onnx").graph.node]
        assert ops.count("QuantizeLinear") == 4  # two weights, input, first output
        assert ops.count("Cast") <= 3  # float16 beside the products
    judged = {name: validate_path(folder / name, None, Selection()) for name in (
        "weights.safetensors", "sparse.onnx")}  # fmt: skip
    assert [(len(each.checks), each.broken) for each in judged.values()] == [(2, ())] * 2
    assert validate_path(folder, None, Selection()).files == tuple(
        str(folder / name) for name in judged
    )
    codes = [{reason.code for reason in v.reasons} for v in result.report.verdicts]
    assert ReasonCode.ZERO_POINT not in codes[0] | codes[1]
    assert [ReasonCode.INT8_OUTPUT_NOT_QUANTIZED in found for found in codes] == [False, True]
    assert (result.report.verdicts[1].remedy or "").startswith("leave it dense: --quantize")
    (row,), (metric,) = result.accuracy.rounding, result.accuracy.metrics
    assert 0.99 < row.cosine < 1
    (both,), (pruned,) = result.accuracy.pruned_and_rounded, result.accuracy.drift
    assert both.max_abs_error != pruned.max_abs_error
    assert both.cosine == pytest.approx(pruned.cosine, abs=0.01)
    assert metric.unquantized == pytest.approx(metric.dense, rel=0.05)
    assert metric.unquantized != metric.dense
    report = (folder / "report.md").read_text()
    assert f"--quantize {asked.value}, sparse.onnx: 2 products computed in" in report
    assert "rounding alone" in report
    assert "pruning alone, both models" in report
    again = Recorder()
    assert run_all(source, folder, replace(options, resume=True), again) == result
    assert again.did == []
    run_all(source, folder, replace(options, quantize=None, resume=True))
    assert validate_path(folder, None, Selection()).files == tuple(
        str(folder / name) for name in ("weights.safetensors", "sparse.onnx")
    )


def test_ranges_come_from_samples_of_all_the_data(tmp_path: Path) -> None:
    path = save(two_weights(), tmp_path / "m.onnx")
    options = options_of(tmp_path, Quantization.INT8, 8, 6, 6)
    values = np.linspace(0, 1, 8 * 6 * 6, dtype=np.float32).reshape(8, 6, 6)
    np.savez(tmp_path / "data.npz", np.stack([values] * 128 + [2 * values] * 128))
    result = run_all(str(path), tmp_path / "run", options)
    for file in result.export.files:
        rounded = open_onnx(tmp_path / "run" / file.file).weights()
        assert {weight.math_dtype for weight in rounded.weights} == {"int8"}
    model = load(tmp_path / "run" / "dense.onnx")
    (reader,) = [node for node in model.graph.node if "x" in node.input]
    constants = {one.name: to_array(one) for one in model.graph.initializer}
    assert 127 * constants[reader.input[1]] == pytest.approx(2, rel=0.1)  # 1 of the first 128


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("kind", [pytest.param("file", marks=pytest.mark.full), "module"])
def test_a_model_with_quantizers_is_pruned_and_keeps_them(kind: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(TRAINED)
    source, options = f"{tmp_path / 'net.py'}:make", options_of(tmp_path, Quantization.INT8, 16)
    precision = Precision.FLOAT32 if kind == "module" else None
    quantizers = replace(options, quantize=None, precision=precision)
    result = run_all(source, tmp_path / "run", quantizers)
    if kind == "file":
        source = str(tmp_path / "run" / "dense.onnx")
        result = run_all(source, tmp_path / "again", quantizers)
    with pytest.raises(BadInputError, match=f"{re.escape(source)} is quantized already"):
        run_all(source, tmp_path / "twice", options)
    folder = tmp_path / ("again" if kind == "file" else "run")
    assert [row.method for row in result.prune.weights] == ["admm"] * 2
    for name in ("dense", "sparse"):
        model = open_onnx(folder / f"{name}.onnx")
        ops = [node.op for node in model.nodes]
        assert (ops.count("QuantizeLinear"), ops.count("Clip")) == (5, 0)
        assert [weight.math_dtype for weight in model.weights().weights] == ["int8"] * 2
    assert validate_path(folder / "sparse.onnx", None, Selection()).broken == ()
    assert result.accuracy.drift[0].cosine > 0.8


def test_a_weight_that_the_export_breaks_is_refused_before_it_is_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twofour.pipeline import validating

    def other_pattern(model: Any, pattern: Any, **more: Any) -> Any:
        return validate_onnx(model, replace(pattern, n=1), **more)

    path = save(two_weights(), tmp_path / "m.onnx")
    monkeypatch.setattr(validating, "validate_onnx", other_pattern)
    with pytest.raises(PatternBrokenError, match=r"pruned.onnx: \d pruned"):
        run_all(str(path), tmp_path / "run", options_of(tmp_path, Quantization.INT8, 8, 6, 6))
    assert not (tmp_path / "run" / "sparse.onnx").exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"calibration": CalibrationOptions()}, "--quantize needs calibration samples"),
        ({"budget": BudgetOptions(share=0.5)}, "--quantize and a budget are two runs"),
    ],
)
def test_options_that_do_not_go_with_rounding_are_refused(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = save(two_weights(), tmp_path / "m.onnx")
    options = replace(options_of(tmp_path, Quantization.INT8, 8, 6, 6), **changed)
    with pytest.raises(BadInputError, match=said):
        run_all(str(path), tmp_path / "run", options)
