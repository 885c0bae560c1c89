"""Orders put into a file, and whether two runs give the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.onnx_models import save, save_external
from support.permuted_models import TWO_FOUR, Net, permuted_at_random, random_inputs, run, sizes

from twofour.errors import BadInputError
from twofour.graph.opened import open_onnx
from twofour.pruning.permutation.apply import permute_onnx, same_outputs
from twofour.pruning.permutation.classes import find_classes


def net() -> onnx.ModelProto:
    made = Net()
    inner = made.add("Relu", made.conv("x", 8, 16))
    return made.model([made.conv(inner, 16, 4)], {"x": [2, 8, 4, 4]})


def test_external_data_stays_external(tmp_path: Path) -> None:
    path = save_external(net(), tmp_path / "m.onnx")
    classes, changed = permuted_at_random(path, tmp_path / "p.onnx")
    assert sizes(classes) == [16]
    assert set(changed) == {"c0", "c1", "c2"}
    stored = onnx.load(tmp_path / "p.onnx", load_external_data=False)
    assert all(t.data_location == onnx.TensorProto.EXTERNAL for t in stored.graph.initializer)
    assert (tmp_path / "p.onnx.data").stat().st_size == (tmp_path / "weights.bin").stat().st_size


def test_other_constants_keep_every_byte_and_the_source_its_own(tmp_path: Path) -> None:
    path = save(net(), tmp_path / "m.onnx")
    before = path.read_bytes()
    permuted_at_random(path, tmp_path / "p.onnx")
    assert path.read_bytes() == before
    old, new = (
        {t.name: t.raw_data for t in onnx.load(p).graph.initializer}
        for p in (path, tmp_path / "p.onnx")
    )
    assert {name for name in old if old[name] != new[name]} == {"c0", "c1", "c2"}


def test_no_order_copies_the_model(tmp_path: Path) -> None:
    opened = open_onnx(save(net(), tmp_path / "m.onnx"))
    classes = find_classes(opened, TWO_FOUR)
    assert permute_onnx(opened, tmp_path / "p.onnx", classes, {}) == ()
    assert (tmp_path / "p.onnx").read_bytes() == opened.path.read_bytes()


def test_an_order_and_its_inverse_give_the_model_back(tmp_path: Path) -> None:
    opened = open_onnx(save(net(), tmp_path / "m.onnx"))
    classes = find_classes(opened, TWO_FOUR)
    key, order = classes.classes[0].key, np.random.default_rng(0).permutation(16)
    permute_onnx(opened, tmp_path / "p.onnx", classes, {key: order.tolist()})
    back = open_onnx(tmp_path / "p.onnx")
    again = find_classes(back, TWO_FOUR)
    inverse = np.argsort(order).tolist()
    permute_onnx(back, tmp_path / "q.onnx", again, {again.classes[0].key: inverse})
    first, last = (
        {t.name: t.raw_data for t in onnx.load(p).graph.initializer}
        for p in (opened.path, tmp_path / "q.onnx")
    )
    assert first == last


def test_what_is_no_order_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    opened = open_onnx(save(net(), tmp_path / "m.onnx"))
    classes = find_classes(opened, TWO_FOUR)
    key = classes.classes[0].key
    for orders, text in (
        ({key: [0] * 16}, "no permutation of 16 channels"),
        ({key: list(range(15))}, "no permutation of 16 channels"),
        ({"other": list(range(16))}, "no class of channels 'other'"),
    ):
        with pytest.raises(BadInputError, match=text):
            permute_onnx(opened, tmp_path / "p.onnx", classes, orders)
    with pytest.raises(BadInputError, match="would overwrite"):
        permute_onnx(opened, opened.path, classes, {})
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]


def test_a_wrong_order_is_seen_in_the_outputs(tmp_path: Path) -> None:
    opened = open_onnx(save(net(), tmp_path / "m.onnx"))
    model = onnx.load(opened.path)
    weight = next(t for t in model.graph.initializer if t.name == "c2")
    values = onnx.numpy_helper.to_array(weight)[:, ::-1].copy()
    weight.CopyFrom(onnx.numpy_helper.from_array(values, "c2"))
    wrong = save(model, tmp_path / "wrong.onnx")
    inputs = random_inputs(opened.proto)
    outputs = [run(path, inputs) for path in (opened.path, wrong)]
    for dtype in ("float32", "float16", "bfloat16", "int8"):
        reason = same_outputs(outputs[0], outputs[1], dtype=dtype)
        assert reason is not None
        assert "off by" in reason


@pytest.mark.parametrize(
    ("before", "after", "dtype", "reason"),
    [
        ([1.0, 100.0], [1.0005, 100.0], "float32", None),
        ([1.0, 100.0], [1.002, 100.0], "float32", "off by 0.002 where the largest value is 100"),
        ([1.0, 100.0], [2.0, 100.0], "float16", None),
        ([1.0, 100.0], [1.0, 110.0], "float16", "off by 10"),
        ([1.0, np.nan], [1.0, np.nan], "float32", None),
        ([1.0, np.inf], [1.0, np.inf], "float32", None),
        ([1.0, np.inf], [1.0, -np.inf], "float32", "NaN or infinity in other places"),
        ([1.0, 2.0], [1.0, np.nan], "float32", "NaN or infinity in other places"),
        ([0.0, 0.0], [0.0, 0.0], "float32", None),
        ([1, 2], [1, 3], "float32", "1 of 2 values differ"),
        ([True, False], [True, False], "float32", None),
        ([1.0, 2.0], [[1.0, 2.0]], "float32", "shape [1, 2] where [2] is expected"),
        ([1.0], [1.0], "float4", "no bound is known"),
        ([], [], "float32", None),
    ],
)
def test_outputs_are_the_same_within_the_type(
    before: Any, after: Any, dtype: str, reason: str | None
) -> None:
    found = same_outputs({"y": np.array(before)}, {"y": np.array(after)}, dtype=dtype)
    assert found is None if reason is None else found is not None and reason in found


def test_outputs_of_other_names_are_not_the_same() -> None:
    y = {"y": np.zeros(1)}
    assert same_outputs(y, {"z": np.zeros(1)}, dtype="float32") is not None
