"""ONNX models as onnx_ir holds them: read in one graph, rewritten to opset 17, checked, written.

TensorRT 8.6 reads opset 17 at most. ONNX's own version converter (onnx 1.23) knows no way down for
Pad and Split nor for anything inside subgraphs, and drops the metadata by which weights get names.
"""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import (
    InlinePass,
    LiftConstantsToInitializersPass,
    RemoveInitializersFromInputsPass,
    RemoveUnusedNodesPass,
)

from twofour.errors import BadInputError, first_line
from twofour.graph.files import (
    PROTOBUF_LIMIT_BYTES,
    SEPARATE_INITIALIZERS,
    check_inline,
    external_data,
    external_tensors,
    leave_out,
    point_at_itself,
)
from twofour.graph.opened import OpenedModel, write_whole
from twofour.graph.scope import scopes
from twofour.graph.stored import StoredTensor
from twofour.store import sync, writing


def load_float32(opened: OpenedModel) -> ir.Model:
    """The model without functions, every node with a name, its values mapped from their files.

    TensorRT takes functions apart too. Raises BadInputError for what onnx_ir cannot keep.
    """
    source, proto = opened.path, opened.copy()
    point_at_itself(proto, source)
    # nodes without a name are known by their place, which casts would change
    for scope in scopes(proto, source):
        for node in scope.nodes:
            node.proto.name = node.name
    check_inline(proto, source)
    try:
        model = ir.from_proto(proto)
        for graph in (model.graph, *(function.graph for function in model.functions.values())):
            ir.external_data.set_base_dir(graph, source.parent)
        InlinePass()(model)
        lift_constants(model)
    except Exception as error:  # onnx_ir has one of its own, and those of what it calls
        raise BadInputError(
            f"{source} cannot be converted: {first_line(error)}",
            hint="onnx.checker.check_model says what is wrong with it",
        ) from error
    # old files list constants among the inputs too, where they would keep their type
    if RemoveInitializersFromInputsPass()(model).modified:
        model.ir_version = max(model.ir_version, SEPARATE_INITIALIZERS)
    return model


def stored_tensor(name: str, stored: StoredTensor, dtype: ir.DataType) -> ir.ExternalTensor:
    """A tensor of these values, which are read when they are asked for."""
    return ir.ExternalTensor(
        stored.file.name,
        stored.offset,
        stored.size_bytes,
        dtype,
        shape=ir.Shape(stored.shape),
        name=name,
        base_dir=stored.file.parent,
    )


def lift_constants(model: ir.Model) -> None:
    """Make what Constant nodes give initializers, outputs of a graph apart."""
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def taken_names(model: ir.Model) -> set[str]:
    """Names of nodes, tensors and constants, in subgraphs too."""
    names: set[str | None] = set()
    for graph in model.graphs():
        names.update(graph.initializers, (value.name for value in graph.inputs))
    for node in model.graph.all_nodes():
        names.update((node.name, *(value.name for value in node.outputs)))
    return {name for name in names if name}


def new_name(taken: set[str], wish: str) -> str:
    """The name, with a number where it is taken; it is taken from now on."""
    name, number = wish, 1
    while name in taken:
        number += 1
        name = f"{wish}_{number}"
    taken.add(name)
    return name


def save(model: ir.Model, target: Path, source: Path | None = None) -> None:
    """Write and check `target`, which appears last.

    Weights lie inside where protobuf can hold them, else in `<target name>.data`. Raises
    BadInputError for a full disk, and for an invalid model, unless its `source` was invalid too.
    """
    data_name = f"{target.name}.data"
    with (
        writing(target),
        tempfile.TemporaryDirectory(
            dir=target.parent, prefix=f".{target.name}.", suffix=".part"
        ) as folder,
    ):
        written = Path(folder, target.name)
        ir.save(model, written, external_data=data_name)
        data = Path(folder, data_name)
        data.touch()  # tensors of a few bytes stay in the model
        invalid = what_is_invalid(written)
        if invalid is not None and (source is None or what_is_invalid(source) is None):
            raise BadInputError(
                f"{target.name} has no valid form in the types that were asked for: {invalid}",
                hint="try --precision float32, or another --opset for a torch model",
            )
        if data.stat().st_size + written.stat().st_size <= MOST_INSIDE_BYTES:
            _put_inside(written, data)
        else:
            sync(data)
            data.replace(target.parent / data_name)
        sync(written)
        written.replace(target)
        if data.exists():
            (target.parent / data_name).unlink(missing_ok=True)  # of an earlier model


def _put_inside(written: Path, data: Path) -> None:
    """Move what the data file has into the model, one array at a time."""
    model = onnx.load(written, load_external_data=False)
    for tensor in external_tensors(model):
        place = external_data(tensor, written)
        leave_out(tensor, place.offset, place.size_bytes)
    write_whole(model, data, written)


def what_is_invalid(path: Path) -> str | None:
    """What onnx.checker finds wrong with a file, types of all tensors included, in one line."""
    try:
        onnx.checker.check_model(path, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return str(error).strip().splitlines()[0]
    return None


MOST_INSIDE_BYTES = PROTOBUF_LIMIT_BYTES - (1 << 26)
"""Largest file with its weights inside; readers that add to the model have some room."""
NODE_NAME = "twofour.node"
"""Key of the name that a node of a traced graph has in the exported file."""
AGAIN = "#"
"""Is between a layer's name and a number where the layer runs more than once."""
_NAME_SCOPES = "pkg.torch.onnx.name_scopes"
OLDEST_OPSET = 17
TRACED_OPSET = 18
"""The oldest that torch.onnx.export has implementations of (torch 2.13)."""
_VALUES_OF_17 = {
    ("ScatterElements", "reduction"): {"none", "add", "mul"},
    ("ScatterND", "reduction"): {"none", "add", "mul"},
    ("Pad", "mode"): {"constant", "reflect", "edge"},
}
"""max and min came with 18; "wrap" with 19, and torch writes it in 18 all the same."""


def to_opset_17(model: ir.Model) -> None:
    """Rewrite a model of opset 18 in place; weights, names and metadata stay.

    Raises BadInputError for the first node that opset 17 has no words for.
    """
    for node in list(model.graph.all_nodes()):
        if node.domain == "":
            schema = onnx.defs.get_schema(node.op_type, TRACED_OPSET)
            if schema.since_version == TRACED_OPSET:
                _rewrite(node)
    RemoveUnusedNodesPass()(model)  # axes that were inputs
    model.opset_imports[""] = OLDEST_OPSET
    model.ir_version = onnx.helper.find_min_ir_version_for(
        [onnx.helper.make_opsetid("", OLDEST_OPSET)]
    )


def _rewrite(node: ir.Node) -> None:
    # ReduceMean(x, [1, 2]) of opset 18 becomes ReduceMean(x, axes=[1, 2]), Split(x, num_outputs=2)
    # of 6 channels Split(x): opset 17 makes as many equal parts as there are outputs
    if node.op_type == "Mish":
        _spell_out_mish(node)
        return
    if node.op_type.startswith("Reduce"):
        _axes_to_attribute(node)
    if node.op_type == "Split":
        _drop_number_of_parts(node)
    try:
        older = onnx.defs.get_schema(node.op_type, OLDEST_OPSET)
    except onnx.defs.SchemaError:
        raise _cannot(node, "") from None
    _drop_later_attributes(node, older)
    for (op, name), known in _VALUES_OF_17.items():
        value = node.attributes.get(name) if node.op_type == op else None
        if value is not None and value.as_string() not in known:
            raise _cannot(node, f" with {name} {value.as_string()}")
    if len(node.inputs) > older.max_input:
        raise _cannot(node, " with this input")
    data = node.inputs[0]
    kind = None if data is None or data.dtype is None else data.dtype.name.lower()
    if kind is not None and f"tensor({kind})" not in older.inputs[0].types:
        raise _cannot(node, f" of {kind}")


def _spell_out_mish(node: ir.Node) -> None:
    """Mish is x * tanh(softplus(x)) (Misra 2019)."""
    assert node.graph is not None, "nodes of a model are in a graph"
    softplus = ir.node("Softplus", [node.inputs[0]])
    tanh = ir.node("Tanh", [softplus.outputs[0]])
    node.graph.insert_before(node, [softplus, tanh])
    node.op_type = "Mul"
    node.resize_inputs(2)
    node.replace_input_with(1, tanh.outputs[0])


def _axes_to_attribute(node: ir.Node) -> None:
    """Write the axes, an input since 18, as an attribute; no axes mean all of them in 17."""
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    found = None if axes is None else ir.convenience.get_const_tensor(axes)
    if axes is not None and found is None:
        raise _cannot(node, " over computed axes")
    listed = [] if found is None else [int(axis) for axis in found.numpy()]
    does_nothing = node.attributes.pop("noop_with_empty_axes", None)
    if not listed and does_nothing is not None and does_nothing.as_int():
        raise _cannot(node, " over no axis")
    node.resize_inputs(1)
    if listed:
        node.attributes["axes"] = ir.AttrInt64s("axes", listed)


def _drop_number_of_parts(node: ir.Node) -> None:
    """Remove num_outputs: without it the outputs are as many equal parts."""
    if node.attributes.pop("num_outputs", None) is None:
        return
    data, axis = node.inputs[0], node.attributes.get("axis")
    length = None
    if data is not None and data.shape is not None:
        length = data.shape[axis.as_int() if axis is not None else 0]
    if not isinstance(length, int) or length % len(node.outputs):
        raise _cannot(node, f" of {length} into {len(node.outputs)}")


def _drop_later_attributes(node: ir.Node, older: onnx.defs.OpSchema) -> None:
    """Remove attributes that have the value which opset 17 always means; refuse the others."""
    newer = onnx.defs.get_schema(node.op_type, TRACED_OPSET).attributes
    for name in sorted(set(node.attributes) - set(older.attributes)):
        usual = ir.from_proto(newer[name].default_value) if newer[name].default_value.type else None
        if usual is None or node.attributes[name].value != usual.value:
            raise _cannot(node, f" with {name}")
        del node.attributes[name]


def _cannot(node: ir.Node, what: str) -> BadInputError:
    scopes = [scope for scope in module_scopes(node.metadata_props) if scope]
    where = f"node {node.name}, module {scopes[-1]}" if scopes else f"node {node.name}"
    return BadInputError(
        f"this model cannot be written in opset {OLDEST_OPSET}: {node.op_type}{what} came later "
        f"({where})",
        hint="use --opset 20, which TensorRT 10 and 11 read",
    )


def saturate_in_quantizers(model: ir.Model) -> None:
    """Remove each Clip that torch puts behind QuantizeLinear: TensorRT takes Q/DQ only in pairs."""
    for node in model.graph:
        read = node.inputs[0] if node.op_type == "Clip" else None
        maker = None if read is None else read.producer()
        if read is not None and maker is not None and maker.op_type == "QuantizeLinear":
            node.outputs[0].replace_all_uses_with(read)
            model.graph.remove(node, safe=True)


def module_scopes(properties: Mapping[str, str]) -> list[str]:
    """Module paths from the outside in; the last entry of torch's list is the call itself."""
    try:
        scopes = ast.literal_eval(properties.get(_NAME_SCOPES, "[]"))
    except (SyntaxError, ValueError):
        return []
    return [str(scope) for scope in scopes][:-1]
