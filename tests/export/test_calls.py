from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.export_nets import PaddedEncoder
from support.exporting import export_onnx
from support.ort import outputs
from torch import Tensor, nn

from twofour.export.calls import bind, input_arrays, reference_outputs
from twofour.export.sizes import (
    dynamic_shapes,
    find_free_sizes,
    resized,
    with_batch,
    without_ones,
)
from twofour.graph.opened import open_onnx
from twofour.records.options import DynamicAxis, ExportOptions


class Many(nn.Module):
    """Optional, nested, keyword-only and constant arguments; unequal effects of each."""

    def forward(
        self, x: Any, pair: Any, mask: Any = None, factor: int = 2, *, scale: Any, shift: Any = None
    ) -> dict[str, Any]:
        assert mask is None
        y = x * factor + pair[0] * 10 + pair[1] * 100 + scale * 1000
        return {"y": y, "more": (y if shift is None else y + shift * 10_000, pair[1] + 1)}


def many_args() -> tuple[tuple[Any, ...], dict[str, Any]]:
    rows = torch.arange(4.0).reshape(1, 4)
    args = (rows, [rows + 1, rows + 2], None, 3)
    return args, {"shift": rows + 3, "scale": rows + 4}


def test_arrays_come_in_the_order_of_the_onnx_inputs(tmp_path: Path) -> None:
    args, kwargs = many_args()
    export_onnx(Many(), args, kwargs, tmp_path / "many.onnx", ExportOptions())
    inputs = open_onnx(tmp_path / "many.onnx").inputs
    names = [each.name for each in inputs]
    assert names == ["x", "pair_0", "pair_1", "scale", "shift"]
    assert [each.shape for each in inputs] == [("batch", 4)] * 5
    call = bind(Many(), args, kwargs)
    found = outputs(tmp_path / "many.onnx", dict(zip(names, input_arrays(call), strict=True)))
    assert list(found) == ["y", "more_0", "more_1"]
    for ours, theirs in zip(found.values(), reference_outputs(Many(), call), strict=True):
        np.testing.assert_array_equal(ours, theirs)


class OneDict(nn.Module):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["b"] - batch["a"]


def test_a_single_dict_argument_is_an_argument_and_not_keywords(tmp_path: Path) -> None:
    batch = {"b": torch.ones(1, 2), "a": torch.full((1, 2), 3.0)}
    export_onnx(OneDict(), (batch,), {}, tmp_path / "net.onnx", ExportOptions())
    arrays = input_arrays(bind(OneDict(), (batch,), {}))
    names = [each.name for each in open_onnx(tmp_path / "net.onnx").inputs]
    (output,) = outputs(tmp_path / "net.onnx", dict(zip(names, arrays, strict=True))).values()
    np.testing.assert_array_equal(output, [[-2.0, -2.0]])


def test_only_tensors_as_long_as_the_batch_are_dynamic() -> None:
    call = bind(Many(), (torch.ones(2, 4), [torch.ones(2), torch.ones(3, 4)]), {"scale": 1.0})
    specs = dynamic_shapes(call, with_batch(call), {})
    assert set(specs) == {"x", "pair", "scale"}
    assert [0 in specs["x"], 0 in specs["pair"][0]] == [True, True]
    assert (specs["pair"][1], specs["scale"]) == (None, None)


def test_a_batch_of_one_is_doubled_and_others_are_left() -> None:
    one = bind(Many(), (torch.ones(1, 4), [torch.ones(1), torch.ones(3, 4)]), {"scale": 1.0})
    doubled = without_ones(one, with_batch(one))
    assert [tuple(t.shape) for t in doubled.tensors] == [(2, 4), (2,), (3, 4)]
    assert [tuple(t.shape) for t in one.tensors] == [(1, 4), (1,), (3, 4)]
    assert without_ones(doubled, with_batch(doubled)) is doubled


def test_padding_at_other_sizes_gets_the_values_that_the_trace_has_there() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 32)
    x[:, 2:] = 0
    module = PaddedEncoder(layers=1)
    call = bind(module, (x,), {})
    axes = [DynamicAxis(input="x", axis=1, name="length")]
    free = find_free_sizes(module, call, axes, {}, batch=False)
    other = resized(call, axes, {"length": 4})
    (expected,) = reference_outputs(module, other)
    assert np.abs(expected[:, 2:]).min() > 0
    found = free.returned[frozenset({("length", 4)})]
    assert isinstance(found, Tensor)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)
