"""One harness for every pass between a trace and a file: what each promises, on one net.

A pass gets the graph that those before it leave. Names of inputs and outputs stay, of weights of
products too where it says so; outputs are equal within its error; weights are 2:4 as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from support.export_nets import example, kinds
from support.onnx_models import model as onnx_model
from support.ort import outputs

from twofour.export.calls import bind, input_arrays
from twofour.export.casts import Kept, narrow
from twofour.export.channel_scales import constants_before, fold_channel_scales
from twofour.export.layer_names import weight_operands
from twofour.export.passes import fold_stored, make_zeros_positive, optimize, to_opset_17
from twofour.export.tracing import trace, write_graph
from twofour.graph.files import Array
from twofour.graph.stored import read_stores
from twofour.pattern import check
from twofour.pipeline.torch.weight_files import save_tensors
from twofour.records.options import ExportOptions, Precision
from twofour.records.weights import Pattern

TWO_FOUR = Pattern(2, 4)


def fold_made_up_scales(model: ir.Model) -> None:
    """Scales for all that may have some, the largest a hundred times the smallest."""
    values = [value for node in model.graph for value in node.outputs]
    names = {v.name or "": v.shape[-1] for v in values if constants_before(v)}
    scales = {name: np.linspace(1, 100, n, dtype=np.float32) for name, n in names.items()}
    fold_channel_scales(model, scales)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pass, those that a run does before it, and what it promises."""

    run: Callable[[ir.Model], object]
    before: tuple[Callable[[ir.Model], None], ...]
    error: float
    """Largest change of an output, as a share of its largest value; 0: bit for bit."""
    keeps_weights: bool
    """Whether products read constants of the names that they read before."""


CASES = {
    "fold_stored": Case(run=fold_stored, before=(), error=0, keeps_weights=False),
    "optimize": Case(run=optimize, before=(fold_stored,), error=1e-5, keeps_weights=False),
    "to_opset_17": Case(
        run=to_opset_17, before=(fold_stored, optimize), error=0, keeps_weights=True
    ),
    "narrow": Case(
        run=lambda model: narrow(model, Precision.FLOAT16, "net.onnx", Kept()),
        before=(fold_stored, optimize),
        error=5e-3,
        keeps_weights=True,
    ),
    "fold_channel_scales": Case(
        run=fold_made_up_scales, before=(fold_stored, optimize), error=1e-5, keeps_weights=True
    ),
    "make_zeros_positive": Case(
        run=make_zeros_positive, before=(fold_stored, optimize), error=0, keeps_weights=True
    ),
}


@dataclass(frozen=True, kw_only=True)
class Traced:
    """`Kinds`, whose weights are 2:4, stored in a type, as the passes get it."""

    model: ir.Model
    inputs: dict[str, Array]


Traces = Callable[[torch.dtype], Traced]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """The net in each type, traced once and loaded anew for every test."""

    @cache
    def once(kind: torch.dtype) -> tuple[Path, dict[str, Array]]:
        return written(kind, tmp_path_factory.mktemp("net"))

    def load(kind: torch.dtype) -> Traced:
        path, inputs = once(kind)
        return Traced(model=ir.external_data.load_to_model(ir.load(path)), inputs=inputs)

    return load


def written(kind: torch.dtype, folder: Path) -> tuple[Path, dict[str, Array]]:
    """The net's graph in a file, and its inputs."""
    net = copy.deepcopy(kinds()).eval().to(kind)
    image, ids = example(2)
    call = bind(net, (image.to(kind), ids), {})
    graph = trace(net, call, ExportOptions(opset=18))
    save_tensors(
        net.state_dict(), folder / "w.safetensors", first={*graph.model.graph.initializers}
    )
    store = read_stores([folder / "w.safetensors"])
    write_graph(graph, store, folder / "graph.onnx")
    return folder / "graph.onnx", dict(zip(graph.input_names, input_arrays(call), strict=True))


def given_by(model: ir.Model, inputs: dict[str, Array]) -> list[Array]:
    return [*outputs(ir.to_proto(model), inputs).values()]


def ends(model: ir.Model) -> list[tuple[str | None, ir.DataType | None, str]]:
    """Names, types and shapes of the inputs and outputs."""
    return [(v.name, v.dtype, str(v.shape)) for v in (*model.graph.inputs, *model.graph.outputs)]


def weights(model: ir.Model) -> dict[str, Array]:
    """The constants that products read, a transposed one under its own name."""
    found = (c for node in model.graph.all_nodes() for c in weight_operands(node))
    return {c.name or "": c.const_value.numpy() for c in found if c.const_value is not None}


def sparse(model: ir.Model) -> int:
    """How many weights of products hold the pattern along one of their axes."""
    arrays = (array.astype(np.float32) for array in weights(model).values())
    return sum(
        any(check(array, axis, TWO_FOUR).holds for axis in range(array.ndim)) for array in arrays
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_pass_keeps_what_it_promises(case: Case, traced: Traces) -> None:
    start = traced(torch.float32)
    model = start.model
    for done_before in case.before:
        done_before(model)
    expected, known, named = given_by(model, start.inputs), ends(model), weights(model)
    held = sparse(model)
    case.run(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert ends(model) == known
    if case.keeps_weights:  # a table that stays float32 is copied for the product that it is in
        assert {key.removesuffix("_float16") for key in weights(model)} == named.keys()
    assert sparse(model) == held
    assert held > 0
    if case.run is make_zeros_positive:
        assert not any(np.signbit(array[array == 0]).any() for array in weights(model).values())
    for found, wanted in zip(given_by(model, start.inputs), expected, strict=True):
        assert found.dtype == wanted.dtype
        assert np.abs(found - wanted).max() <= case.error * np.abs(wanted).max()


@pytest.mark.parametrize(
    "kind",
    [
        torch.float16,
        pytest.param(torch.bfloat16, marks=pytest.mark.full),
        pytest.param(torch.float64, marks=pytest.mark.full),
    ],
)
def test_stored_types_and_transpositions_are_folded_without_a_change(
    kind: torch.dtype, traced: Traces
) -> None:
    start = traced(kind)
    expected = given_by(start.model, start.inputs)
    fold_stored(start.model)
    for found, wanted in zip(given_by(start.model, start.inputs), expected, strict=True):
        assert np.array_equal(found, wanted)
    constants = start.model.graph.initializers.values()
    assert {c.dtype for c in constants if c.dtype.is_floating_point()} == {ir.DataType.FLOAT}
    casts = [n for n in start.model.graph if n.op_type == "Cast" and n.inputs[0].is_initializer()]
    assert casts == []


def test_only_two_slices_that_halve_one_value_are_split() -> None:
    def ends(begin: int, end: int) -> list[str]:
        return [f"at{begin}", f"at{end}", "axis"]

    reads = [("x", 2, 8), ("y", 4, 8), ("z", 4, 8), ("y", 0, 4), ("x", 0, 4)]
    nodes = [
        onnx.helper.make_node("Slice", [value, *ends(*two)], [f"{value}{two[0]}"])
        for value, *two in reads
    ]
    numbers = {f"at{n}": np.array([n]) for n in (0, 2, 4, 8)} | {"axis": np.array([1])}
    inputs: dict[str, list[int | str]] = {name: [2, 8] for name in "xyz"}
    model = ir.from_proto(
        onnx_model(nodes, numbers, inputs=inputs, outputs=["x2", "y4", "z4", "y0", "x0"])
    )
    optimize(model)
    (split,) = [node for node in model.graph if node.op_type == "Split"]
    assert split.inputs[0] is model.graph.inputs[1]
    assert [value.name for value in split.outputs] == ["y0", "y4"]
    assert [node.op_type for node in model.graph].count("Slice") == 3


@pytest.mark.parametrize(("small", "ops"), [(1e-10, ["Add", "Log"]), (0.0, ["Log"])])
def test_only_an_exact_zero_is_left_out_of_a_sum(small: float, ops: list[str]) -> None:
    nodes = [
        onnx.helper.make_node("Add", ["x", "small"], ["sum"]),
        onnx.helper.make_node("Log", ["sum"], ["y"]),
    ]
    numbers = {"small": np.array(small, np.float32)}
    model = ir.from_proto(onnx_model(nodes, numbers, inputs={"x": [2, 8]}, outputs=["y"]))
    optimize(model)
    assert [node.op_type for node in model.graph] == ops
