"""Repair of ONNX files: what is saved does what the record says, and nothing else changes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support import onnx_models as om
from test_onnx_calibrating import EVERY, PATTERN, Here, data_of, job_of, run

from twofour.engines.onnxruntime.session import OrtSession
from twofour.errors import BuildFailedError
from twofour.pattern import check
from twofour.pipeline.onnx_calibrating import calibrate
from twofour.pipeline.sources.calibration.data import CalibrationData
from twofour.pipeline.stages import Silent
from twofour.pruning.onnx_file import prune_onnx
from twofour.records.pruning import PruneResult, Repair, RepairKind

SAMPLES = 60
HELD = np.arange(SAMPLES) % 10 == 9
W = om.weights


def images(samples: int = SAMPLES) -> om.Array:
    return np.random.default_rng(5).normal(0.5, 1, (samples, 8, 6, 6)).astype(np.float32)


def norm(name: str, channels: int = 8) -> dict[str, om.Array]:
    random = np.random.default_rng(len(name))
    return {
        f"{name}.scale": random.uniform(0.5, 1.5, channels).astype(np.float32),
        f"{name}.bias": random.normal(0, 0.1, channels).astype(np.float32),
        f"{name}.mean": random.normal(0, 0.1, channels).astype(np.float32),
        f"{name}.var": random.uniform(0.5, 2, channels).astype(np.float32),
    }


def norm_node(name: str, x: str, y: str, **attributes: Any) -> onnx.NodeProto:
    inputs = [x, *(f"{name}.{part}" for part in ("scale", "bias", "mean", "var"))]
    return helper.make_node("BatchNormalization", inputs, [y], name=name, **attributes)


def cnn() -> onnx.ModelProto:
    """Conv, batch norm, twice; then a convolution without one, and a Gemm."""
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a1"], name="one", pads=[1, 1, 1, 1]),
        norm_node("n1", "a1", "s1"),
        helper.make_node("Relu", ["s1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["a2"], name="two", pads=[1, 1, 1, 1]),
        norm_node("n2", "a2", "s2"),
        helper.make_node("Relu", ["s2"], ["r2"]),
        helper.make_node("Conv", ["r2", "w3", "b3"], ["a3"], name="three"),
        helper.make_node("GlobalAveragePool", ["a3"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "w4", "b4"], ["y"], name="four", alpha=0.5, beta=2.0),
    ]
    constants = {
        "w1": W(8, 8, 3, 3),
        "b1": W(8),
        "w2": W(8, 8, 3, 3),
        "w3": W(8, 8, 3, 3),
        "b3": W(8),
        "w4": W(8, 6),
        "b4": W(6),
        **norm("n1"),
        **norm("n2"),
    }
    return om.model(nodes, constants, inputs={"x": ("batch", 8, 6, 6)})


def folded() -> onnx.ModelProto:
    """Layers of every kind without a batch norm, each with what it may have for a bias."""
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["a1"], name="conv", group=2),
        helper.make_node("Relu", ["a1"], ["r1"]),
        helper.make_node("ConvTranspose", ["r1", "w2", "b2"], ["a2"], name="up", group=2),
        helper.make_node("Relu", ["a2"], ["r2"]),
        helper.make_node("Transpose", ["r2"], ["t"], perm=[0, 2, 3, 1]),
        helper.make_node("MatMul", ["t", "w3"], ["m"], name="project"),
        helper.make_node("Add", ["b3", "m"], ["a3"], name="add"),
        helper.make_node("Relu", ["a3"], ["r3"]),
        helper.make_node("MatMul", ["r3", "w4"], ["y"], name="last"),
    ]
    constants = {
        "w1": W(8, 4, 3, 3),
        "b1": W(8),
        "w2": W(8, 4, 3, 3),
        "b2": W(8),
        "w3": W(8, 12),
        "b3": W(12),
        "w4": W(12, 5),
    }
    return om.model(nodes, constants, inputs={"x": ("batch", 8, 6, 6)})


def repaired(
    model: onnx.ModelProto | Path,
    folder: Path,
    data: CalibrationData | None = None,
    *,
    host: Here | None = None,
    **options: Any,
) -> tuple[Path, PruneResult, Repair]:
    """The saved file by magnitude, and what is said of its repair."""
    folder.mkdir(exist_ok=True)
    path = model if isinstance(model, Path) else om.save(model, folder / "dense.onnx")
    options = {"repair": None, "refit": 0, "bias_correction": False, **options}
    job = job_of(path, data or data_of(x=images()), "magnitude", **options)
    found = calibrate(job, Silent(), host or Here())
    target = folder / "sparse.onnx"
    result = prune_onnx(job.opened, target, PATTERN, EVERY, method="magnitude", calibrated=found)
    assert result.repair is not None
    return target, result, result.repair


def forced(
    monkeypatch: pytest.MonkeyPatch, model: onnx.ModelProto, folder: Path, kind: RepairKind
) -> Path:
    monkeypatch.setattr("twofour.pipeline.onnx_repairing.fitting", lambda **_sites: (kind,))
    target, _, record = repaired(model, folder, repair=True)
    assert record.taken is kind
    return target


def constants(path: Path) -> dict[str, om.Array]:
    return {t.name: numpy_helper.to_array(t) for t in om.load(path).graph.initializer}


def over(tensor: om.Array, axis: int = 1) -> tuple[int, ...]:
    return tuple(at for at in range(tensor.ndim) if at != axis % tensor.ndim)


def test_batch_norms_get_the_statistics_of_the_saved_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = forced(monkeypatch, cnn(), tmp_path, RepairKind.BATCH_NORM)
    stored, x = constants(target), images()
    for name, tensor in (("n1", "a1"), ("n2", "a2")):
        values = run(target, tensor, x=x)[~HELD].astype(np.float64)
        np.testing.assert_allclose(
            stored[f"{name}.mean"], values.mean(over(values)), rtol=1e-4, atol=1e-5
        )
        variance = values.var(over(values), ddof=1)
        np.testing.assert_allclose(stored[f"{name}.var"], variance, rtol=1e-4)
    before = constants(tmp_path / "dense.onnx")
    assert {n for n in stored if not np.array_equal(stored[n], before[n])} == {
        *("w1", "w2", "w3", "w4"),
        *("n1.mean", "n1.var", "n2.mean", "n2.var"),
    }


@pytest.mark.parametrize(
    ("model", "sites"),
    [
        (cnn(), {"s1": 1, "s2": 1, "a3": 1, "y": 1}),
        (folded(), {"a1": 1, "a2": 1, "a3": -1}),
    ],
    ids=["with batch norms", "without"],
)
def test_matching_gives_the_saved_model_the_moments_of_the_dense_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: onnx.ModelProto, sites: dict[str, int]
) -> None:
    target, x = forced(monkeypatch, model, tmp_path, RepairKind.MATCHING), images()
    for tensor, axis in sites.items():
        dense = run(tmp_path / "dense.onnx", tensor, x=x)[~HELD].astype(np.float64)
        now = run(target, tensor, x=x)[~HELD].astype(np.float64)
        few = dense.ndim == 2
        np.testing.assert_allclose(
            now.std(over(now, axis)), dense.std(over(dense, axis)), rtol=0.3 if few else 0.01
        )
        np.testing.assert_allclose(
            now.mean(over(now, axis)), dense.mean(over(dense, axis)), rtol=1e-3, atol=1e-4
        )


def left_weights() -> onnx.ModelProto:
    """A Gemm and a MatMul whose weights stand on the left: channels run along their rows."""
    nodes = [
        helper.make_node("Gemm", ["w", "x", "c"], ["a"], name="gemm", transA=1, transB=1),
        helper.make_node("Transpose", ["a"], ["t"], perm=[1, 0]),
        helper.make_node("Reshape", ["t", "shape"], ["r"]),
        helper.make_node("MatMul", ["v", "r"], ["y"], name="matmul"),
    ]
    constants = {
        "w": W(16, 8),
        "c": W(8, 1),
        "shape": np.array([-1, 8, 1]),
        "v": W(4, 8),
    }
    return om.model(nodes, constants, inputs={"x": ("batch", 16)})


def test_channels_of_a_weight_on_the_left_are_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "twofour.pipeline.onnx_repairing.fitting", lambda **_: (RepairKind.MATCHING,)
    )
    x = np.random.default_rng(5).normal(0.5, 1, (SAMPLES, 16)).astype(np.float32)
    target, _, record = repaired(left_weights(), tmp_path, data_of(x=x), repair=True)
    assert record.taken is RepairKind.MATCHING
    dense = run(tmp_path / "dense.onnx", "a", x=x)[:, ~HELD].astype(np.float64)
    now = run(target, "a", x=x)[:, ~HELD].astype(np.float64)
    np.testing.assert_allclose(now.std(1), dense.std(1), rtol=0.1)  # 54 values say little of it
    np.testing.assert_allclose(now.mean(1), dense.mean(1), rtol=1e-3, atol=1e-4)


def test_a_layer_without_outputs_is_left_alone(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="fc"),
        helper.make_node("MatMul", ["m", "none"], ["n"], name="empty"),
        helper.make_node("Concat", ["m", "n"], ["y"], axis=1),
    ]
    constants = {"w": W(16, 8), "none": np.zeros((8, 0), np.float32)}
    model = om.model(nodes, constants, inputs={"x": ("batch", 16)})
    x = np.random.default_rng(5).normal(0.5, 1, (SAMPLES, 16)).astype(np.float32)
    _, _, record = repaired(model, tmp_path, data_of(x=x), repair=True)
    assert record.taken is RepairKind.MATCHING
    assert [each.changed for each in record.tried] == [1]


def test_bfloat16_is_repaired_in_float32(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=16),
        helper.make_node("Gemm", ["h", "w", "b"], ["a"], name="one"),
        helper.make_node("Gemm", ["a", "v", "c"], ["n"], name="two"),
        helper.make_node("Cast", ["n"], ["y"], to=1),
    ]
    arrays = {
        "w": W(16, 8, dtype=om.BFLOAT16),
        "b": W(8, dtype=om.BFLOAT16, seed=1),
        "v": W(8, 4, dtype=om.BFLOAT16, seed=2),
        "c": W(4, dtype=om.BFLOAT16, seed=3),
    }
    model = om.model(nodes, arrays, inputs={"x": ("batch", 16)})
    x = np.random.default_rng(5).normal(0.5, 1, (SAMPLES, 16)).astype(np.float32)
    target, _, record = repaired(model, tmp_path, data_of(x=x), repair=True)
    assert record.taken is RepairKind.MATCHING

    def outputs(path: Path) -> om.Array:
        found = {
            t.name: numpy_helper.to_array(t).astype(np.float64)
            for t in om.load(path).graph.initializer
        }
        y: om.Array = ((x @ found["w"] + found["b"]) @ found["v"] + found["c"])[HELD]
        return y

    dense, sparse = outputs(tmp_path / "dense.onnx"), outputs(target)
    error = ((dense - sparse) ** 2).sum() / ((dense - dense.mean(axis=0)) ** 2).sum()
    assert record.error_after == pytest.approx(float(error), rel=0.02)
    assert {t.data_type for t in om.load(target).graph.initializer} == {onnx.TensorProto.BFLOAT16}


@pytest.mark.parametrize("model", [cnn(), folded()], ids=["with batch norms", "without"])
def test_the_record_is_what_the_saved_file_does(tmp_path: Path, model: onnx.ModelProto) -> None:
    target, result, record = repaired(model, tmp_path, repair=True)
    x = images()
    dense, sparse = run(tmp_path / "dense.onnx", x=x)[HELD], run(target, x=x)[HELD]
    error = ((dense - sparse) ** 2).sum() / ((dense - dense.mean(axis=0)) ** 2).sum()
    assert record.taken is not None
    assert record.error_after == pytest.approx(float(error), rel=1e-3)
    assert record.error_after == min(each.error for each in record.tried if each.error is not None)
    assert record.judged_on == 6
    stored = constants(target)
    for row in result.weights:
        assert row.weight.weight is not None
        assert row.weight.axis is not None
        values = stored[row.weight.weight]
        assert check(values, row.weight.axis, PATTERN).violations == 0
        assert not np.signbit(values[values == 0]).any()
        assert row.zeros == np.count_nonzero(values == 0)


def test_without_repair_nothing_is_said_and_nothing_done(tmp_path: Path) -> None:
    path = om.save(cnn(), tmp_path / "dense.onnx")
    job = job_of(path, data_of(x=images()), "magnitude", repair=False)
    here = Here()
    assert calibrate(job, Silent(), here).repair is None
    assert "measure" not in here.calls


def test_what_needs_no_repair_is_left_as_it_is(tmp_path: Path) -> None:
    first = tmp_path / "first"
    target, _, _ = repaired(cnn(), first)
    before = constants(target)
    (tmp_path / "again").mkdir()
    copied = Path(shutil.copy(target, tmp_path / "again" / "dense.onnx"))
    again, _, record = repaired(copied, tmp_path / "again")
    assert record.taken is None
    assert record.error_before == record.error_after == pytest.approx(0, abs=1e-9)
    after = constants(again)
    assert all(np.array_equal(after[name], values) for name, values in before.items())


def test_statistics_that_two_batch_norms_share_stay_and_each_gets_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = cnn()
    for node in model.graph.node:
        if node.name == "n2":
            node.input[3:] = ["n1.mean", "n1.var"]
    target = forced(monkeypatch, model, tmp_path, RepairKind.BATCH_NORM)
    before, after = constants(tmp_path / "dense.onnx"), constants(target)
    for name in ("n1.mean", "n1.var"):
        assert np.array_equal(before[name], after[name])
    x, nodes = images(), {node.name: node for node in om.load(target).graph.node}
    for name, tensor in (("n1", "a1"), ("n2", "a2")):
        values = run(target, tensor, x=x)[~HELD].astype(np.float64)
        read = after[nodes[name].input[3]]
        np.testing.assert_allclose(read, values.mean(over(values)), rtol=1e-4, atol=1e-5)


def test_batch_norms_in_training_mode_and_with_computed_statistics_are_left_alone(
    tmp_path: Path,
) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a1"], name="one"),
        helper.make_node(
            "BatchNormalization",
            ["a1", *(f"n1.{part}" for part in ("scale", "bias", "mean", "var"))],
            ["s1", "m", "v"],
            name="n1",
            training_mode=1,
        ),
        helper.make_node("ReduceMean", ["s1", "axes"], ["mean"], keepdims=0),
        helper.make_node(
            "BatchNormalization", ["s1", "n1.scale", "n1.bias", "mean", "n1.var"], ["y"], name="n2"
        ),
    ]
    values = {"w1": W(8, 8, 3, 3), "axes": np.array([0, 2, 3]), **norm("n1")}
    model = om.model(nodes, values, inputs={"x": ("batch", 8, 6, 6)})
    _, _, record = repaired(model, tmp_path)
    assert [each.kind for each in record.tried] == [RepairKind.MATCHING]
    assert [each.changed for each in record.tried] == [1]


def test_float16_stays_what_it_is(tmp_path: Path) -> None:
    model, kind = cnn(), np.float16
    for tensor in model.graph.initializer:
        tensor.CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(tensor).astype(kind), tensor.name)
        )
    code = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = code
    target, _, record = repaired(model, tmp_path, data_of(x=images().astype(kind)))
    assert record.taken is not None
    assert {values.dtype for values in constants(target).values()} == {np.dtype(kind)}
    x = images().astype(kind)
    dense, sparse = (
        OrtSession(path).outputs({"x": x})["y"][HELD].astype(np.float64)
        for path in (tmp_path / "dense.onnx", target)
    )
    error = ((dense - sparse) ** 2).sum() / ((dense - dense.mean(axis=0)) ** 2).sum()
    assert record.error_after == pytest.approx(error, rel=0.03)


@pytest.mark.parametrize("refit", [0, 4])
def test_a_mask_that_is_kept_is_repaired_to_the_dense_reference(tmp_path: Path, refit: int) -> None:
    """With what its file has lost: by itself nothing would be missing."""
    dense = om.save(cnn(), tmp_path / "dense.onnx")
    (tmp_path / "masked").mkdir()
    masked = tmp_path / "masked" / "model.onnx"
    prune_onnx(job_of(dense, data_of(x=images())).opened, masked, PATTERN, EVERY)
    job = job_of(masked, data_of(x=images()), "keep", reference=dense, repair=None, refit=refit)
    found = calibrate(job, Silent(), Here())
    target = tmp_path / "sparse.onnx"
    result = prune_onnx(job.opened, target, PATTERN, EVERY, method="keep", calibrated=found)
    record = result.repair
    assert record is not None
    assert record.taken is not None
    assert record.error_before is not None
    assert record.error_after is not None
    x = images()
    wanted, given = run(dense, x=x)[HELD], run(target, x=x)[HELD]
    error = ((wanted - given) ** 2).sum() / ((wanted - wanted.mean(axis=0)) ** 2).sum()
    assert record.error_after == pytest.approx(float(error), rel=1e-3)
    assert record.error_after < record.error_before
    before, after = constants(masked), constants(target)
    assert all(np.array_equal(before[w] == 0, after[w] == 0) for w in ("w1", "w2", "w3", "w4"))


def test_a_reference_of_other_names_is_nothing_to_repair_by(tmp_path: Path) -> None:
    masked = tmp_path / "model.onnx"
    model = cnn()
    dense = om.save(model, tmp_path / "dense.onnx")
    prune_onnx(job_of(dense, data_of(x=images())).opened, masked, PATTERN, EVERY)
    made = {node.output[0] for node in model.graph.node}
    for node in model.graph.node:
        node.output[0] += ".1"
        names = [name + ".1" if name in made else name for name in node.input]
        node.input[:] = names
    model.graph.output[0].name = "y.1"
    om.save(model, dense)
    job = job_of(masked, data_of(x=images()), "keep", reference=dense, repair=None, refit=0)
    found = calibrate(job, Silent(), Here())
    assert found.repair is not None
    assert (found.repair.tried, found.repair.taken) == ((), None)


def test_weights_of_several_nodes_are_no_place_for_a_scale(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="one"),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("MatMul", ["r", "w"], ["y"], name="other"),
    ]
    model = om.model(nodes, {"w": W(8, 8)}, inputs={"x": ("batch", 8)})
    x = np.random.default_rng(0).normal(size=(SAMPLES, 8)).astype(np.float32)
    _, _, record = repaired(model, tmp_path, data_of(x=x))
    assert (record.tried, record.taken) == ((), None)
    assert record.why.startswith("no batch norm and no pruned layer")


class Failing(Here):
    """ONNX Runtime fails in the second measuring."""

    def call(self, command: str, *arguments: object) -> Any:
        if command == "measure" and "measure" in self.calls:
            raise BuildFailedError("no kernel")
        return super().call(command, *arguments)


def test_a_failure_on_the_way_leaves_the_pruned_model_as_it_was(tmp_path: Path) -> None:
    target, _, record = repaired(cnn(), tmp_path, host=Failing())
    assert record.taken is None
    assert record.why == "ONNX Runtime failed while it was tried: no kernel"
    stored, before = constants(target), constants(tmp_path / "dense.onnx")
    assert np.array_equal(stored["n1.mean"], before["n1.mean"])


def test_external_data_is_changed_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "dense.onnx"
    onnx.save(cnn(), path, save_as_external_data=True, location="dense.data", size_threshold=0)
    target, _, record = repaired(path, tmp_path)
    assert record.taken is not None
    x = images()
    dense = om.load(path), om.load(target)
    assert len(dense[0].graph.initializer) == len(dense[1].graph.initializer)
    before, after = (
        OrtSession(path).outputs({"x": x})["y"],
        OrtSession(target).outputs({"x": x})["y"],
    )
    error = ((before - after)[HELD] ** 2).sum() / (
        (before[HELD] - before[HELD].mean(axis=0)) ** 2
    ).sum()
    assert record.error_after == pytest.approx(float(error), rel=1e-3)


def test_too_few_samples_to_hold_one_out_take_nothing(tmp_path: Path) -> None:
    _, _, record = repaired(cnn(), tmp_path, data_of(x=images(9)))
    assert (record.taken, record.judged_on, record.error_before) == (None, 0, None)
    assert record.why == "no sample was held out to judge it by"
    _, _, asked = repaired(cnn(), tmp_path / "asked", data_of(x=images(9)), repair=True)
    assert asked.taken is RepairKind.BATCH_NORM


def test_the_size_of_batches_does_not_matter(tmp_path: Path) -> None:
    records = [
        repaired(cnn(), tmp_path / str(step), data_of(x=images(), step=step))[2] for step in (7, 60)
    ]
    for record in records[1:]:
        assert record.taken is records[0].taken
        assert record.error_after == pytest.approx(records[0].error_after, rel=1e-3)
