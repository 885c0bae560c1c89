"""What a version of TensorRT reads, and which types a file has."""

from __future__ import annotations

import pytest
from onnx import TensorProto, helper
from support import onnx_models as om

from twofour.engines.tensorrt.bindings import opset_advice, opset_for, precisions_of


@pytest.mark.parametrize("version", ["8.6.0", "8.x from 8.6 on", "9.3.0"])
def test_before_10_a_newer_opset_is_warned_of(version: str) -> None:
    advice = opset_advice(version, 18)
    assert advice is not None
    assert advice.startswith(f"TensorRT {version} reads opset 17")
    assert advice.endswith("--opset 17")


@pytest.mark.parametrize(
    ("version", "opset"), [("8.6.1", 17), ("10.0.1", 20), ("11.x", 25), (None, 25), ("", 25)]
)
def test_nothing_is_said_where_nothing_is_known_to_be_wrong(
    version: str | None, opset: int
) -> None:
    assert opset_advice(version, opset) is None


@pytest.mark.parametrize(
    ("version", "opset"), [("8.6.1", 17), ("9.3.0", 17), ("10.0.1", None), (None, None)]
)
def test_the_opset_to_export_in_is_one_that_the_version_reads(
    version: str | None, opset: int | None
) -> None:
    assert opset_for(version) == opset


def test_the_type_that_a_cast_makes_is_one_of_the_model() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["h"], ["y"], to=TensorProto.FLOAT),
    ]
    assert precisions_of(om.model(nodes, {}, inputs={"x": [2, 8]})).in_words == "float16"
