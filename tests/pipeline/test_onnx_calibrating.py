"""Calibrated pruning of ONNX files: what is recorded is what the saved file does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from support import onnx_models as om

from twofour.errors import BadInputError
from twofour.graph.opened import open_onnx
from twofour.pattern import check
from twofour.pipeline.calibration_worker import CalibrationWorker
from twofour.pipeline.onnx_calibrating import CalibrationJob, calibrate
from twofour.pipeline.sources.calibration.data import Batch, CalibrationData
from twofour.pipeline.stages import Silent
from twofour.pruning.onnx_file import prune_onnx
from twofour.records.options import MethodOptions, Selection
from twofour.records.pruning import PruneResult
from twofour.records.weights import Pattern

PATTERN = Pattern(2, 4)
EVERY = Selection(all_layers=True)
W = om.weights
SAMPLES = 20
HELD = np.arange(SAMPLES) % 10 == 9


class Here:
    """The worker's commands in this process."""

    note: Callable[[str], None] = print

    def __init__(self) -> None:
        self._worker = CalibrationWorker(lambda *_: None)
        self.calls: list[str] = []

    def call(self, command: str, *arguments: object) -> Any:
        self.calls.append(command)
        return getattr(self._worker, command)(*arguments)


def data_of(padding: om.Array | None = None, step: int = 8, **arrays: om.Array) -> CalibrationData:
    """The arrays in batches of `step`."""
    count = len(next(iter(arrays.values())))

    def batches() -> Iterator[Batch]:
        for start in range(0, count, step):
            part = {name: array[start : start + step] for name, array in arrays.items()}
            yield Batch(
                arrays=part,
                samples=len(next(iter(part.values()))),
                padding=None if padding is None else padding[start : start + step],
            )

    return CalibrationData(
        source="here", samples=count, notes=(), read=batches, content_key=lambda: "here"
    )


def job_of(
    path: Path, data: CalibrationData, method: str = "admm", **options: Any
) -> CalibrationJob:
    return CalibrationJob(
        opened=open_onnx(path),
        pattern=PATTERN,
        selection=EVERY,
        method=method,
        options=MethodOptions(name=method, **options),
        data=data,
        folder=path.parent / "work",
        key="key",
    )


def pruned(
    model: onnx.ModelProto | Path,
    folder: Path,
    data: CalibrationData,
    method: str = "admm",
    **o: Any,
) -> tuple[Path, PruneResult]:
    """The saved file, and what is said of it."""
    path = model if isinstance(model, Path) else om.save(model, folder / "dense.onnx")
    job = job_of(path, data, method, **o)
    found = calibrate(job, Silent(), Here())
    target = folder / "sparse.onnx"
    result = prune_onnx(job.opened, target, PATTERN, EVERY, method=method, calibrated=found)
    return target, result


def run(path: Path, name: str | None = None, **inputs: om.Array) -> om.Array:
    """One output or tensor of a file."""
    model = om.load(path)
    if name is not None:
        model.graph.output.insert(0, onnx.ValueInfoProto(name=name))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    found: om.Array = session.run(None, inputs)[0]
    return found


def share(before: om.Array, after: om.Array) -> float:
    """Of the output that is lost."""
    before, after = before.astype(np.float64), after.astype(np.float64)
    return float(((before - after) ** 2).sum() / (before**2).sum())


def one_layer(op: str, weight: om.Array, x: tuple[int, ...], **attributes: Any) -> onnx.ModelProto:
    """A layer with a bias of zeros (for a MatMul in an Add): what it gives is W X alone."""
    outputs = {"Conv": 0, "ConvTranspose": 1}.get(op, 0 if attributes.get("transB") else 1)
    bias = np.zeros(weight.shape[outputs] * attributes.get("group", 1) ** outputs, np.float32)
    if op == "MatMul":
        nodes = [
            helper.make_node(op, ["x", "w"], ["m"], name="layer", **attributes),
            helper.make_node("Add", ["b", "m"], ["y"], name="add"),
        ]
    else:
        nodes = [helper.make_node(op, ["x", "w", "b"], ["y"], name="layer", **attributes)]
    return om.model(nodes, {"w": weight, "b": bias}, inputs={"x": ("batch", *x[1:])})


CASES = {
    "Conv": (one_layer("Conv", W(6, 8, 3, 3), (0, 8, 5, 5), pads=[1, 0, 1, 1]), (8, 5, 5)),
    "Conv of groups": (one_layer("Conv", W(6, 4, 3), (0, 8, 9), group=2), (8, 9)),
    "ConvTranspose": (
        one_layer("ConvTranspose", W(8, 3, 3, 3), (0, 8, 3, 3), strides=[2, 2], group=2),
        (8, 3, 3),
    ),
    "Gemm": (one_layer("Gemm", W(6, 12), (0, 12), transB=1, alpha=0.5, beta=2.0), (12,)),
    "Gemm, other way round": (one_layer("Gemm", W(12, 6), (0, 12)), (12,)),
    "MatMul": (one_layer("MatMul", W(10, 6), (0, 3, 10)), (3, 10)),
}


@pytest.mark.parametrize("method", ["wanda", "admm"])
@pytest.mark.parametrize(("model", "shape"), CASES.values(), ids=CASES)
def test_the_errors_are_those_of_the_saved_files_outputs(
    tmp_path: Path, model: onnx.ModelProto, shape: tuple[int, ...], method: str
) -> None:
    x = np.random.default_rng(1).normal(0.5, size=(SAMPLES, *shape)).astype(np.float32)
    target, result = pruned(model, tmp_path, data_of(x=x), method)
    (row,) = result.weights
    assert (row.pruned, row.method, row.bias_corrected) == (True, method, True)
    dense, sparse = run(tmp_path / "dense.onnx", x=x), run(target, x=x)
    assert row.output_error is not None
    assert row.output_error.held_out is not None
    seen, held_out = (share(dense[mask], sparse[mask]) for mask in (~HELD, HELD))
    np.testing.assert_allclose(row.output_error.calibration, seen, rtol=1e-3)
    np.testing.assert_allclose(row.output_error.held_out, held_out, rtol=1e-3)
    gone = (dense - sparse)[~HELD]
    outputs = 1 if gone.ndim > 2 and "Conv" in model.graph.node[0].op_type else gone.ndim - 1
    over = tuple(axis for axis in range(gone.ndim) if axis != outputs)
    np.testing.assert_allclose(gone.mean(over), 0, atol=1e-5)
    (stored,) = (t for t in om.load(target).graph.initializer if t.name == "w")
    values = onnx.numpy_helper.to_array(stored)
    assert row.weight.axis is not None
    assert check(values, row.weight.axis, PATTERN).holds
    assert row.zeros == np.count_nonzero(values == 0)


def net() -> onnx.ModelProto:
    """Convolutions with a shortcut, then a product and a head."""
    nodes = [
        helper.make_node("Conv", ["x", "c", "cb"], ["a"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Conv", ["r", "d", "db"], ["e"], name="second", pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["r", "s"], ["t"], name="shortcut"),
        helper.make_node("Add", ["e", "t"], ["u"]),
        helper.make_node("Mul", ["u", "scale"], ["z"]),
        helper.make_node("Relu", ["z"], ["v"]),
        helper.make_node("GlobalAveragePool", ["v"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "m"], ["g"], name="product"),
        helper.make_node("Add", ["g", "mb"], ["h"], name="add"),
        helper.make_node("Gemm", ["h", "w", "b"], ["y"], name="head", transB=1),
    ]
    arrays = {
        "c": W(16, 8, 3, 3), "cb": W(16), "d": W(16, 16, 3, 3, seed=1), "db": W(16, seed=2),
        "s": W(16, 16, 1, 1, seed=3), "m": W(16, 24, seed=4), "mb": W(24, seed=5),
        "w": W(12, 24, seed=6), "b": W(12, seed=7), "scale": W(16, 1, 1, seed=8),
    }  # fmt: skip
    return om.model(nodes, arrays, inputs={"x": ("batch", 8, 6, 6)})


X = np.random.default_rng(0).normal(0.5, size=(SAMPLES, 8, 6, 6)).astype(np.float32)


def test_later_layers_see_what_earlier_ones_became(tmp_path: Path) -> None:
    target, result = pruned(net(), tmp_path, data_of(x=X))
    rows = {row.weight.layer: row for row in result.weights}
    assert list(rows) == ["first", "second", "shortcut", "product", "head"]
    for layer, tap, weight in (("product", "f", "m"), ("head", "h", "w")):
        x = run(target, tap, x=X)
        before, after = (
            onnx.numpy_helper.to_array(
                next(t for t in om.load(path).graph.initializer if t.name == weight)
            )
            for path in (tmp_path / "dense.onnx", target)
        )
        if weight == "w":
            before, after = before.T, after.T
        shift = (x[~HELD] @ (before - after)).mean(0)
        error = rows[layer].output_error
        assert error is not None
        assert error.held_out is not None
        for mask, value in ((~HELD, error.calibration), (HELD, error.held_out)):
            lost = (x[mask] @ (before - after) - shift) ** 2
            np.testing.assert_allclose(
                value, lost.sum() / ((x[mask] @ before) ** 2).sum(), rtol=1e-3
            )
    assert [rows[layer].bias_corrected for layer in rows] == [True, True, False, True, True]


def test_a_method_with_data_keeps_more_of_the_output_than_magnitude(tmp_path: Path) -> None:
    path = om.save(net(), tmp_path / "dense.onnx")
    by_magnitude = tmp_path / "magnitude.onnx"
    prune_onnx(open_onnx(path), by_magnitude, PATTERN, EVERY)
    target, _ = pruned(path, tmp_path, data_of(x=X))
    dense = run(path, x=X)
    assert share(dense, run(target, x=X)) < 0.5 * share(dense, run(by_magnitude, x=X))


def test_every_node_runs_once_and_a_level_takes_one_pass(tmp_path: Path) -> None:
    job = job_of(om.save(net(), tmp_path / "dense.onnx"), data_of(x=X))
    here = Here()
    calibrate(job, Silent(), here)
    assert here.calls == ["begin", "look", "look", "look", "look"]


@pytest.mark.parametrize("external", [False, True])
def test_the_same_bits_come_out_however_the_file_is_stored(tmp_path: Path, external: bool) -> None:
    (tmp_path / "a").mkdir()
    model, _ = pruned(net(), tmp_path / "a", data_of(x=X))
    (tmp_path / "b").mkdir()
    save = om.save_external if external else om.save
    again, _ = pruned(save(net(), tmp_path / "b" / "dense.onnx"), tmp_path / "b", data_of(x=X))
    for one, other in zip(
        om.load(model).graph.initializer, om.load(again).graph.initializer, strict=True
    ):
        assert (one.name, one.raw_data) == (other.name, other.raw_data)


def test_an_input_that_is_not_finite_names_its_layer(tmp_path: Path) -> None:
    x = X.copy()
    x[11, 3, 2, 1] = np.nan
    job = job_of(om.save(net(), tmp_path / "dense.onnx"), data_of(x=x))
    with pytest.raises(BadInputError, match=r"'first'.*'x'.*NaN.*samples 9 to 16"):
        calibrate(job, Silent(), Here())
