"""Runs with --permute-seconds: the same function, a pattern that holds, a smaller error."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support import onnx_models as om
from support.permuted_models import Net, random_inputs, run
from typer.testing import CliRunner

from twofour.cli.app import app
from twofour.errors import BadInputError
from twofour.graph.opened import open_onnx
from twofour.pattern import check
from twofour.pipeline.permuting import permute
from twofour.pipeline.run import export_dense, make_inputs, open_run, run_prune
from twofour.pipeline.stages import Silent
from twofour.pipeline.torch_permuting import why_not_put_back
from twofour.pruning.permutation.apply import same_outputs
from twofour.records.options import (
    CalibrationOptions,
    MethodOptions,
    Precision,
    RunOptions,
    Selection,
)
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


def data_of(folder: Path, shape: tuple[int, ...], samples: int = 60, name: str = "x") -> str:
    """Samples whose channels are of different sizes and hang together."""
    random = np.random.default_rng(1)
    x = random.normal(size=(samples, *shape)).astype(np.float32)
    np.savez(folder / "data.npz", **{name: x * np.float32(2) + np.float32(0.5)})
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
    said = f"orders of {len(found.classes)} classes of channels, at most "
    assert any(text.startswith(said) for text in told.texts)


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


def small_mlp(seed: int) -> onnx.ModelProto:
    net = Net(seed=seed)
    x = net.add("Relu", net.linear("x", 8, 16))
    y = net.linear(net.add("Relu", net.linear(x, 16, 16)), 16, 4)
    return net.model([y], {"x": ["batch", 8]})


def test_the_order_goes_where_the_outputs_of_the_whole_are_nearer_without(tmp_path: Path) -> None:
    path = om.save(small_mlp(1), tmp_path / "m.onnx")
    data, told = data_of(tmp_path, (8,)), Told()
    how = replace(options(data), method=MethodOptions(permute_seconds=60))
    plain = pruned(path, tmp_path / "plain", replace(how, method=MethodOptions()))
    result = pruned(path, tmp_path / "permuted", how, told)
    found, why = result.permutation, "the outputs of the pruned model are nearer to the dense ones"
    assert found is not None
    assert plain.repair is not None
    assert found.error_unpermuted == plain.repair.error_after
    assert found.error_permuted is not None
    assert found.error_unpermuted is not None
    assert found.error_permuted > found.error_unpermuted
    assert (found.taken, found.refused) == (0, f"{why} without it")
    assert f"the channels stay in their order: {why} without it" in told.notes
    files = [(tmp_path / name / "sparse.onnx").read_bytes() for name in ("plain", "permuted")]
    assert files[0] == files[1]
    assert result.weights == plain.weights


def test_the_order_stays_where_the_outputs_of_the_whole_are_nearer_with_it(tmp_path: Path) -> None:
    path = om.save(small_mlp(2), tmp_path / "m.onnx")
    how = options(data_of(tmp_path, (8,)))
    how = replace(how, method=MethodOptions(permute_seconds=60))
    result = pruned(path, tmp_path / "out", how)
    found = result.permutation
    assert found is not None
    assert result.repair is not None
    assert found.error_permuted is not None
    assert found.error_unpermuted is not None
    assert found.refused is None
    assert found.taken
    assert result.repair.error_after == found.error_permuted < found.error_unpermuted


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


TORCH = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.into = nn.Conv2d(width, 2 * width, 1, bias=False)
        self.norm = nn.BatchNorm2d(2 * width)
        self.out = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x):
        return x + self.out(torch.relu(self.norm(self.into(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(8, 16, 1)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        return self.head(self.blocks(torch.relu(self.stem(x))).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        x = self.norm(self.into(x))
        q, k, v = (y.reshape(*y.shape[:2], 2, 8).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.down(torch.relu(self.up(x)))


def images():
    torch.manual_seed(0)
    net = Net().eval()
    for each in net.modules():
        if isinstance(each, nn.BatchNorm2d):
            nn.init.normal_(each.running_mean)
            nn.init.uniform_(each.running_var, 0.5, 2)
            nn.init.uniform_(each.weight, 0.5, 2)
    return net, (torch.randn(2, 8, 6, 6),)


def mlp():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    return net.eval(), (torch.randn(2, 8),)


def tokens():
    torch.manual_seed(1)
    return Attention().eval(), (torch.randn(2, 5, 8),)
"""


def torch_outputs(make: str, weights: Path | None) -> np.ndarray:
    import torch

    from twofour import load_weights

    space: dict[str, Any] = {}
    exec(compile(TORCH, "nets", "exec"), space)  # the text above
    module, args = space[make]()
    if weights is not None:
        load_weights(module, weights)
    with torch.no_grad():
        found: np.ndarray = module(*args).numpy()
    return found


@pytest.mark.parametrize(
    ("make", "shape", "precision"),
    [("images", (8, 6, 6), Precision.FLOAT16), ("tokens", (5, 8), Precision.FLOAT32)],
)
def test_a_torch_model_is_permuted_in_its_own_weights(
    make: str, shape: tuple[int, ...], precision: Precision, tmp_path: Path
) -> None:
    from safetensors.numpy import load_file

    (tmp_path / "nets.py").write_text(TORCH)
    model, told = f"{tmp_path / 'nets.py'}:{make}", Told()
    how = options(data_of(tmp_path, shape), precision=precision)
    folder, result, validation = run_prune(model, tmp_path / "out", how, told)
    found = result.permutation
    assert found is not None
    assert found.refused is None, found.refused
    assert found.taken, found
    assert not validation.broken
    plain = run_prune(model, tmp_path / "plain", options(how.calibration.data, seconds=0))[1]
    assert [r.weight.weight for r in plain.weights] == [r.weight.weight for r in result.weights]
    assert plain.method == result.method == "admm"
    layers = {row.weight.layer for row in result.weights}
    assert {each.layer for kind in found.classes for each in kind.layers} <= layers
    assert held_out(result) < held_out(plain)
    dense = torch_outputs(make, None)
    sparse = torch_outputs(make, folder / "weights.safetensors")
    other = torch_outputs(make, tmp_path / "plain" / "weights.safetensors")
    assert np.square(sparse - dense).sum() < 0.5 * np.square(dense).sum()
    assert not np.array_equal(sparse, other)
    for row in result.weights:
        array = load_file(folder / "weights.safetensors")[str(row.weight.weight)]
        if row.pruned and row.weight.axis is not None:
            assert not check(array, row.weight.axis, PATTERN).violations


def test_a_torch_model_whose_outputs_are_nearer_without_keeps_its_order(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    (tmp_path / "nets.py").write_text(TORCH)
    data = data_of(tmp_path, (8,), name="input")
    how = options(data, precision=Precision.FLOAT32)
    how = replace(how, method=MethodOptions(permute_seconds=60))
    folder, result, validation = run_prune(f"{tmp_path / 'nets.py'}:mlp", tmp_path / "out", how)
    found = result.permutation
    assert found is not None
    assert found.refused is not None
    assert "nearer to the dense ones without it" in found.refused
    assert result.repair is not None
    assert found.error_unpermuted == result.repair.error_after
    assert not validation.broken
    space: dict[str, Any] = {}
    exec(compile(TORCH, "nets", "exec"), space)  # the text above
    dense = space["mlp"]()[0].state_dict()
    for key, array in load_file(folder / "weights.safetensors").items():
        own = dense[key].numpy()
        near = (own * array).sum() / np.sqrt(np.square(own).sum() * np.square(array).sum())
        assert near > 0.6, key
    assert [file.name for file in (folder / "stages").glob("unpermuted*")] == []
    assert (folder / "stages" / "one-shot.safetensors").exists() == (
        result.repair.taken is not None
    )


def test_a_torch_model_that_differs_by_itself_is_not_permuted(tmp_path: Path) -> None:
    text = TORCH.replace(".mean((2, 3)))", ".mean((2, 3))) + torch.rand(x.shape[0], 8)")
    (tmp_path / "nets.py").write_text(text)
    how, model = options(precision=Precision.FLOAT32), f"{tmp_path / 'nets.py'}:images"
    found = run_prune(model, tmp_path / "out", how)[1].permutation
    assert found is not None
    assert found.taken == 0
    assert found.refused is not None
    assert "off by" in found.refused
    plain = run_prune(model, tmp_path / "plain", replace(how, method=MethodOptions()))[0]
    weights = [(f / "weights.safetensors").read_bytes() for f in (tmp_path / "out", plain)]
    assert weights[0] == weights[1]


def test_orders_that_a_module_cannot_have_are_told(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(TORCH)
    model = f"{tmp_path / 'nets.py'}:tokens"
    with open_run(model, tmp_path / "out", options(), Told()) as opened:
        export_dense(opened)
        assert why_not_put_back(opened, {"other": (1, 0)}) == (
            "the model has no class of channels 'other'"
        )
        assert why_not_put_back(opened, {}) is None


def test_a_killed_search_goes_on_behind_the_classes_that_have_their_order(tmp_path: Path) -> None:
    path = om.save(mlp(), tmp_path / "m.onnx")
    whole = pruned(path, tmp_path / "whole", options(seconds=60)).permutation
    script = Path(__file__).parents[1] / "support" / "killed_permutation.py"
    out = tmp_path / "killed"
    killed = subprocess.run([sys.executable, str(script), str(path), str(out)], check=False)
    assert killed.returncode == -9
    state = out / "stages" / "permutation" / "state.json"
    assert len(json.loads(state.read_text())["records"]) == 1
    told = Told()
    resumed = pruned(path, out, options(seconds=60), told).permutation
    assert resumed == whole
    assert whole is not None
    assert not whole.is_time_cut
    assert not state.exists()


@pytest.mark.slow
def test_a_whole_run_shows_its_permutation_and_its_budget(tmp_path: Path) -> None:
    path = om.save(small_mlp(2), tmp_path / "m.onnx")
    data, out = data_of(tmp_path, (8,)), tmp_path / "out"
    files = (str(path), "--calibrate", data, "--out", str(out))
    asked = ("--permute-seconds", "30", "--budget", "0.6", "--loss", "layer", "--jobs", "1")
    result = CliRunner().invoke(app, ["prune-export-build", *files, "--all-layers", *asked])
    assert result.exit_code == 0, result.output
    page = (out / "report.md").read_text()
    said = " ".join(result.stdout.split())
    pruned = json.loads((out / "prune.json").read_text())
    errors = [pruned["permutation"][f"error_{order}"] for order in ("permuted", "unpermuted")]
    chosen = json.loads((out / "sensitivity.json").read_text())["budget"]["chosen"]
    assert chosen["share"] >= 0.6
    assert 0 < sum(row["pruned"] for row in pruned["weights"]) == chosen["layers"] < 3
    for text in (said, page):
        assert f"prune {chosen['layers']} layers: {100 * chosen['share']:.1f} % of the" in text
        assert "of channels are in another order" in text or "refused: the outputs" in text
        assert "outputs on held-out samples" in text
    assert all(error > 0 for error in errors)
    assert "## Channel permutation" in page
    assert "Channel permutation" in (out / "report.html").read_text()
