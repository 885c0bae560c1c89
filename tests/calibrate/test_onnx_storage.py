"""A stored array as a node sees it: the values that ONNX Runtime gives the node, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import helper
from support import onnx_models as om
from support.ort import outputs

from twofour.calibrate.storage import StoredView, rounded_to, view_of
from twofour.graph.files import read_tensor
from twofour.graph.opened import OpenedModel
from twofour.graph.trace import traced_shapes

W = om.weights
FLOAT = np.float32
INT8 = W(32, 16, dtype=np.int8)


def node(op: str, names: list[str], output: str = "v", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, names, [output], name=f"{op} {output}", **attributes)


def scales(*shape: int) -> om.Array:
    made: om.Array = np.exp2(np.random.default_rng(3).integers(-7, -3, shape)).astype(FLOAT)
    return made


CHAINS: dict[str, tuple[list[onnx.NodeProto], dict[str, om.Array]]] = {
    "Transpose": ([node("Transpose", ["w"])], {"w": W(16, 32)}),
    "Reshape": ([node("Reshape", ["w", "s"])], {"w": W(32, 4, 4), "s": np.array([32, 16])}),
    "Transpose, Reshape": (
        [node("Transpose", ["w"], "u", perm=[2, 0, 1]), node("Reshape", ["u", "s"])],
        {"w": W(4, 4, 32), "s": np.array([32, 16])},
    ),
    "Squeeze": ([node("Squeeze", ["w", "s"])], {"w": W(32, 1, 16), "s": np.array([1])}),
    "Unsqueeze, Squeeze": (
        [node("Unsqueeze", ["w", "s"], "u"), node("Squeeze", ["u", "s"])],
        {"w": W(32, 16), "s": np.array([0])},
    ),
    "Flatten": ([node("Flatten", ["w"], axis=1)], {"w": W(32, 2, 8)}),
    "Slice": (
        [node("Slice", ["w", "from", "to", "axes", "steps"])],
        {
            "w": W(40, 40),
            "from": np.array([4, 35]),
            "to": np.array([36, 3]),
            "axes": np.array([0, 1]),
            "steps": np.array([1, -2]),
        },
    ),
    "Gather": ([node("Gather", ["w", "at"])], {"w": W(3, 32, 16), "at": np.array(1)}),
    "Cast of float16": ([node("Cast", ["w"], to=1)], {"w": W(32, 16, dtype=np.float16)}),
    "Cast of bfloat16": ([node("Cast", ["w"], to=1)], {"w": W(32, 16, dtype=om.BFLOAT16)}),
    "CastLike": (
        [node("CastLike", ["w", "like"])],
        {"w": W(32, 16, dtype=np.float16), "like": np.zeros(1, FLOAT)},
    ),
    "DQ": ([node("DequantizeLinear", ["w", "s"])], {"w": INT8, "s": scales()}),
    "DQ by rows": ([node("DequantizeLinear", ["w", "s"], axis=0)], {"w": INT8, "s": scales(32)}),
    "DQ in blocks": (
        [node("DequantizeLinear", ["w", "s"], axis=0, block_size=8)],
        {"w": INT8, "s": scales(4, 16)},
    ),
    "Transpose, DQ": (
        [node("Transpose", ["w"], "u"), node("DequantizeLinear", ["u", "s"], axis=1)],
        {"w": INT8.T.copy(), "s": scales(16)},
    ),
    "DQ, Transpose, Reshape": (
        [
            node("DequantizeLinear", ["w", "s"], "t", axis=0),
            node("Transpose", ["t"], "u"),
            node("Reshape", ["u", "shape"]),
        ],
        {"w": W(8, 64, dtype=np.int8), "s": scales(8), "shape": np.array([32, 16])},
    ),
    "Q, DQ": (
        [
            node("QuantizeLinear", ["w", "s", "z"], "q", axis=0),
            node("DequantizeLinear", ["q", "s", "z"], axis=0),
        ],
        {"w": W(32, 16), "s": scales(32), "z": np.zeros(32, np.int8)},
    ),
}


def model_of(name: str) -> onnx.ModelProto:
    return om.before_matmul(*CHAINS[name], 32)


def view(model: onnx.ModelProto, folder: Path) -> tuple[StoredView, om.Array]:
    """And the stored array."""
    opened = OpenedModel(om.save(model, folder / "m.onnx"), model)
    (layer,) = opened.weights().layers
    shapes = traced_shapes(layer.origin)
    assert isinstance(shapes, tuple)
    found = view_of(layer.origin, shapes)
    assert found is not None
    assert layer.origin.tensor is not None
    return found, read_tensor(layer.origin.tensor, opened.path)


def at_node(model: onnx.ModelProto) -> om.Array:
    """What ONNX Runtime gives the MatMul."""
    return outputs(model, {"x": np.zeros((2, 32), FLOAT)}, "v")["v"]


@pytest.mark.parametrize("name", CHAINS)
def test_what_is_written_flows_as_it_was_foretold(tmp_path: Path, name: str) -> None:
    model = model_of(name)
    way, stored = view(model, tmp_path)
    generator = np.random.default_rng(5)
    before = way.seen(stored)
    np.testing.assert_array_equal(before, at_node(model))
    wanted = before * np.asarray(generator.uniform(0.5, 1, before.shape), FLOAT)
    wanted[::2] = 0
    kept = rounded_to(way.kept(wanted), stored.dtype)
    way.write(kept, stored)
    tensor = next(t for t in model.graph.initializer if t.name == "w")
    tensor.raw_data = stored.tobytes()
    after = at_node(model)
    np.testing.assert_array_equal(after, way.flowing(kept))
    assert not after[::2].any()
    grid = np.abs(after - wanted).max() / np.abs(wanted).max()
    assert grid < {"float32": 0.15 if "DQ" in name else 1e-7, "int8": 0.15}.get(
        stored.dtype.name, 0.005
    )


def test_a_part_leaves_the_rest_of_the_array_alone(tmp_path: Path) -> None:
    way, stored = view(model_of("Slice"), tmp_path)
    before = stored.copy()
    way.write(np.zeros((32, 16), FLOAT), stored)
    assert np.count_nonzero(stored) == 40 * 40 - 32 * 16
    assert np.array_equal(stored[stored != 0], before[stored != 0])


LIMITS = {
    "float16": (-65504.0, 65504.0),
    "bfloat16": (-3.3e38, 3.3e38),
    "float8_e4m3fn": (-448.0, 448.0),
    "float8_e5m2": (-57344.0, 57344.0),
    "int8": (-128.0, 127.0),
    "uint8": (0.0, 255.0),
}


@given(
    hnp.arrays(np.float64, 8, elements=st.floats(-1e6, 1e6)),
    st.sampled_from([*LIMITS]),
)
def test_a_number_beyond_a_types_range_becomes_its_largest(values: om.Array, kind: str) -> None:
    found = rounded_to(values, np.dtype(getattr(ml_dtypes, kind, kind))).astype(np.float64)
    assert np.isfinite(found).all()
    smallest, largest = LIMITS[kind]
    assert found.max() <= largest
    inside = (values >= smallest) & (values <= largest)
    apart = np.abs(found - values)[inside]
    assert (apart <= 0.5 + np.abs(values[inside]) / 8).all()
