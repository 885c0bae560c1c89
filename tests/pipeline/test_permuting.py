"""Runs with --permute-seconds: the same function, a pattern that holds, a smaller error."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support import onnx_models as om
from support.permuted_models import Net, random_inputs, run

from twofour.errors import BadInputError
from twofour.graph.opened import open_onnx
from twofour.pattern import check
from twofour.pipeline.permuting import permute
from twofour.pipeline.run import export_dense, make_inputs, open_run, run_prune
from twofour.pipeline.stages import Silent
from twofour.pruning.permutation.apply import same_outputs
from twofour.records.options import CalibrationOptions, MethodOptions, RunOptions, Selection
from twofour.records.pruning import PruneResult
from twofour.records.weights import Pattern

EVERY = Selection(all_layers=True)
PATTERN = Pattern(2, 4)


@dataclass
class Told(Silent):
    """Remembers what a run says."""

    notes: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    did: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Remember."""
        self.notes.append(text)

    def step(self, text: str, done: int, total: int | None) -> None:  # noqa: ARG002  # Protocol
        """Remember."""
        self.texts.append(text)

    def done(self, name: str, *, seconds: float, reused: bool) -> None:  # noqa: ARG002  # Protocol
        """Remember."""
        if not reused:
            self.did.append(name)


def residual_net() -> onnx.ModelProto:
    """A residual stream of 16 channels, branches of 32, a grouped convolution, a head."""
    net = Net(seed=3)
    x = net.add("Relu", net.conv("x", 8, 16))
    for _ in range(2):
        inner = net.add("Relu", net.conv(x, 16, 32))
        inner = net.add("Relu", net.conv(inner, 32, 32, groups=2))
        x = net.add("Add", x, net.conv(inner, 32, 16))
    y = net.conv(x, 16, 4)
    return net.model([y], {"x": ["batch", 8, 4, 4]})


def mlp() -> onnx.ModelProto:
    net = Net(seed=5)
    x = net.add("Relu", net.linear("x", 16, 64))
    y = net.linear(net.add("Relu", net.linear(x, 64, 32)), 32, 8)
    return net.model([y], {"x": ["batch", 20, 16]})


def transformer() -> onnx.ModelProto:
    """One block of a BERT: heads of 8, two layer norms, a hidden layer."""
    width, heads, hidden = 16, 2, 32
    net = Net(seed=7)

    def norm(x: str) -> str:
        scale, shift = net.constant(width), net.constant(width)
        return str(net.add("LayerNormalization", x, scale, shift, axis=-1))

    stream = norm(net.linear("x", 8, width))
    shape = net.numbers(0, 0, heads, width // heads)
    q, k, v = (
        net.add("Transpose", net.add("Reshape", net.linear(stream, width, width), shape), perm=p)
        for p in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
    )
    seen = net.add("MatMul", net.add("Softmax", net.add("MatMul", q, k), axis=-1), v)
    joined = net.add("Transpose", seen, perm=[0, 2, 1, 3])
    flat = net.add("Reshape", joined, net.numbers(0, 0, width))
    stream = norm(net.add("Add", stream, net.linear(flat, width, width)))
    inner = net.add("Relu", net.linear(stream, width, hidden))
    stream = norm(net.add("Add", stream, net.linear(inner, hidden, width)))
    return net.model([net.linear(stream, width, 4)], {"x": ["batch", "length", 8]})


NETS = {
    "residual": (residual_net, (8, 4, 4)),
    "mlp": (mlp, (20, 16)),
    "transformer": (transformer, (5, 8)),
}


def data_of(folder: Path, shape: tuple[int, ...], samples: int = 60) -> str:
    """Samples whose channels are of different sizes and hang together."""
    random = np.random.default_rng(1)
    x = random.normal(size=(samples, *shape)).astype(np.float32)
    np.savez(folder / "data.npz", x=x * np.float32(2) + np.float32(0.5))
    return str(folder / "data.npz")


def options(data: str | None = None, seconds: float = 1.0, **more: Any) -> RunOptions:
    asked: dict[str, Any] = {"selection": EVERY, "input_shapes": (), **more}
    return RunOptions(
        calibration=CalibrationOptions(data=data),
        method=MethodOptions(permute_seconds=seconds, repair=False),
        **asked,
    )


def pruned(path: Path, out: Path, how: RunOptions, told: Told | None = None) -> PruneResult:
    return run_prune(str(path), out, how, told)[1]


def held_out(result: PruneResult) -> float:
    errors = [row.output_error for row in result.weights if row.output_error is not None]
    return float(np.mean([e.held_out for e in errors if e.held_out is not None]))


@pytest.mark.parametrize("kind", NETS)
def test_the_permuted_model_is_the_same_and_loses_less(kind: str, tmp_path: Path) -> None:
    made, shape = NETS[kind]
    path = om.save(made(), tmp_path / "m.onnx")
    data, told = data_of(tmp_path, shape), Told()
    plain = pruned(path, tmp_path / "plain", options(data, seconds=0))
    better = pruned(path, tmp_path / "better", options(data), told)
    found = better.permutation
    assert plain.permutation is None
    assert found is not None
    assert found.refused is None
    assert found.taken, found
    assert "permute" in told.did
    inputs = random_inputs(open_onnx(path).proto)
    dense = run(tmp_path / "better" / "dense.onnx", inputs)
    permuted = run(tmp_path / "better" / "permuted.onnx", inputs)
    assert same_outputs(dense, permuted, dtype="float32") is None
    assert same_outputs(run(path, inputs), dense, dtype="float32") is None
    for each in found.classes:
        before = [row.error_before for row in each.layers if row.error_before is not None]
        after = [row.error_after for row in each.layers if row.error_after is not None]
        assert each.taken == (bool(before) and np.mean(after) < np.mean(before))
    assert held_out(better) < held_out(plain)
    sparse = open_onnx(tmp_path / "better" / "sparse.onnx")
    rows = sparse.weights(PATTERN)
    for weight, tensor in zip(rows.weights, rows.tensors, strict=True):
        assert tensor is not None
        assert weight.axis is not None
        assert not check(onnx.numpy_helper.to_array(tensor), weight.axis, PATTERN).violations
    assert [row.weight.layer for row in plain.weights] == [w.weight.layer for w in better.weights]
    assert any("at most" in text for text in told.texts)


def test_without_data_magnitudes_choose_and_that_is_said(tmp_path: Path) -> None:
    path, told = om.save(mlp(), tmp_path / "m.onnx"), Told()
    plain = pruned(path, tmp_path / "plain", options(seconds=0))
    better = pruned(path, tmp_path / "better", options(), told)
    assert better.permutation is not None
    assert better.permutation.taken == 2
    assert any(
        note.startswith("the order of channels is chosen by magnitude") for note in told.notes
    )
    for before, after in zip(plain.weights[1:], better.weights[1:], strict=True):
        assert before.kept_magnitude is not None
        assert after.kept_magnitude is not None
        assert after.kept_magnitude > before.kept_magnitude + 0.01
    (layer,) = better.permutation.classes[0].layers
    assert layer.error_before is None
    assert layer.kept_after is not None
    assert layer.kept_before is not None
    assert layer.kept_after > layer.kept_before


def test_nothing_to_permute_is_said_with_its_reason(tmp_path: Path) -> None:
    net = Net()
    path = om.save(net.model([net.conv("x", 8, 4)], {"x": [2, 8, 4, 4]}), tmp_path / "m.onnx")
    told = Told()
    found = pruned(path, tmp_path / "out", options(), told).permutation
    assert found is not None
    assert (found.classes, found.taken) == ((), 0)
    assert [row.layer for row in found.fixed] == ["Conv_0"]
    assert "'x'" in found.fixed[0].reason
    assert "no input channels of the pruned layers can change places" in told.notes
    assert not (tmp_path / "out" / "permuted.onnx").exists()


def test_a_layer_that_came_in_the_pattern_keeps_its_order(tmp_path: Path) -> None:
    first = pruned(om.save(mlp(), tmp_path / "m.onnx"), tmp_path / "once", options(seconds=0))
    assert first.weights
    again = pruned(tmp_path / "once" / "sparse.onnx", tmp_path / "again", options()).permutation
    assert again is not None
    assert again.taken == 0
    assert {each.reason for each in again.classes} == {
        f"{layer} is 2:4 already in the order it has" for layer in ("MatMul_3", "MatMul_6")
    }


class Differing:
    """Sessions in which the permuted model gives something else."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def open(self, path: Path) -> Differing:
        return Differing(path)

    def outputs(self, inputs: Any) -> dict[str, np.ndarray]:
        assert self._path is not None
        found = run(self._path, inputs)
        off = 1e-2 if self._path.name == "permuted.onnx" else 0.0
        return {name: values + np.float32(off) for name, values in found.items()}

    def close(self) -> None:
        """Nothing is held."""


def test_a_difference_in_the_outputs_refuses_the_permutation(tmp_path: Path) -> None:
    path = om.save(mlp(), tmp_path / "m.onnx")
    told = Told()
    with open_run(str(path), tmp_path / "out", options(), told) as opened:
        make_inputs(opened, export_dense(opened))
        differing: Any = Differing()
        found = opened.do(permute(replace(opened, sessions=differing)))
    assert found.file is None
    assert found.orders == {}
    assert found.about.taken == 0
    assert found.about.refused is not None
    assert "off by 0.01" in found.about.refused
    assert any(note.startswith("the channels stay in their order: output") for note in told.notes)
    assert not (tmp_path / "out" / "permuted.onnx").exists()


def test_the_same_command_goes_on_and_another_does_it_again(tmp_path: Path) -> None:
    path = om.save(mlp(), tmp_path / "m.onnx")
    how = options()
    first = pruned(path, tmp_path / "out", how)
    told = Told()
    assert pruned(path, tmp_path / "out", how, told) == first
    assert told.did == []
    without = pruned(path, tmp_path / "out", options(seconds=0), told)
    assert without.permutation is None
    assert not (tmp_path / "out" / "permuted.onnx").exists()
    assert told.did == ["prune", "validate"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"method": MethodOptions(name="keep", permute_seconds=1)}, "--method keep"),
        ({"dense_reference": "other.onnx"}, "--dense-reference"),
    ],
)
def test_a_mask_that_is_there_is_not_torn_apart(
    how: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = om.save(mlp(), tmp_path / "m.onnx")
    om.save(mlp(), tmp_path / "other.onnx")
    if "dense_reference" in how:
        how = {"dense_reference": str(tmp_path / "other.onnx")}
    asked = replace(options(data_of(tmp_path, (20, 16))), **how)
    with pytest.raises(BadInputError, match=f"mask that {said} says"):
        pruned(path, tmp_path / "out", asked)
