"""A method of pruning is one function and one row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support import onnx_models as om

import twofour
from twofour.graph.opened import open_onnx
from twofour.pruning.methods import METHODS, Method, wanda
from twofour.pruning.methods.magnitude import Outcome
from twofour.pruning.onnx import prune_onnx
from twofour.pruning.verify import validate_onnx
from twofour.records.weights import Pattern


def first_n(values: NDArray[Any], axis: int, pattern: Pattern) -> Outcome:
    """The first N of every M stay."""
    assert values.dtype == np.float32
    places = np.arange(values.shape[axis]) % pattern.m >= pattern.n
    np.moveaxis(values, axis, -1)[..., places] = 0
    zeros = int((values == 0).sum())
    return Outcome(kept_magnitude=0.5, zeros=zeros, zeros_before=0)


def test_a_method_that_is_added_prunes_modules_and_onnx_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "first", Method(solve=wanda.solve, in_place=first_n))
    linear = torch.nn.Linear(8, 8, bias=False)
    torch.nn.init.ones_(linear.weight)
    result = twofour.prune(linear, "2:4", all_layers=True, method="first")
    assert linear.weight[3].tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    assert (result.method, result.weights[0].kept_magnitude, result.weights[0].zeros) == (
        "first",
        0.5,
        32,
    )
    source = om.save(om.gemm(np.ones((64, 16), np.float32), trans_b=1), tmp_path / "dense.onnx")
    pruned = prune_onnx(
        open_onnx(source), tmp_path / "sparse.onnx", Pattern(n=2, m=4), method="first"
    )
    assert (pruned.method, pruned.weights[0].zeros) == ("first", 512)
    (check,) = validate_onnx(open_onnx(tmp_path / "sparse.onnx"), Pattern(n=2, m=4)).checks
    assert check.violations == 0


def test_a_method_that_needs_data_says_so() -> None:
    with pytest.raises(twofour.BadInputError, match="--method wanda needs"):
        twofour.prune(torch.nn.Linear(8, 8), method="wanda")
