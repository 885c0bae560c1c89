"""The passes between a traced graph and the file that engines read.

Each is a function that changes a model in place. Its docstring says what it needs and what it
promises; it finds its places in the graph first, and changes them after. `GraphExport` runs those
that the options ask for. A stored weight is read when the file is written, one at a time: what
passes do to it (another type, transposed, zeros without a sign) is done to that one array then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import OutputFixPass, RemoveUnusedNodesPass
from onnxscript.rewriter.pattern import Constant, SimplePatternMatcher
from onnxscript.rewriter.rules.common import _no_op, slice_split_rule

from twofour.errors import BadInputError
from twofour.export.casts import Kept, PrecisionChange, narrow
from twofour.export.ir_models import cast, lazy, lift_constants, save, transposed
from twofour.export.layer_names import NODE_NAME, exported_layers, module_scopes, weight_operands
from twofour.export.tracing import OLDEST_OPSET, TRACED_OPSET, TracedModule
from twofour.graph.files import Array, external_tensors, leave_out, numpy_dtype
from twofour.graph.opened import OpenedModel
from twofour.graph.stored import Store
from twofour.records.export import LayerMap
from twofour.records.options import ExportOptions, Precision
from twofour.records.weights import LARGEST_PASSED_OVER

_SOURCE_PATH = re.compile(r"""[\\/][^\s"']*\.py\b|\bFile "|<frozen """)
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class GraphExport:
    """A traced graph and its passes, run once; any store of its weights can be written from it.

    A pass that looks at values (to fold a batch norm, to merge equal biases) is run again for a
    store that has others there.
    """

    def __init__(
        self, graph: onnx.ModelProto, options: ExportOptions, too_large: tuple[str, ...] = ()
    ) -> None:
        """`too_large`: tensors of the graph whose values do not fit the precision."""
        self._graph = graph
        self._options = options
        self.too_large = too_large
        """Tensors that stay float32, with what makes and reads them."""
        self.done = PrecisionChange(notes=())
        """What the change of precision did."""
        self._model: ir.Model | None = None
        self._layers = LayerMap(layers=())
        self._store: Store = {}
        self._decided: set[str] = set()
        """Weights whose values a pass has asked for."""
        self._is_writing = False

    def write(self, store: Store, target: Path) -> LayerMap:
        """Write `target` with the values of `store`, and give the layers of the file.

        Raises BadInputError for a result that is no valid ONNX, and a full disk.
        """
        before = self._store
        self._store = store
        if any(_differs(name, before, store) for name in self._decided):
            self.close()

        while True:
            if self._model is None:
                self._model = self._passed(target.name)
            self._is_writing = True
            save(self._model, target)
            self._is_writing = False
            if not self.done.too_large:
                return self._layers
            self.too_large += tuple(self.done.too_large)
            self.close()

    def close(self) -> None:
        """Let go of arrays: onnxscript's rewrite rules keep the last graph that they matched."""
        if self._model is not None:
            for value in self._model.graph.initializers.values():
                value.const_value = None
        self._model = None

    def _passed(self, name: str) -> ir.Model:
        """The graph behind all passes that the options ask for."""
        self.close()
        self._decided.clear()
        model = ir.from_proto(self._graph)
        for node in model.graph.all_nodes():
            node.name = node.metadata_props.pop(NODE_NAME, node.name)
        self._give_values(model)
        self.done = _pass(model, self._options, name, self.too_large)
        self._layers = exported_layers(model)
        _strip_paths(model)
        return model

    def _give_values(self, model: ir.Model) -> None:
        """Let the weights be the arrays of the store that is written, read when needed."""
        for name, value in model.graph.initializers.items():
            if isinstance(value.const_value, ir.ExternalTensor):
                stored = self._store[name]
                dtype = ir.DataType.from_numpy(numpy_dtype(stored.dtype or ""))
                made = partial(self._array, name)
                value.const_value = lazy(made, dtype, ir.Shape(stored.shape), name)
                value.dtype = dtype

    def _array(self, name: str) -> Array:
        if not self._is_writing:
            self._decided.add(name)
        return self._store[name].array()


def _differs(name: str, one: Store, other: Store) -> bool:
    """Whether two stores have other bits under a name."""
    first = one[name].array().reshape(-1).view(np.uint8)
    second = other[name].array().reshape(-1).view(np.uint8)
    return not np.array_equal(first, second)


def without_weights(traced: TracedModule, options: ExportOptions) -> tuple[OpenedModel, LayerMap]:
    """The graph that would be exported, whose weights have no values, and its layers.

    Nothing is written, and no weight is in memory. Where a pass asks for values, each weight has
    one of its own, so that none are taken for equal or zero.
    """
    model = traced.model
    for number, (name, value) in enumerate(model.graph.initializers.items(), start=2):
        if value.const_value is None:
            shape = value.shape or ir.Shape(())
            made = partial(np.full, shape.numpy(), number, np.float32)
            value.const_value = lazy(made, ir.DataType.FLOAT, shape, name)
    _pass(model, options, "")
    layers = exported_layers(model)
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.size > LARGEST_PASSED_OVER:
            shape = ir.Shape(tensor.shape)
            value.const_value = ir.ExternalTensor("", 0, 0, tensor.dtype, shape=shape, name=name)
    proto = ir.to_proto(model)
    for place, tensor in enumerate(external_tensors(proto)):
        leave_out(tensor, place, 0)  # of one place, they would be one array
    return OpenedModel(Path(), proto), layers


def _pass(
    model: ir.Model, options: ExportOptions, name: str, too_large: tuple[str, ...] = ()
) -> PrecisionChange:
    """Run all passes that the options ask for; `name` is the file's in messages."""
    done = PrecisionChange(notes=())
    fold_stored(model)
    optimize(model)
    if options.opset == OLDEST_OPSET:
        to_opset_17(model)
    if options.precision is not Precision.FLOAT32:
        kept = Kept(globs=options.float32_nodes, too_large=too_large)
        done = narrow(model, options.precision, name, kept)
    make_zeros_positive(model)
    return done


def fold_stored(model: ir.Model) -> None:
    """Cast and transpose stored weights when they are written. Needs a graph as it was traced.

    Promises the same outputs, bit for bit.
    """
    for node in list(model.graph):
        if _is_foldable(node):
            _fold(model.graph, node, node.inputs[0])


def _is_foldable(node: ir.Node) -> bool:
    """A Cast or Transpose of a stored weight that no other node reads."""
    if node.op_type not in ("Cast", "Transpose") or node.domain:
        return False
    weight = node.inputs[0]
    if weight is None or not weight.is_initializer() or weight.const_value is None:
        return False
    is_output = weight.is_graph_output() or node.outputs[0].is_graph_output()
    return len(weight.uses()) == 1 and not is_output


def _fold(graph: ir.Graph, node: ir.Node, weight: ir.Value) -> None:
    """What the node gives becomes an initializer; a cast weight keeps its name."""
    # "fc.weight" of bfloat16 -> Cast -> "fc.weight/float" becomes "fc.weight" of float32
    tensor = weight.const_value
    output = node.outputs[0]
    if node.op_type == "Cast":
        dtype = ir.DataType(node.attributes["to"].as_int())
        folded = _cast_later(tensor, dtype, weight.name)
    else:
        reverse = range(len(tensor.shape))[::-1]
        order = tuple(node.attributes.get_ints("perm", reverse))
        folded = _transposed_later(tensor, order, output.name)
    kind = ir.TensorType(folded.dtype)
    value = ir.Value(name=folded.name, shape=folded.shape, type=kind, const_value=folded)
    output.replace_all_uses_with(value)
    graph.remove(node, safe=True)
    del graph.initializers[weight.name]
    graph.register_initializer(value)


def _cast_later(tensor: ir.TensorProtocol, dtype: ir.DataType, name: str | None) -> ir.LazyTensor:
    def made() -> Array:
        return cast(tensor.numpy(), dtype.numpy())

    return lazy(made, dtype, tensor.shape, name)


def _transposed_later(
    tensor: ir.TensorProtocol, order: tuple[int, ...], name: str | None
) -> ir.LazyTensor:
    def made() -> Array:
        return transposed(tensor.numpy(), order)

    return lazy(made, tensor.dtype, ir.Shape([tensor.shape[axis] for axis in order]), name)


def optimize(model: ir.Model) -> None:
    """Fold constants, fuse layers and remove what nothing uses, as torch.onnx does it.

    Needs any model of torch.onnx. Promises the same outputs but for the rounding of what it fuses.
    """
    torch.onnx.ONNXProgram(model, None).optimize()
    OutputFixPass()(model)  # an input may not be an output as it is
    lift_constants(model)


@dataclass(frozen=True, slots=True)
class _SlicesOfOneValue:
    """The nodes of a graph that read what `node` reads."""

    graph: ir.Graph
    node: ir.Node

    def __iter__(self) -> Iterator[ir.Node]:
        for value in self.node.inputs[:1]:
            if value is not None:
                yield from value.consumers()


class _HalvesMatcher(SimplePatternMatcher):  # type: ignore[misc]  # onnxscript has no stubs here
    """Finds two Slices of one value that halve it; onnxscript's own tries every two of a graph.

    That is a fifth of a forecast of a Llama, and minutes of a Flux.
    """

    def match(self, model: ir.Model, graph: ir.Graph, node: ir.Node, **kwargs: object) -> object:
        """The match that begins at `node`, or why there is none."""
        return super().match(model, _SlicesOfOneValue(graph, node), node, **kwargs)


slice_split_rule._matcher = _HalvesMatcher(slice_split_rule._target_pattern)  # it takes no other


def _match_zero_exactly() -> None:
    # onnxscript takes what is below 1e-8 for the 0 of x + 0: log(x + 1e-10) became log(x)
    for rule in _no_op.rules:
        for node in rule._target_pattern:
            for value in node.inputs:
                if isinstance(value, Constant):
                    value._abs_tol = 0.0


_match_zero_exactly()

_VALUES_OF_17 = {
    ("ScatterElements", "reduction"): {"none", "add", "mul"},
    ("ScatterND", "reduction"): {"none", "add", "mul"},
    ("Pad", "mode"): {"constant", "reflect", "edge"},
}
"""max and min came with 18; "wrap" with 19, and torch writes it in 18 all the same."""


def to_opset_17(model: ir.Model) -> None:
    """Rewrite a model in opset 17, the newest that TensorRT 8.6 reads. Needs one of opset 18.

    Promises the same outputs, names and metadata: ONNX's own version converter (onnx 1.23) drops
    these, and knows no way down for Pad and Split nor for anything inside subgraphs. Raises
    BadInputError for the first node that opset 17 has no words for.
    """
    for node in list(model.graph.all_nodes()):
        if _is_new_in_18(node):
            _rewrite(node)
    RemoveUnusedNodesPass()(model)  # axes that were inputs
    model.opset_imports[""] = OLDEST_OPSET
    imports = [onnx.helper.make_opsetid("", OLDEST_OPSET)]
    model.ir_version = onnx.helper.find_min_ir_version_for(imports)


def _is_new_in_18(node: ir.Node) -> bool:
    if node.domain != "":
        return False
    schema = onnx.defs.get_schema(node.op_type, TRACED_OPSET)
    return bool(schema.since_version == TRACED_OPSET)


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
    _refuse_later_values(node, older)


def _spell_out_mish(node: ir.Node) -> None:
    """Mish is x * tanh(softplus(x)) (Misra 2019)."""
    softplus = ir.node("Softplus", [node.inputs[0]])
    tanh = ir.node("Tanh", [softplus.outputs[0]])
    node.graph.insert_before(node, [softplus, tanh])
    node.op_type = "Mul"
    node.resize_inputs(2)
    node.replace_input_with(1, tanh.outputs[0])


def _axes_to_attribute(node: ir.Node) -> None:
    """Write the axes, an input since 18, as an attribute; no axes mean all of them in 17."""
    axes: list[int] = []
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        constant = ir.convenience.get_const_tensor(node.inputs[1])
        if constant is None:
            raise _cannot(node, " over computed axes")
        axes = constant.numpy().tolist()
    does_nothing = node.attributes.pop("noop_with_empty_axes", None)
    if not axes and does_nothing is not None and does_nothing.as_int():
        raise _cannot(node, " over no axis")
    node.resize_inputs(1)
    if axes:
        node.attributes["axes"] = ir.AttrInt64s("axes", axes)


def _drop_number_of_parts(node: ir.Node) -> None:
    """Remove num_outputs: without it the outputs are as many equal parts."""
    if node.attributes.pop("num_outputs", None) is None:
        return
    data = node.inputs[0]
    length = None
    if data is not None and data.shape is not None:
        length = data.shape[node.attributes.get_int("axis", 0)]
    if not isinstance(length, int) or length % len(node.outputs):
        raise _cannot(node, f" of {length} into {len(node.outputs)}")


def _drop_later_attributes(node: ir.Node, older: onnx.defs.OpSchema) -> None:
    """Remove attributes that have the value which opset 17 always means; refuse the others."""
    newer = onnx.defs.get_schema(node.op_type, TRACED_OPSET).attributes
    for name in sorted(set(node.attributes) - set(older.attributes)):
        usual = newer[name].default_value
        if not usual.type or node.attributes[name].value != ir.from_proto(usual).value:
            raise _cannot(node, f" with {name}")
        del node.attributes[name]


def _refuse_later_values(node: ir.Node, older: onnx.defs.OpSchema) -> None:
    """Raise for values, inputs and types that came with later definitions of an operator."""
    for (op, name), known in _VALUES_OF_17.items():
        if node.op_type == op and name in node.attributes:
            value = node.attributes[name].as_string()
            if value not in known:
                raise _cannot(node, f" with {name} {value}")
    if len(node.inputs) > older.max_input:
        raise _cannot(node, " with this input")
    data = node.inputs[0]
    if data is not None and data.dtype is not None:
        kind = data.dtype.name.lower()
        if f"tensor({kind})" not in older.inputs[0].types:
            raise _cannot(node, f" of {kind}")


def _cannot(node: ir.Node, what: str) -> BadInputError:
    where = f"node {node.name}"
    scopes = [scope for scope in module_scopes(node.metadata_props) if scope]
    if scopes:
        where += f", module {scopes[-1]}"
    return BadInputError(
        f"this model cannot be written in opset {OLDEST_OPSET}: {node.op_type}{what} came later "
        f"({where})",
        hint="use --opset 20, which TensorRT 10 and 11 read",
    )


def make_zeros_positive(model: ir.Model) -> None:
    """Write -0.0 as +0.0 in the weights of products (Conv to Einsum). Needs any model.

    Promises the same outputs. Batch-norm folding multiplies pruned weights by negative scales; some
    sparse kernels take the -0.0 that this leaves for a non-zero (vLLM issue 13198).
    """
    for node in model.graph.all_nodes():
        for value in weight_operands(node):
            tensor = value.const_value
            if tensor is not None and value.is_initializer() and value.dtype in _FLOATS:
                made = partial(_without_sign, tensor)
                value.const_value = lazy(made, tensor.dtype, ir.Shape(tensor.shape), value.name)


def _without_sign(tensor: ir.TensorProtocol) -> Array:
    # in float16 -0.0 is 0x8000: the highest bit alone
    values: Array = tensor.numpy()
    bits = values.view(np.dtype(f"u{values.itemsize}"))
    sign_alone = bits == np.array(1, bits.dtype) << (8 * values.itemsize - 1)
    if not sign_alone.any():
        return values
    return np.where(sign_alone, np.zeros_like(values), values)


def _strip_paths(model: ir.Model) -> None:
    """Remove every metadata entry and doc string that names a source file.

    torch keeps the Python stack of each node under `pkg.torch.onnx.stack_trace`.
    """
    for holder in _described(model):
        for key, text in list(holder.metadata_props.items()):
            if _SOURCE_PATH.search(text):
                del holder.metadata_props[key]
        if _SOURCE_PATH.search(getattr(holder, "doc_string", None) or ""):
            holder.doc_string = None


def _described(model: ir.Model) -> Iterator[ir.Model | ir.Graph | ir.Function | ir.Node | ir.Value]:
    """All that has metadata of its own."""
    yield model
    yield from model.graph.initializers.values()
    for graph in (model.graph, *model.functions.values()):
        yield graph
        for node in graph.all_nodes():
            yield node
            yield from node.outputs
