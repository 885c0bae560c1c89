"""A model with some constants of another: exactly those, inline or beside the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from support import onnx_models as om

from twofour.errors import BadInputError
from twofour.graph.files import read_tensor
from twofour.graph.mixture import Mixture, changed_places
from twofour.graph.opened import open_onnx


def _saved(path: Path, *, seed: int, external: bool = False, width: int = 8) -> Path:
    """x @ a + bias, then a Gemm with its own bias."""
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["m"], name="first"),
        helper.make_node("Add", ["m", "a.bias"], ["h"], name="add"),
        helper.make_node("Gemm", ["h", "b", "b.bias"], ["y"], name="second"),
    ]
    constants = {
        "a": om.weights(8, width, seed=seed),
        "a.bias": om.weights(width, seed=seed + 1),
        "b": om.weights(width, 8, seed=seed + 2),
        "b.bias": om.weights(8, seed=99),
    }
    model = om.model(nodes, constants, inputs={"x": [2, 8]})
    if external:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data",
                  size_threshold=0)  # fmt: skip
        return path
    return om.save(model, path)


def _values(path: Path) -> dict[str, np.ndarray]:
    model = open_onnx(path)
    return {t.name: read_tensor(t, path) for t in model.proto.graph.initializer}


@pytest.mark.parametrize("external", [False, True])
def test_the_mixture_has_the_chosen_constants_of_the_other_model(
    tmp_path: Path, external: bool
) -> None:
    base = _saved(tmp_path / "base.onnx", seed=0, external=external)
    other = _saved(tmp_path / "other.onnx", seed=10, external=external)
    places = changed_places(open_onnx(base), open_onnx(other))
    assert {label: len(of) for label, of in places.items()} == {"first": 2, "second": 1}
    mixed = tmp_path / "mixed.onnx"
    Mixture(base, other).write(places["first"], mixed)
    found, one, two = _values(mixed), _values(base), _values(other)
    for name, source in {"a": two, "a.bias": two, "b": one, "b.bias": one}.items():
        np.testing.assert_array_equal(found[name], source[name])
    Mixture(base, other).write((), mixed)
    assert all(np.array_equal(_values(mixed)[name], one[name]) for name in one)


def test_models_of_other_constants_or_inputs_are_refused(tmp_path: Path) -> None:
    base = _saved(tmp_path / "a.onnx", seed=0)
    wide = _saved(tmp_path / "b.onnx", seed=0, width=16)
    model = onnx.load(base)
    model.graph.node[2].input[0] = "m"
    turned = om.save(model, tmp_path / "c.onnx")
    for other in (wide, turned):
        with pytest.raises(BadInputError, match=f"a.onnx and {other.name} do not have the same"):
            Mixture(base, other)
