"""Pruned ONNX files: the right values along the right axis, and nothing else changed."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from support import onnx_models as om
from support.arrays import TWO_FOUR, sorted_prune

from twofour.errors import BadInputError
from twofour.graph.files import read_tensor
from twofour.graph.opened import open_onnx
from twofour.graph.weights import find_weights
from twofour.pruning.onnx import copy_onnx, prune_onnx
from twofour.records.weights import PrunedWeight, PruneResult, ReasonCode, Selection


def stored(model: onnx.ModelProto, name: str = "w") -> om.Array:
    """The values of an initializer, read with onnx's own reader."""
    tensor = next(t for t in model.graph.initializer if t.name == name)
    return np.asarray(onnx.numpy_helper.to_array(tensor))


def prune(
    model: onnx.ModelProto,
    folder: Path,
    selection: Selection = Selection(),  # noqa: B008 - frozen
) -> tuple[onnx.ModelProto, PruneResult]:
    source, target = om.save(model, folder / "dense.onnx"), folder / "sparse.onnx"
    result = prune_onnx(open_onnx(source), target, TWO_FOUR, selection)
    return onnx.load(target), result


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def reason_codes(row: PrunedWeight) -> list[ReasonCode]:
    return [reason.code for reason in row.reasons]


# --- the table of what Polygraphy 0.53.6 gets wrong; tests/graph has more ways to an axis ---------


BF16 = om.BFLOAT16
INT8 = om.weights(16, 32, 3, 3, dtype=np.int8)
TURN = helper.make_node("Transpose", ["w"], ["v"], name="turn", perm=[1, 0])
PRUNED = {
    "Conv 3x3": (om.conv(om.weights(16, 32, 3, 3)), 1),
    "ConvTranspose": (om.conv(om.weights(64, 16, 2, 2), op="ConvTranspose"), 0),
    "Gemm transB=1": (om.gemm(om.weights(16, 64), trans_b=1), 1),
    "MatMul W4D": (om.matmul(om.weights(2, 3, 32, 16), rank=4), 2),
    "Transpose perm MatMul": (om.before_matmul([TURN], {"w": om.weights(16, 64)}, 64), 1),
    "int8 DQ Conv": (om.quantized_conv(INT8, zero_point=None, quantize_output=True), 1),
    "float16": (om.matmul(om.weights(64, 16, dtype=np.float16)), 0),
    "bfloat16 Gemm": (om.gemm(om.weights(16, 64, dtype=BF16), trans_b=1), 1),
    "float8": (om.matmul(om.weights(64, 16, dtype=ml_dtypes.float8_e4m3fn)), 0),
}


@pytest.mark.parametrize(("model", "axis"), PRUNED.values(), ids=PRUNED)
def test_a_weight_is_pruned_by_magnitude_along_its_reduction_axis(
    tmp_path: Path, model: onnx.ModelProto, axis: int
) -> None:
    before = stored(model)
    after, result = prune(model, tmp_path)
    (row,) = result.weights
    assert (row.pruned, row.weight.weight, row.weight.axis) == (True, "w", axis)
    expected = sorted_prune(before, axis, TWO_FOUR)
    np.testing.assert_array_equal(stored(after), expected)
    assert row.zeros == expected.size // 2
    kept = np.abs(expected.astype(np.float64)).sum() / np.abs(before.astype(np.float64)).sum()
    assert row.kept_magnitude == pytest.approx(kept, rel=1e-5)


MASK = helper.make_node("Mul", ["w", "w"], ["v"], name="mask")
UNCHANGED = {
    "Conv C=6": (om.conv(om.weights(32, 6, 3, 3)), ReasonCode.AXIS_NOT_MULTIPLE),
    "grouped": (om.conv(om.weights(16, 8, 3, 3), groups=4), ReasonCode.GROUPED_CONV),
    "depthwise": (om.conv(om.weights(16, 1, 3, 3), groups=16), ReasonCode.DEPTHWISE_CONV),
    "DFL of YOLO": (om.conv(om.weights(1, 16, 1, 1)), ReasonCode.TOO_SMALL),
    "1,008 values": (om.matmul(om.weights(16, 63)), ReasonCode.TOO_SMALL),
    "one output": (om.matmul(om.weights(1024, 1)), ReasonCode.TOO_SMALL),
    "Mul mask": (
        om.before_matmul([MASK], {"w": om.weights(64, 16)}, 64),
        ReasonCode.UNSUPPORTED_OP,
    ),
}


@pytest.mark.parametrize(("model", "code"), UNCHANGED.values(), ids=UNCHANGED)
def test_a_weight_that_sparse_math_cannot_use_is_left_alone_and_says_why(
    tmp_path: Path, model: onnx.ModelProto, code: ReasonCode
) -> None:
    after, result = prune(model, tmp_path)
    (row,) = result.weights
    assert (row.pruned, row.kept_magnitude, reason_codes(row)) == (False, None, [code])
    assert after == model


def test_a_constant_node_is_pruned_in_its_attribute(tmp_path: Path) -> None:
    dense = om.weights(64, 16)
    constant = helper.make_node("Constant", [], ["v"], value=om.tensor("", dense))
    after, result = prune(om.before_matmul([constant], {}, 64), tmp_path)
    assert result.weights[0].weight.weight == "v"
    values = onnx.numpy_helper.to_array(after.graph.node[0].attribute[0].t)
    np.testing.assert_array_equal(values, sorted_prune(dense, 0, TWO_FOUR))


@pytest.mark.parametrize("external", [True, False])
def test_pruning_a_pruned_file_changes_no_byte_of_it(tmp_path: Path, external: bool) -> None:
    save = om.save_external if external else om.save
    source = save(om.two_weights(), tmp_path / "dense.onnx")
    once, twice = tmp_path / "a" / "m.onnx", tmp_path / "b" / "m.onnx"
    for folder in (once.parent, twice.parent):
        folder.mkdir()
    prune_onnx(open_onnx(source), once, TWO_FOUR)
    result = prune_onnx(open_onnx(once), twice, TWO_FOUR)
    assert [row.kept_magnitude for row in result.weights] == [1.0, 1.0]
    assert listing(once.parent) == listing(twice.parent)
    for name in listing(once.parent):
        assert (once.parent / name).read_bytes() == (twice.parent / name).read_bytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_values_kept_in_typed_fields_are_pruned_too(tmp_path: Path, dtype: Any) -> None:
    dense = om.weights(64, 16, dtype=dtype)
    model = om.matmul(dense)
    kind = model.graph.initializer[0].data_type
    typed = helper.make_tensor("w", kind, dense.shape, dense.astype(np.float32).reshape(-1))
    assert not typed.HasField("raw_data")
    model.graph.initializer[0].CopyFrom(typed)
    after, _ = prune(model, tmp_path)
    np.testing.assert_array_equal(stored(after), sorted_prune(dense, 0, TWO_FOUR))


# --- shared weights -------------------------------------------------------------------------------


def shared(second: onnx.NodeProto) -> onnx.ModelProto:
    first = helper.make_node("Gemm", ["x", "w"], ["h"], name="first", transB=1)
    return om.model([first, second], {"w": om.weights(32, 32)}, inputs={"x": [2, 32]})


def test_an_array_used_twice_along_one_axis_is_pruned_once(tmp_path: Path) -> None:
    model = shared(helper.make_node("Gemm", ["h", "w"], ["y"], name="second", transB=1))
    after, result = prune(model, tmp_path)
    np.testing.assert_array_equal(stored(after), sorted_prune(stored(model), 1, TWO_FOUR))
    first, second = result.weights
    assert (first.weight.tied_to, second.weight.tied_to) == (("second",), ("first",))
    assert first.kept_magnitude == second.kept_magnitude


@pytest.mark.parametrize(
    ("more", "outputs", "named"),
    [
        ([helper.make_node("Add", ["y", "w"], ["z"], name="decay")], ["z"], "decay"),
        ([helper.make_node("ReduceSum", ["w"], ["z"], name="norm")], ["y", "z"], "norm"),
        ([], ["y", "w"], "graph output w"),
    ],
)
def test_a_weight_that_something_else_reads_is_left_dense_unless_it_is_asked_for(
    tmp_path: Path, more: list[onnx.NodeProto], outputs: list[str], named: str
) -> None:
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"], name="fc", transB=1), *more]
    arrays = {"w": om.weights(32, 32)}
    model = om.model(nodes, arrays, inputs={"x": [32, 32]}, outputs=outputs)
    after, result = prune(model, tmp_path)
    (row,) = result.weights
    assert (row.pruned, row.weight.read_by) == (False, (named,))
    assert reason_codes(row) == [ReasonCode.SHARED_WEIGHT]
    assert f"read by {named}," in row.reasons[0].message
    assert "(--include fc)" in row.reasons[0].message
    np.testing.assert_array_equal(stored(after), arrays["w"])
    after, result = prune(model, tmp_path, Selection(include=("fc",)))
    np.testing.assert_array_equal(stored(after), sorted_prune(arrays["w"], 1, TWO_FOUR))
    assert reason_codes(result.weights[0]) == [ReasonCode.SHARED_WEIGHT]


def test_a_node_that_asks_for_the_shape_of_a_weight_alone_keeps_nothing_dense(
    tmp_path: Path,
) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["y"], name="fc", transB=1),
        helper.make_node("Shape", ["w"], ["size"], name="shape"),
        helper.make_node("Reshape", ["y", "size"], ["z"], name="reshape"),
    ]
    model = om.model(nodes, {"w": om.weights(32, 32)}, inputs={"x": [32, 32]})
    _, result = prune(model, tmp_path)
    assert [(row.pruned, row.weight.tied_to) for row in result.weights] == [(True, ())]


# --- everything else comes out unchanged ----------------------------------------------------------


def with_everything() -> onnx.ModelProto:
    """Two opsets, metadata, documentation, a function, a subgraph, a sparse initializer."""
    inner = om.graph(
        [helper.make_node("MatMul", ["x", "inner"], ["t"], name="fc")],
        {"inner": om.weights(128, 8)},
        outputs=["t"],
        output_shape=[2, 8],
    )
    other = om.graph(
        [helper.make_node("Linear", ["x", "w"], ["e"], domain="my.domain")],
        {},
        outputs=["e"],
        output_shape=[2, 8],
    )
    node = helper.make_node("If", ["c"], ["y"], name="if", then_branch=inner, else_branch=other)
    model = om.model([node], {"w": om.weights(128, 8), "c": np.array(True)}, inputs={"x": [2, 128]})
    model.graph.output[0].type.tensor_type.shape.dim.add(dim_value=2)
    model.graph.output[0].type.tensor_type.shape.dim.add(dim_value=8)
    model.opset_import.append(helper.make_opsetid("my.domain", 3))
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    model.producer_name, model.doc_string, model.model_version = "somebody", "about it", 7
    helper.set_model_props(model, {"key": "value"})
    model.graph.doc_string = "graph documentation"
    model.graph.metadata_props.add(key="graph", value="props")
    node.metadata_props.add(key="node", value="props")
    body = [helper.make_node("MatMul", ["a", "b"], ["m"])]
    model.functions.append(
        helper.make_function(
            "my.domain", "Linear", ["a", "b"], ["m"], body, [helper.make_opsetid("", 21)]
        )
    )
    values = helper.make_tensor("sparse", TensorProto.FLOAT, [1], [2.0])
    indices = helper.make_tensor("indices", TensorProto.INT64, [1], [3])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [8]))
    return model


def test_opsets_metadata_functions_and_subgraphs_come_out_byte_for_byte(tmp_path: Path) -> None:
    model = with_everything()
    onnx.checker.check_model(model)
    after, result = prune(model, tmp_path)
    onnx.checker.check_model(after)
    branches = {a.name: a.g for a in after.graph.node[0].attribute}
    inner = branches["then_branch"].initializer[0]
    dense = om.weights(128, 8)
    np.testing.assert_array_equal(
        onnx.numpy_helper.to_array(inner), sorted_prune(dense, 0, TWO_FOUR)
    )
    assert [(row.weight.layer, row.pruned) for row in result.weights] == [
        ("if.then_branch/fc", True)
    ]
    inner.raw_data = dense.tobytes()
    assert after.SerializeToString() == model.SerializeToString()


def test_fields_that_this_version_does_not_know_survive(tmp_path: Path) -> None:
    source = om.save(om.matmul(om.weights(64, 16)), tmp_path / "dense.onnx")
    unknown = b"\xfa\xff\x01\x05later"
    source.write_bytes(source.read_bytes() + unknown)
    prune_onnx(open_onnx(source), tmp_path / "sparse.onnx", TWO_FOUR)
    assert unknown in (tmp_path / "sparse.onnx").read_bytes()


# --- external data --------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 3])
def test_external_data_stays_external_and_the_source_stays_as_it_is(
    tmp_path: Path, padding: int
) -> None:
    model = om.two_weights()
    source = om.save_external(model, tmp_path / "dense.onnx", padding=padding)
    before = source.read_bytes(), (tmp_path / "weights.bin").read_bytes()
    target = tmp_path / "out" / "sparse.onnx"
    target.parent.mkdir()
    prune_onnx(open_onnx(source), target, TWO_FOUR)
    assert (source.read_bytes(), (tmp_path / "weights.bin").read_bytes()) == before
    assert listing(target.parent) == ["sparse.onnx", "sparse.onnx.data"]
    after = onnx.load(target)
    for name in ("conv.weight", "fc.weight"):
        np.testing.assert_array_equal(
            stored(after, name), sorted_prune(stored(model, name), 1, TWO_FOUR)
        )
    np.testing.assert_array_equal(stored(after, "fc.bias"), stored(model, "fc.bias"))
    data = (target.parent / "sparse.onnx.data").read_bytes()
    assert len(data) == len(before[1])
    assert data[:padding] == b"\xab" * padding
    raw = onnx.load(target, load_external_data=False)
    assert {e.value for t in raw.graph.initializer for e in t.external_data[:1]} == {
        "sparse.onnx.data"
    }


def test_several_data_files_stay_several(tmp_path: Path) -> None:
    model = om.two_weights()
    expected = {t.name: stored(model, t.name) for t in model.graph.initializer}
    for tensor in model.graph.initializer:
        (tmp_path / f"{tensor.name}.bin").write_bytes(tensor.raw_data)
        om.make_external(tensor, f"{tensor.name}.bin")
    after, _ = prune(model, tmp_path)
    written = {path.name for path in tmp_path.glob("sparse*")}
    assert written == {"sparse.onnx", *(f"sparse.onnx.{k}.data" for k in range(3))}
    np.testing.assert_array_equal(
        stored(after, "fc.weight"), sorted_prune(expected["fc.weight"], 1, TWO_FOUR)
    )
    np.testing.assert_array_equal(stored(after, "fc.bias"), expected["fc.bias"])


def test_nothing_that_is_read_is_ever_overwritten(tmp_path: Path) -> None:
    source = om.save_external(om.two_weights(), tmp_path / "a.onnx", location="b.onnx.data")
    with pytest.raises(BadInputError, match=r"would overwrite .*a\.onnx"):
        prune_onnx(open_onnx(source), source, TWO_FOUR)
    with pytest.raises(BadInputError, match=r"would overwrite .*b\.onnx\.data"):
        prune_onnx(open_onnx(source), tmp_path / "b.onnx", TWO_FOUR)
    (tmp_path / "hard.onnx").hardlink_to(source)
    with pytest.raises(BadInputError, match="would overwrite"):
        prune_onnx(open_onnx(source), tmp_path / "hard.onnx", TWO_FOUR)


@pytest.mark.parametrize("external", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_are_an_error_naming_node_and_initializer_and_leave_nothing(
    tmp_path: Path, value: float, external: bool
) -> None:
    dense = om.weights(64, 16)
    dense[5, 3] = value
    save = om.save_external if external else om.save
    source = save(om.matmul(dense), tmp_path / "dense.onnx")
    names = listing(tmp_path)
    with pytest.raises(BadInputError, match="layer 'fc': 1 of 1024 values of w "):
        prune_onnx(open_onnx(source), tmp_path / "sparse.onnx", TWO_FOUR)
    assert listing(tmp_path) == names
    excluded = Selection(exclude=("fc",))
    assert (
        not prune_onnx(open_onnx(source), tmp_path / "s.onnx", TWO_FOUR, excluded).weights[0].pruned
    )


def test_a_damaged_weight_names_the_bytes_it_lacks(tmp_path: Path) -> None:
    model = om.matmul(om.weights(64, 16))
    model.graph.initializer[0].raw_data = bytes(100)
    with pytest.raises(BadInputError, match="needs 4096 bytes"):
        prune(model, tmp_path)


def test_external_data_take_the_memory_of_one_weight(tmp_path: Path) -> None:
    count, shape = 5, (4096, 4096)
    size = 4 * shape[0] * shape[1]
    nodes = [
        helper.make_node("Gemm", [f"t{k}", f"w{k}"], [f"t{k + 1}"], name=f"fc{k}", transB=1)
        for k in range(count)
    ]
    model = om.model(nodes, {}, inputs={"t0": [1, shape[1]]}, outputs=[f"t{count}"])
    for k in range(count):
        tensor = model.graph.initializer.add(name=f"w{k}", data_type=TensorProto.FLOAT, dims=shape)
        om.make_external(tensor, "w.bin", offset=k * size, length=size)
    with (tmp_path / "w.bin").open("wb") as file:  # holes; one row of the last weight is written
        file.seek((count - 1) * size)
        file.write(np.arange(1, shape[1] + 1, dtype=np.float32).tobytes())
        file.truncate(count * size)
    source = om.save(model, tmp_path / "dense.onnx")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = prune_onnx(
        open_onnx(source), tmp_path / "sparse.onnx", TWO_FOUR, Selection(exclude=("fc[1-3]",))
    )
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 1.6 * size
    zeros = [row.zeros for row in result.weights]
    assert zeros == [shape[0] * shape[1]] * 4 + [shape[0] * shape[1] - shape[1] // 2]
    assert (tmp_path / "sparse.onnx.data").stat().st_size == count * size
    last = open_onnx(tmp_path / "sparse.onnx").proto.graph.initializer[-1]
    row = read_tensor(last, tmp_path / "sparse.onnx")[0]
    np.testing.assert_array_equal(row[:8], [0, 0, 3, 4, 0, 0, 7, 8])


# --- the axis, by brute force ---------------------------------------------------------------------


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[onnx.NodeProto], dict[str, om.Array], int]:
    """Random ops from a constant to a matrix of some shape, right operand of MatMul."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4)))
    size = int(np.prod(shape))
    constants = {"w": np.arange(1, size + 1, dtype=np.float32).reshape(shape)}
    nodes: list[onnx.NodeProto] = []
    value, name = constants["w"], "w"
    for k in range(draw(st.integers(1, 4))):
        op = draw(st.sampled_from(["Transpose", "Reshape", "Identity", "Cast", "Unsqueeze"]))
        inputs: list[str] = [name]
        attributes: dict[str, Any] = {}
        if op == "Transpose":
            perm = draw(st.permutations(range(value.ndim)))
            attributes, value = {"perm": perm}, value.transpose(perm)
        elif op == "Reshape":
            target = draw(st.sampled_from(factors(size)))
            inputs, value = [name, f"c{k}"], value.reshape(target)
            constants[f"c{k}"] = np.array(target, np.int64)
        elif op == "Unsqueeze":
            at = draw(st.integers(0, value.ndim))
            inputs, value = [name, f"c{k}"], np.expand_dims(value, at)
            constants[f"c{k}"] = np.array([at], np.int64)
        elif op == "Cast":
            attributes = {"to": TensorProto.FLOAT}
        name = f"s{k}"
        nodes.append(helper.make_node(op, inputs, [name], name=f"{op}{k}", **attributes))
    nodes.append(helper.make_node("Identity", [name], ["v"]))
    return nodes, constants, value.shape[max(value.ndim - 2, 0)]


def factors(size: int) -> list[tuple[int, ...]]:
    pairs: list[tuple[int, int]] = [(a, size // a) for a in range(1, size + 1) if size % a == 0]
    return [(size,), *pairs, *((a, b // 2, 2) for a, b in pairs if b % 2 == 0)]


def seen_groups(
    nodes: list[onnx.NodeProto], constants: dict[str, om.Array], m: int
) -> set[frozenset[float]] | None:
    """Which stored values share a group at the MatMul, found by running the graph."""
    model = om.model(nodes, constants, outputs=["v"])
    evaluator = ReferenceEvaluator(model)
    (found,) = list(evaluator.run(["v"], {}))
    seen = np.asarray(found)
    axis = max(seen.ndim - 2, 0)
    if seen.shape[axis] % m:
        return None
    lines = np.moveaxis(seen, axis, -1).reshape(-1, m)
    return {frozenset(float(value) for value in line) for line in lines}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(chain=chains(), m=st.sampled_from([2, 4]))
def test_groups_along_the_traced_axis_are_those_that_the_matmul_sums_over(
    chain: tuple[list[onnx.NodeProto], dict[str, om.Array], int], m: int
) -> None:
    nodes, constants, width = chain
    model = om.before_matmul(nodes, constants, width)
    expected = seen_groups(nodes, constants, m)
    (weight,) = find_weights(model).weights
    w = constants["w"]
    if expected is None:
        return
    possible: dict[int, set[frozenset[float]]] = {
        axis: {frozenset(map(float, line)) for line in np.moveaxis(w, axis, -1).reshape(-1, m)}
        for axis in range(w.ndim)
        if w.shape[axis] % m == 0
    }
    matching = [axis for axis, groups in possible.items() if groups == expected]
    if weight.axis is None:
        # a Transpose between two Reshapes is not undone, though by luck it may change nothing, and
        # an axis that a Reshape made of several is left alone
        assert matching == [] or "Transpose" in weight.trace or width not in w.shape
    else:
        assert weight.axis in matching


def test_of_a_large_file_only_the_bytes_of_pruned_weights_change(tmp_path: Path) -> None:
    names = ["x", *(f"h{i}" for i in range(1, 9)), "y"]
    nodes = [
        helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]], name=f"fc{i}")
        for i in range(9)
    ]
    constants = {f"w{i}": om.weights(1024, 512 if i == 8 else 1024, seed=i) for i in range(9)}
    source, target = tmp_path / "dense.onnx", tmp_path / "sparse.onnx"
    om.save(om.model(nodes, constants, inputs={"x": [1, 1024]}), source)
    prune_onnx(open_onnx(source), target, TWO_FOUR, Selection(exclude=("fc[!3]",)))
    before, after = (np.frombuffer(path.read_bytes(), np.uint8) for path in (source, target))
    assert before.size == after.size > 1 << 24
    (changed,) = np.nonzero(before != after)
    assert changed[-1] - changed[0] < constants["w3"].nbytes
    pruned = om.load(target).graph.initializer[3]
    assert np.count_nonzero(onnx.numpy_helper.to_array(pruned)) == constants["w3"].size / 2
    copy_onnx(open_onnx(source), tmp_path / "copy.onnx")
    assert (tmp_path / "copy.onnx").read_bytes() == source.read_bytes()
