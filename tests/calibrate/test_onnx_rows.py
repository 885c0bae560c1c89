"""Every layer of an ONNX graph as rows times matrices: their product is what the node gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from support import onnx_models as om
from support.ort import outputs

from twofour.calibrate.input_rows import BatchMarks, InputReading, rows_of
from twofour.calibrate.layer_plan import WeightPart, main_graph, plan_calibration
from twofour.calibrate.pieces import BatchFile, CalibrationWorker, Tap
from twofour.graph.files import read_tensor
from twofour.graph.opened import OpenedModel
from twofour.inputs.samples import factors_of, held_out_samples
from twofour.pruning.matrices import Layout, Window, sampled, to_stack
from twofour.pruning.selection import choose
from twofour.records.weights import Pattern, Selection

PATTERN = Pattern(2, 4)
EVERY = Selection(all_layers=True)


def pieces_of(model: onnx.ModelProto, folder: Any) -> tuple[WeightPart, ...]:
    opened = OpenedModel(om.save(model, folder / "m.onnx"), model)
    chosen = choose(opened.weights().weights, PATTERN, EVERY)
    return plan_calibration(main_graph(opened), PATTERN, chosen).parts


def nothing_held_out(samples: int) -> BatchMarks:
    return BatchMarks(samples=samples, factors=np.ones(samples))


def layer(
    op: str, weight: om.Array, x: tuple[int, ...], *, left: bool = False, **attributes: Any
) -> tuple[onnx.ModelProto, tuple[int, ...]]:
    """One node with the weight as its second input, and the shape of the other one."""
    names = ["w", "x"] if left else ["x", "w"]
    node = helper.make_node(op, names, ["y"], name="layer", **attributes)
    return om.model([node], {"w": weight}, inputs={"x": x}), x


W = om.weights
LAYERS = {
    "Conv 1-D": layer("Conv", W(6, 8, 3), (2, 8, 11), strides=[2], pads=[1, 2]),
    "Conv 2-D": layer("Conv", W(6, 8, 3, 2), (2, 8, 7, 6), pads=[0, 1, 2, 1], dilations=[2, 1]),
    "Conv 3-D": layer("Conv", W(4, 8, 2, 1, 3), (1, 8, 5, 4, 6), strides=[1, 2, 3]),
    "Conv of groups": layer("Conv", W(6, 4, 3, 3), (2, 8, 5, 5), group=2),
    "Conv with a tail": layer("Conv", W(6, 6, 3, 3), (2, 6, 5, 5)),
    "Conv SAME_UPPER": layer(
        "Conv", W(6, 8, 4, 1), (2, 8, 9, 8), auto_pad="SAME_UPPER", strides=[2, 3]
    ),
    "Conv SAME_LOWER": layer(
        "Conv", W(6, 8, 4, 3), (1, 8, 9, 8), auto_pad="SAME_LOWER", strides=[2, 3]
    ),
    "Conv VALID": layer("Conv", W(6, 8, 2, 2), (1, 8, 5, 5), auto_pad="VALID"),
    "Conv 1x1": layer("Conv", W(6, 8, 1, 1), (3, 8, 4, 4)),
    "ConvTranspose": layer(
        "ConvTranspose", W(8, 6, 3, 3), (2, 8, 4, 5), strides=[2, 2], pads=[1, 0, 1, 2]
    ),
    "ConvTranspose of groups": layer(
        "ConvTranspose",
        W(8, 3, 3),
        (2, 8, 6),
        group=2,
        strides=[3],
        output_padding=[2],
        dilations=[2],
    ),
    "ConvTranspose SAME_UPPER": layer(
        "ConvTranspose", W(8, 6, 4, 4), (1, 8, 3, 4), strides=[2, 3], auto_pad="SAME_UPPER"
    ),
    "ConvTranspose SAME_LOWER": layer(
        "ConvTranspose", W(8, 6, 5, 3), (1, 8, 3, 4), strides=[2, 2], auto_pad="SAME_LOWER"
    ),
    "ConvTranspose to a shape": layer(
        "ConvTranspose", W(8, 6, 3, 3), (1, 8, 4, 4), strides=[2, 2], output_shape=[8, 7]
    ),
    "Gemm": layer("Gemm", W(8, 6), (5, 8)),
    "Gemm transB": layer("Gemm", W(6, 8), (5, 8), transB=1),
    "Gemm transA": layer("Gemm", W(8, 6), (8, 5), transA=1),
    "Gemm left": layer("Gemm", W(6, 8), (8, 5), left=True),
    "Gemm left transA": layer("Gemm", W(8, 6), (8, 5), left=True, transA=1),
    "Gemm left transB": layer("Gemm", W(6, 8), (5, 8), left=True, transB=1),
    "MatMul": layer("MatMul", W(8, 6), (5, 8)),
    "MatMul of 4 dimensions": layer("MatMul", W(8, 6), (2, 3, 5, 8)),
    "MatMul with a vector": layer("MatMul", W(8, 6), (8,)),
    "MatMul by a vector": layer("MatMul", W(8), (2, 5, 8)),
    "MatMul left": layer("MatMul", W(6, 8), (2, 8, 5), left=True),
    "MatMul left by a vector": layer("MatMul", W(8), (8, 5), left=True),
    "MatMul of a stack": layer("MatMul", W(3, 8, 6), (3, 5, 8)),
    "MatMul of a stack, shared input": layer("MatMul", W(3, 8, 6), (5, 8)),
    "MatMul of a stack, in batches": layer("MatMul", W(3, 8, 6), (2, 3, 5, 8)),
    "MatMul of a stack, broadcast": layer("MatMul", W(1, 3, 8, 6), (2, 1, 5, 8)),
    "MatMul left of a stack": layer("MatMul", W(3, 6, 8), (2, 3, 8, 5), left=True),
    "Einsum": layer("Einsum", W(8, 6), (2, 5, 8), equation="bni,io->bno"),
    "Einsum of heads": layer("Einsum", W(8, 3, 2), (2, 5, 8), equation="bni,ihd->bhnd"),
    "Einsum of experts": layer("Einsum", W(3, 8, 6), (2, 3, 5, 8), equation="beni,eio->bneo"),
    "Einsum with dots": layer("Einsum", W(6, 8), (2, 3, 5, 8), equation="...i,oi->...o"),
    "Einsum left": layer("Einsum", W(6, 8), (8, 5), left=True, equation="oi,in->on"),
}


@pytest.mark.parametrize(("model", "shape"), LAYERS.values(), ids=LAYERS)
def test_rows_times_matrices_are_the_nodes_output(
    tmp_path: Any, model: onnx.ModelProto, shape: tuple[int, ...]
) -> None:
    (piece,) = pieces_of(model, tmp_path)
    (user,) = piece.users
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    rows, factors = rows_of(x, user.reading, nothing_held_out(shape[0]))
    stack = to_stack(piece.weight.view.seen(read_tensor(piece.weight.tensor, None)), piece.layout)
    assert user.tap == "x"
    assert (factors == 1).all()
    assert rows.shape == (stack.shape[0], factors.size, stack.shape[2])
    products = np.matmul(rows, stack.swapaxes(1, 2))
    expected = outputs(model, {"x": x})["y"]
    assert products.size == expected.size
    np.testing.assert_allclose(
        np.sort(products, axis=None), np.sort(expected, axis=None), atol=2e-5
    )


def test_a_wide_kernel_is_read_tap_by_tap(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twofour.pruning.matrices._WIDEST", 16)
    model, shape = layer("Conv", W(6, 8, 3, 2), (2, 8, 5, 5), pads=[1, 1, 0, 0])
    (piece,) = pieces_of(model, tmp_path)
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    rows, _ = rows_of(x, piece.users[0].reading, nothing_held_out(2))
    stack = to_stack(read_tensor(piece.weight.tensor, None), piece.layout)
    assert stack.shape == (6, 6, 8)
    products = np.matmul(rows, stack.swapaxes(1, 2)).sum(0)
    expected = outputs(model, {"x": x})["y"]
    np.testing.assert_allclose(
        np.sort(products, axis=None), np.sort(expected, axis=None), atol=2e-5
    )


# --- which rows are whose -------------------------------------------------------------------------

FACTORS = np.array([1.0, -1.0, 1.0])
PADDING = np.array([[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]], bool)
MARKS = BatchMarks(samples=3, factors=FACTORS, padding=PADDING)


def numbered(*lead: int) -> om.Array:
    """Every position has its own number in all of its inputs."""
    count = int(np.prod(lead))
    return np.repeat(np.arange(count, dtype=np.float32), 8).reshape(*lead, 8)


@pytest.mark.parametrize(
    "x",
    [
        numbered(3, 4),
        numbered(12),
        numbered(4, 3),
        numbered(3, 4)[:, :, None, :],
    ],
    ids=["samples, positions", "flattened", "positions, samples", "with an axis between"],
)
def test_padding_is_left_out_and_rows_belong_to_their_samples(tmp_path: Any, x: om.Array) -> None:
    (piece,) = pieces_of(layer("MatMul", W(8, 6), x.shape)[0], tmp_path)
    rows, factors = rows_of(x, piece.users[0].reading, MARKS)
    positions = x[..., 0].reshape(x.shape[:2] if x.ndim > 2 else (3, 4))
    if x.shape[:2] == (4, 3):
        positions = positions.T
    assert sorted(rows[0, :, 0]) == sorted(positions[~PADDING])
    assert set(rows[0, factors < 0, 0]) == set(positions[1][~PADDING[1]])


@pytest.mark.parametrize(("width", "counted", "held"), [(4, 9, 2), (6, 18, 6)])
def test_windows_of_a_convolution_belong_to_their_samples(
    tmp_path: Any, width: int, counted: int, held: int
) -> None:
    """A mask is for positions that a convolution keeps; of another number it says nothing."""
    model, shape = layer("Conv", W(6, 8, 3), (3, 8, width), pads=[1, 1])
    (piece,) = pieces_of(model, tmp_path)
    x = np.broadcast_to(np.arange(1, 4, dtype=np.float32)[:, None, None], shape)
    rows, factors = rows_of(x, piece.users[0].reading, MARKS)
    held_out = factors < 0
    assert (held_out.size, held_out.sum()) == (counted, held)
    assert set(rows[0, held_out].reshape(-1)) <= {0, 2}
    assert set(rows[0, ~held_out].reshape(-1)) == {0, 1, 3}


def test_of_many_outputs_some_of_each_sample_are_looked_at(tmp_path: Any) -> None:
    model, shape = layer("Conv", W(6, 8, 1, 1), (3, 8, 20, 20))
    (piece,) = pieces_of(model, tmp_path)
    x = np.broadcast_to(np.arange(400, dtype=np.float32).reshape(20, 20), shape)
    marks = BatchMarks(samples=3, factors=FACTORS, first=7, in_all=300)
    rows, factors = rows_of(x, piece.users[0].reading, marks)
    places = sampled(400, 64, np.arange(7, 10))
    assert places is not None
    assert (rows.shape, (factors < 0).sum()) == ((1, 3 * 64, 8), 64)
    assert np.array_equal(rows[0, :, 0], places.reshape(-1))


_POINTWISE = InputReading(
    layout=Layout(shape=(1, 100, 1, 1), axis=1, m=4, convolution=True),
    window=Window(kernel=(1, 1), stride=(1, 1), dilation=(1, 1), padding=((0, 0), (0, 0))),
)


def test_samples_of_different_batches_show_different_places(tmp_path: Path) -> None:
    """Each place has its own channel, so that the Gram matrix counts how often it is seen."""
    np.savez(tmp_path / "x.npz", x=np.eye(100, dtype=np.float32).reshape(1, 100, 10, 10))
    factors = factors_of(held_out_samples(0, 100))[:, None]
    path = tmp_path / "x.npz"
    batches = [
        BatchFile(path=path, samples=1, first=at, in_all=100, factors=factors[at])
        for at in range(100)
    ]
    worker = CalibrationWorker(lambda *_: None)
    worker.begin(tmp_path, batches)
    tap = Tap(tensor="x", reading=_POINTWISE, layer="conv")
    (found,) = worker.look([tap], [], frozenset(), "all").statistics
    assert found is not None
    assert found.held_out is not None
    for inputs, samples in ((found.seen, 90), (found.held_out, 10)):
        assert inputs.rows == samples * 64
        assert np.abs(np.diagonal(inputs.gram[0]) - 0.64 * samples).max() <= 4


def test_a_transposed_convolution_whose_groups_no_group_of_4_fits_is_left_to_magnitude(
    tmp_path: Any,
) -> None:
    model, _ = layer("ConvTranspose", W(12, 3, 3), (2, 12, 6), group=2)
    assert pieces_of(model, tmp_path) == ()
