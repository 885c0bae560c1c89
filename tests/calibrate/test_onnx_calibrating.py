"""Calibrated pruning of ONNX files: what is recorded is what the saved file does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from support import onnx_models as om
from support.ort import outputs
from torch import nn

import twofour
from twofour.calibrate.pieces import CalibrationWorker
from twofour.engines.protocol import ProgressCallback, no_progress
from twofour.errors import BadInputError, BuildFailedError
from twofour.graph.opened import open_onnx
from twofour.inputs.samples import Batch, CalibrationData
from twofour.pattern import check
from twofour.pipeline.onnx import calibrating
from twofour.pipeline.stages import Settings, Silent
from twofour.pruning.arrays import Calibrated
from twofour.pruning.onnx import prune_onnx
from twofour.pruning.statistics import Inputs
from twofour.records.options import MethodOptions
from twofour.records.weights import Pattern, PruneResult, Selection
from twofour.words import time_left
from twofour.workers.host import EngineHost
from twofour.workers.process import WorkerDiedError

PATTERN = Pattern(2, 4)
EVERY = Selection(all_layers=True)
W = om.weights
SAMPLES = 20
HELD = np.arange(SAMPLES) % 10 == 9
SEEN = ~HELD
"""Samples that weights are solved with."""


class Here(EngineHost):
    """The worker's commands in this process."""

    def __init__(self, calls: Sequence[str] = ()) -> None:
        super().__init__(note=print)
        self._worker = CalibrationWorker(lambda *_: None)
        self.calls = [*calls]
        self.seen: dict[str, Inputs] = {}
        """What the methods saw of each tensor."""

    def call(self, command: str, *arguments: Any, report: ProgressCallback = no_progress) -> Any:
        del report
        self.calls.append(command)
        found = getattr(self._worker, command)(*arguments)
        if command == "look":
            for tap, statistics in zip(arguments[0], found.statistics, strict=True):
                if statistics is not None:
                    self.seen[tap.tensor] = statistics.seen
        return found


def data_of(**arrays: om.Array) -> CalibrationData:
    """The arrays in batches of 8."""
    count = len(next(iter(arrays.values())))

    def batches() -> Iterator[Batch]:
        for start in range(0, count, 8):
            part = {name: array[start : start + 8] for name, array in arrays.items()}
            yield Batch(arrays=part, samples=len(next(iter(part.values()))))

    return CalibrationData(source="here", samples=count, notes=(), batches=batches)


def calibrate(
    path: Path,
    data: CalibrationData,
    method: str = "admm",
    *,
    here: Here | None = None,
    progress: Silent | None = None,
    reference: Path | None = None,
    **options: Any,
) -> Calibrated:
    settings = Settings(
        pattern=PATTERN, selection=EVERY, method=MethodOptions(name=method, **options)
    )
    task = calibrating.CalibrationTask(
        opened=open_onnx(path),
        options=settings,
        folder=path.parent / "work",
        progress=progress or Silent(),
        dense_model=None if reference is None else open_onnx(reference),
        host=here or Here(),
    )
    return calibrating.calibrate(task, data)


def pruned(
    model: onnx.ModelProto | Path,
    folder: Path,
    data: CalibrationData,
    method: str = "admm",
    **options: Any,
) -> tuple[Path, PruneResult]:
    """The saved file, and what is said of it."""
    path = model if isinstance(model, Path) else om.save(model, folder / "dense.onnx")
    found = calibrate(path, data, method, **options)
    target = folder / "sparse.onnx"
    result = prune_onnx(open_onnx(path), target, PATTERN, EVERY, method=method, calibrated=found)
    return target, result


def run(path: Path, name: str = "", **inputs: om.Array) -> om.Array:
    """One tensor of a file; the first output without a name."""
    return next(iter(outputs(path, inputs, *filter(None, [name])).values()))


def share(before: om.Array, after: om.Array) -> float:
    """Of the output that is lost."""
    before, after = before.astype(np.float64), after.astype(np.float64)
    return float(((before - after) ** 2).sum() / (before**2).sum())


def one_layer(op: str, weight: om.Array, x: tuple[int, ...], **attributes: Any) -> onnx.ModelProto:
    """A layer with a bias of zeros (for a MatMul in an Add): what it gives is W X alone."""
    axis = {"Conv": 0, "ConvTranspose": 1}.get(op, 0 if attributes.get("transB") else 1)
    bias = np.zeros(weight.shape[axis] * attributes.get("group", 1) ** axis, np.float32)
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
    "ConvTranspose": (
        one_layer("ConvTranspose", W(8, 3, 3, 3), (0, 8, 3, 3), strides=[2, 2], group=2),
        (8, 3, 3),
    ),
    "Gemm": (one_layer("Gemm", W(6, 12), (0, 12), transB=1, alpha=0.5, beta=2.0), (12,)),
    "MatMul": (one_layer("MatMul", W(10, 6), (0, 3, 10)), (3, 10)),
}


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


def test_later_layers_see_what_earlier_ones_became_and_what_they_were(tmp_path: Path) -> None:
    here = Here()
    target, result = pruned(net(), tmp_path, data_of(x=X), here=here)
    rows = {row.weight.layer: row for row in result.weights}
    assert list(rows) == ["first", "second", "shortcut", "product", "head"]
    assert here.seen["x"].drift is None
    for tap in "fh":
        dense, x = (
            run(path, tap, x=X)[SEEN].astype(np.float64)
            for path in (tmp_path / "dense.onnx", target)
        )
        drift, away = here.seen[tap].drift, dense - x
        assert drift is not None
        if tap == "h":  # the only layer there has fewer outputs than inputs
            away = away @ stored(tmp_path / "dense.onnx", "w").T
        for found, wanted in ((here.seen[tap].gram[0], x.T @ x), (drift.cross[0], away.T @ x)):
            np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())
        total = away.sum(0)
        np.testing.assert_allclose(drift.total[0], total, atol=1e-4 * np.abs(x).max())
    assert [rows[layer].bias_corrected for layer in rows] == [True, True, False, True, True]


def test_a_mask_that_is_kept_aims_at_the_dense_reference(tmp_path: Path) -> None:
    dense, masked = om.save(net(), tmp_path / "dense.onnx"), tmp_path / "masked.onnx"
    prune_onnx(open_onnx(dense), masked, PATTERN, EVERY)
    here = Here()
    target, _ = pruned(masked, tmp_path, data_of(x=X), "keep", here=here, reference=dense, refit=9)
    drift = here.seen["h"].drift
    assert drift is not None
    wanted, x = (run(path, "h", x=X)[SEEN].astype(np.float64) for path in (dense, target))
    cross = stored(dense, "w") @ (wanted - x).T @ x
    np.testing.assert_allclose(drift.cross[0], cross, atol=1e-4 * np.abs(cross).max())
    for path in (masked, target):
        assert np.array_equal(stored(path, "w") == 0, stored(masked, "w") == 0)
    assert share(run(dense, x=X), run(target, x=X)) < 0.5 * share(run(dense, x=X), run(masked, x=X))


def residual(*outputs: str) -> onnx.ModelProto:
    """A narrow layer whose output goes through another one and is added to what that gives."""
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["g"], name="first"),
        helper.make_node("Relu", ["g"], ["r"]),
        helper.make_node("MatMul", ["r", "b"], ["m"], name="second"),
        helper.make_node("Add", ["m", "bb"], ["h"]),
        helper.make_node("Add", ["g", "h"], ["y"]),
    ]
    arrays = {"a": W(8, 32), "b": W(32, 32, seed=1) / 4, "bb": W(32, seed=2)}
    return om.model(nodes, arrays, inputs={"x": ["batch", 5, 8]}, outputs=outputs)


class Residual(nn.Module):
    """The same, with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32, bias=False), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        g: torch.Tensor = self.first(x)
        return g + nn.functional.dropout(self.second(torch.relu(g)), training=self.training)


def test_a_layer_of_a_file_or_a_module_aims_at_its_sum_with_another(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(200, 5, 8)).astype(np.float32)
    lost = {}
    for names in (("y", "h"), ("y",)):  # as an output, h has more uses than the sum
        (folder := tmp_path / names[-1]).mkdir()
        target, _ = pruned(residual(*names), folder, data_of(x=x))
        lost[names] = share(run(folder / "dense.onnx", "y", x=x), run(target, "y", x=x))
    assert lost["y",] < 0.8 * lost["y", "h"]
    module = nn.Sequential(Residual())
    with torch.no_grad():
        for parameter, name in zip(module.parameters(), ("a", "b", "bb"), strict=True):
            parameter.copy_(torch.from_numpy(stored(folder / "dense.onnx", name).T))
    twofour.prune(
        module,
        calibrate=[torch.from_numpy(x[i : i + 8]) for i in range(0, 200, 8)],
        all_layers=True,
    )
    for parameter, name in zip(module.parameters(), ("a", "b", "bb"), strict=True):
        np.testing.assert_allclose(parameter.detach().numpy().T, stored(target, name), atol=1e-4)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The net's pruned file, made with nothing out of the ordinary."""
    return pruned(net(), tmp_path_factory.mktemp("plain"), data_of(x=X))[0]


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("calibrate.pieces.KEPT_BYTES", 0),  # tensors between levels go to files
        ("pipeline.onnx.calibrating._GRAM_BYTES", 1),
        ("calibrate.pieces.usable_cores", lambda: 7),
        ("pruning.resources.available_threads", lambda: 7),
    ],
)
def test_the_same_bits_come_out_with_little_memory_and_any_number_of_threads(
    changed: str, value: object, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"twofour.{changed}", value)
    here = Here()
    again, _ = pruned(net(), tmp_path, data_of(x=X), here=here)
    assert again.read_bytes() == plain.read_bytes()
    assert here.calls.count("look") == (5 if "GRAM" in changed else 4)


def test_the_same_bits_come_out_however_the_file_is_stored(plain: Path, tmp_path: Path) -> None:
    external = om.save_external(net(), tmp_path / "dense.onnx")
    again, _ = pruned(external, tmp_path, data_of(x=X))
    for one, other in zip(
        om.load(plain).graph.initializer, om.load(again).graph.initializer, strict=True
    ):
        assert (one.name, one.raw_data) == (other.name, other.raw_data)


def test_an_input_that_is_not_finite_names_its_layer(tmp_path: Path) -> None:
    x = X.copy()
    x[11, 3, 2, 1] = np.nan
    path, data = om.save(net(), tmp_path / "dense.onnx"), data_of(x=x)
    with pytest.raises(BadInputError, match=r"'first'.*'x'.*NaN.*samples 9 to 16"):
        calibrate(path, data)


# --- how weights are stored and shared ------------------------------------------------------------


def stored(path: Path, name: str = "w") -> om.Array:
    (tensor,) = (t for t in om.load(path).graph.initializer if t.name == name)
    return np.asarray(onnx.numpy_helper.to_array(tensor))


def node(op: str, names: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, names, [output], name=output, **attributes)


def half(kind: int, dtype: Any) -> onnx.ModelProto:
    """A product in half precision, whose input and output are float32."""
    nodes = [
        node("Cast", ["x"], "h", to=kind),
        node("MatMul", ["h", "w"], "m"),
        node("Add", ["m", "b"], "a"),
        node("Cast", ["a"], "y", to=1),
    ]
    arrays = {"w": W(16, 8, dtype=dtype), "b": np.zeros(8, dtype)}
    return om.model(nodes, arrays, inputs={"x": ("batch", 16)})


def quantized() -> onnx.ModelProto:
    """int8 weights and activations; the bias is int32."""
    scale = np.float32(1 / 16) / 8
    nodes = [
        node("QuantizeLinear", ["x", "xs", "z"], "xq"),
        node("DequantizeLinear", ["xq", "xs", "z"], "xd"),
        node("DequantizeLinear", ["w", "s"], "wd", axis=0),
        node("DequantizeLinear", ["b", "bs"], "bd", axis=0),
        node("Conv", ["xd", "wd", "bd"], "y"),
    ]
    arrays = {
        "w": W(6, 8, 3, 3, dtype=np.int8),
        "s": np.full(6, 1 / 16, np.float32),
        "b": np.zeros(6, np.int32),
        "bs": np.full(6, scale, np.float32),
        "xs": np.float32(1 / 8).reshape(()),
        "z": np.zeros((), np.int8),
    }
    return om.model(nodes, arrays, inputs={"x": ("batch", 8, 5, 5)})


def experts() -> onnx.ModelProto:
    nodes = [node("MatMul", ["x", "w"], "m"), node("Add", ["m", "b"], "y")]
    arrays = {"w": W(3, 12, 6), "b": np.zeros((3, 1, 6), np.float32)}
    return om.model(nodes, arrays, inputs={"x": ("batch", 3, 4, 12)})


STORED = {
    **{name: (*case, 1e-3) for name, case in CASES.items()},
    "float16": (half(10, np.float16), (16,), 2e-2),
    "int8": (quantized(), (8, 5, 5), 2e-2),
    "experts": (experts(), (3, 4, 12), 1e-3),
    "left": (
        om.model(
            [node("MatMul", ["w", "x"], "m"), node("Add", ["m", "b"], "y")],
            {"w": W(6, 12), "b": np.zeros((6, 1), np.float32)},
            inputs={"x": ("batch", 12, 4)},
        ),
        (12, 4),
        1e-3,
    ),
}


@pytest.mark.parametrize(("model", "shape", "rounding"), STORED.values(), ids=STORED)
def test_the_errors_are_those_of_the_saved_files_outputs(
    tmp_path: Path, model: onnx.ModelProto, shape: tuple[int, ...], rounding: float
) -> None:
    x = np.random.default_rng(1).normal(0.5, size=(SAMPLES, *shape)).astype(np.float32)
    target, result = pruned(model, tmp_path, data_of(x=x))
    (row,) = result.weights
    assert (row.pruned, row.method, row.bias_corrected) == (True, "admm", True)
    dense, sparse = run(tmp_path / "dense.onnx", x=x), run(target, x=x)
    assert row.output_error is not None
    assert row.output_error.held_out is not None
    seen = share(dense[SEEN], sparse[SEEN])
    np.testing.assert_allclose(row.output_error.calibration, seen, rtol=rounding)
    assert 0.5 < share(dense[HELD], sparse[HELD]) / row.output_error.held_out < 1.5
    if model.graph.node[0].name == "layer":
        gone = (dense - sparse)[SEEN]
        channels = 1 if "Conv" in model.graph.node[0].op_type else gone.ndim - 1
        over = tuple(axis for axis in range(gone.ndim) if axis != channels)
        np.testing.assert_allclose(gone.mean(over), 0, atol=1e-5)
    values = stored(target)
    assert row.weight.axis is not None
    assert check(values, row.weight.axis, PATTERN).holds
    assert row.zeros == np.count_nonzero(values == 0)
    assert values.dtype == stored(tmp_path / "dense.onnx").dtype
    assert not np.signbit(values.astype(np.float32)[values == 0]).any()


def test_bfloat16_is_run_in_float32_and_stored_as_it_was(tmp_path: Path) -> None:
    nodes = [
        node("Cast", ["x"], "h", to=16),
        node("MatMul", ["h", "w"], "m"),
        node("MatMul", ["m", "v"], "n"),
        node("Cast", ["n"], "y", to=1),
    ]
    arrays = {"w": W(16, 8, dtype=om.BFLOAT16), "v": W(8, 4, dtype=om.BFLOAT16, seed=1)}
    model = om.model(nodes, arrays, inputs={"x": ("batch", 16)})
    x = np.random.default_rng(1).normal(0.5, size=(SAMPLES, 16)).astype(om.BFLOAT16)
    target, result = pruned(model, tmp_path, data_of(x=x.astype(np.float32)))
    assert result.calibration is not None
    (note,) = result.calibration.notes
    assert note.startswith("run in float32")
    seen = x[SEEN].astype(np.float64)
    for row, name in zip(result.weights, "wv", strict=True):
        assert stored(target, name).dtype == om.BFLOAT16
        assert check(stored(target, name), 0, PATTERN).holds
        before, after = (
            stored(path, name).astype(np.float64) for path in (tmp_path / "dense.onnx", target)
        )
        assert row.output_error is not None
        lost = share(seen @ before, seen @ after)
        np.testing.assert_allclose(row.output_error.calibration, lost, rtol=1e-3)
        seen = seen @ after


def test_int32_biases_are_rounded_to_their_scale(tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(0.5, size=(SAMPLES, 8, 5, 5)).astype(np.float32)
    target, result = pruned(quantized(), tmp_path, data_of(x=x), "wanda", refit=0)
    assert result.weights[0].bias_corrected
    bias = stored(target, "b")
    assert bias.dtype == np.int32
    assert np.abs(bias).max() > 5
    gone = (run(tmp_path / "dense.onnx", x=x) - run(target, x=x))[SEEN].mean((0, 2, 3))
    assert np.abs(gone).max() <= 0.51 / 128


def test_users_of_one_array_are_pruned_by_the_inputs_of_all(tmp_path: Path) -> None:
    """The second use sees inputs in which only what the first one ignores is large."""
    nodes = [
        node("Gemm", ["x", "w", "b"], "h", transB=1),
        node("Mul", ["h", "wide"], "k"),
        node("Gemm", ["k", "w", "b"], "y", transB=1),
    ]
    wide = np.where(np.arange(16) % 4 < 2, 100, 0.01).astype(np.float32)
    arrays = {"w": W(16, 16), "b": np.zeros(16, np.float32), "wide": wide}
    model = om.model(nodes, arrays, inputs={"x": ("batch", 16)})
    x = np.random.default_rng(1).normal(size=(SAMPLES, 16)).astype(np.float32)
    x *= np.where(np.arange(16) % 4 < 2, 0.01, 1)
    target, result = pruned(model, tmp_path, data_of(x=x), "wanda", refit=0)
    assert result.weights[0].output_error == result.weights[1].output_error
    dense = arrays["w"].astype(np.float64)
    k = x @ dense.T * wide
    score = np.abs(dense) * np.sqrt((x**2).sum(0) + (k**2).sum(0))
    rank = np.argsort(np.argsort(-score.reshape(16, 4, 4), axis=-1), axis=-1)
    assert np.array_equal(stored(target) != 0, (rank < 2).reshape(16, 16))
    # both add the one bias, which cannot make up for what each of them lost
    assert not result.weights[0].bias_corrected
    assert not stored(target, "b").any()


def test_layers_behind_a_shared_weight_see_all_of_its_uses_pruned(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "w"], "h"),
        node("Relu", ["h"], "r"),
        node("MatMul", ["r", "w"], "k"),
        node("MatMul", ["k", "v"], "y"),
    ]
    arrays = {"w": W(8, 8), "v": W(8, 8, seed=1)}
    model = om.model(nodes, arrays, inputs={"x": ("batch", 8)})
    x = np.random.default_rng(1).normal(0.5, size=(SAMPLES, 8)).astype(np.float32)
    here = Here()
    target, _ = pruned(model, tmp_path, data_of(x=x), here=here)
    seen = run(target, "k", x=x)[SEEN].astype(np.float64)
    np.testing.assert_allclose(here.seen["k"].gram[0], seen.T @ seen, rtol=1e-4)


def test_parts_of_one_array_are_pruned_by_their_own_inputs(tmp_path: Path) -> None:
    nodes = [
        node("Split", ["w"], "q", axis=1, num_outputs=2),
        node("MatMul", ["x", "q"], "a"),
        node("MatMul", ["z", "k"], "y0"),
        node("Add", ["a", "y0"], "y"),
    ]
    nodes[0].output.append("k")
    model = om.model(nodes, {"w": W(16, 12)}, inputs={"x": ("batch", 16), "z": ("batch", 16)})
    generator = np.random.default_rng(1)
    x, z = (
        (generator.normal(size=(SAMPLES, 16)) * generator.uniform(0.01, 9, 16)).astype(np.float32)
        for _ in range(2)
    )
    target, result = pruned(model, tmp_path, data_of(x=x, z=z), "wanda", refit=0)
    values, dense = stored(target), W(16, 12)
    for columns, inputs in ((slice(0, 6), x), (slice(6, 12), z)):
        score = np.abs(dense[:, columns].T) * np.sqrt((inputs**2).sum(0))
        rank = np.argsort(np.argsort(-score.reshape(6, 4, 4), axis=-1), axis=-1)
        assert np.array_equal(values[:, columns].T != 0, (rank < 2).reshape(6, 16))
    assert [row.method for row in result.weights] == ["wanda", "wanda"]
    assert result.weights[0].output_error != result.weights[1].output_error


def test_what_no_layer_sees_of_an_array_is_pruned_by_magnitude(tmp_path: Path) -> None:
    nodes = [node("Slice", ["w", "from", "to", "one"], "v"), node("MatMul", ["x", "v"], "y")]
    arrays = {"w": W(16, 12), "from": np.array([0]), "to": np.array([6]), "one": np.array([1])}
    model = om.model(nodes, arrays, inputs={"x": ("batch", 16)})
    x = np.random.default_rng(1).normal(size=(SAMPLES, 16)).astype(np.float32)
    x *= np.linspace(0.01, 9, 16, dtype=np.float32)
    target, _ = pruned(model, tmp_path, data_of(x=x), "wanda", refit=0)
    values = stored(target)
    assert check(values, 0, PATTERN).holds
    rest = np.abs(W(16, 12)[:, 6:].T.reshape(6, 4, 4))
    rank = np.argsort(np.argsort(-rest, axis=-1), axis=-1)
    assert np.array_equal(values[:, 6:].T != 0, (rank < 2).reshape(6, 16))


def test_a_weight_in_a_branch_is_pruned_by_magnitude_and_says_so(tmp_path: Path) -> None:
    inner = om.graph(
        [node("MatMul", ["x", "v"], "t")], {"v": W(16, 6)}, outputs=["t"], output_shape=[2, 6]
    )
    other = om.graph([node("MatMul", ["x", "u"], "e")], {"u": W(16, 6, seed=1)}, outputs=["e"])
    nodes = [
        node("MatMul", ["x", "w"], "h"),
        node("If", ["yes"], "i", then_branch=inner, else_branch=other),
        node("Add", ["h", "i"], "y"),
    ]
    arrays = {"w": W(16, 6, seed=2), "yes": np.array(True)}
    model = om.model(nodes, arrays, inputs={"x": ("batch", 16)})
    x = np.random.default_rng(1).normal(size=(SAMPLES, 16)).astype(np.float32)
    _, result = pruned(model, tmp_path, data_of(x=x))
    found = {row.weight.weight: (row.method, row.note) for row in result.weights}
    said = "it is in a subgraph, whose inputs cannot be read: pruned by magnitude"
    assert found == {"w": ("admm", None), "v": ("magnitude", said), "u": ("magnitude", said)}


def test_a_layer_that_no_input_reaches_is_pruned_by_magnitude(tmp_path: Path) -> None:
    nodes = [
        node("Gather", ["x", "none"], "few", axis=0),
        node("MatMul", ["few", "w"], "m"),
        node("ReduceSum", ["m"], "s"),
        node("MatMul", ["x", "v"], "n"),
        node("Add", ["n", "s"], "y"),
    ]
    arrays = {"w": W(16, 6), "v": W(16, 6, seed=1), "none": np.zeros(0, np.int64)}
    model = om.model(nodes, arrays, inputs={"x": ("batch", 16)})
    x = np.random.default_rng(1).normal(size=(SAMPLES, 16)).astype(np.float32)
    target, result = pruned(model, tmp_path, data_of(x=x))
    by_name = {row.weight.weight: row for row in result.weights}
    assert (by_name["w"].method, by_name["v"].method) == ("magnitude", "admm")
    assert by_name["w"].note == "no calibration input reached it: pruned by magnitude"
    assert check(stored(target), 0, PATTERN).holds


def test_progress_tells_the_level_and_the_time_that_is_left(tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []

    class Listening(Silent):
        def step(self, text: str, done: int, total: int | None) -> None:
            told.append((re.sub(r"\d+ (s|min)\b", "...", text), done, total))

    path = om.save(net(), tmp_path / "dense.onnx")
    calibrate(path, data_of(x=X), progress=Listening())
    assert told == [
        ("first (1 of 4)", 0, 4),
        ("second (2 of 4, about ... left, ... with half the samples)", 1, 4),
        ("product (3 of 4, about ... left, ... with half the samples)", 2, 4),
        ("head (4 of 4, about ... left, ... with half the samples)", 3, 4),
    ]
    assert time_left(150, solving=0.2) == "about 2 min left, 90 s with half the samples"


class Dying(Here):
    """A process that ends in its third command, and then lives."""

    def call(self, command: str, *arguments: Any, **more: Any) -> Any:
        if len(self.calls) == 3:
            self.__init__([*self.calls, "died"])  # type: ignore[misc]  # another process
            raise WorkerDiedError("SIGSEGV", ending="SIGSEGV")
        return super().call(command, *arguments, **more)


def test_a_process_that_ends_is_started_again_at_a_lower_level(plain: Path, tmp_path: Path) -> None:
    here = Dying()
    target, _ = pruned(net(), tmp_path, data_of(x=X), here=here)
    assert here.calls == ["begin", "look", "look", "died", "begin", *["look"] * 4]
    assert share(run(plain, x=X), run(target, x=X)) < 1e-5


# --- what may go wrong, and what must not matter --------------------------------------------------


def test_an_operator_that_onnx_runtime_lacks_is_said(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Odd", ["x"], ["o"], name="odd", domain="own"),
        node("MatMul", ["o", "w"], "y"),
    ]
    model = om.model(nodes, {"w": W(16, 16)}, inputs={"x": ("batch", 16)})
    model.opset_import.append(helper.make_opsetid("own", 1))
    path, data = om.save(model, tmp_path / "dense.onnx"), data_of(x=np.ones((8, 16), np.float32))
    with pytest.raises(BuildFailedError, match=r"Odd") as refused:
        calibrate(path, data)
    assert "without --calibrate" in str(refused.value)


def test_data_that_the_model_cannot_take_are_bad_input(tmp_path: Path) -> None:
    nodes = [node("Gather", ["table", "ids"], "row"), node("MatMul", ["row", "w"], "y")]
    arrays = {"table": W(20, 16), "w": W(16, 16)}
    model = om.model(nodes, arrays, inputs={"ids": ("batch",)})
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    path, data = om.save(model, tmp_path / "dense.onnx"), data_of(ids=np.arange(16, 24))
    with pytest.raises(BadInputError) as refused:
        calibrate(path, data)
    assert "Non-zero status code" in refused.value.message
    assert refused.value.message.startswith(data.source)
    assert "idx=20" in refused.value.message


def test_a_weight_that_is_not_finite_names_its_layer(tmp_path: Path) -> None:
    weight = W(16, 16)
    weight[3, 4] = np.inf
    path = om.save(one_layer("Gemm", weight, (0, 16)), tmp_path / "dense.onnx")
    x = np.random.default_rng(1).normal(size=(SAMPLES, 16)).astype(np.float32)
    with pytest.raises(BadInputError, match="layer 'layer': 1 of 256 values of w "):
        calibrate(path, data_of(x=x))
