"""The passes between a traced graph and the file that engines read.

Each is a function that changes a model in place. `GraphExport` runs those that the options ask
for. A stored weight is read when the file is written, one at a time: what passes do to it (another
type, transposed, zeros without a sign) is done to that one array then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import OutputFixPass
from onnxscript.rewriter.pattern import SimplePatternMatcher
from onnxscript.rewriter.rules.common import slice_split_rule

from twofour.export.arrays import cast, transposed
from twofour.export.casts import Conversion, Kept, narrow
from twofour.export.ir_models import (
    NODE_NAME,
    OLDEST_OPSET,
    lift_constants,
    save,
    to_opset_17,
)
from twofour.export.layer_names import exported_layers, weight_operands
from twofour.export.tracing import TracedModule
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
        self,
        graph: onnx.ModelProto,
        layers: LayerMap,
        options: ExportOptions,
        too_large: tuple[str, ...] = (),
    ) -> None:
        """`too_large`: tensors of the graph whose values do not fit the precision."""
        self._graph, self._traced, self._options = graph, layers, options
        self.too_large = too_large
        """Tensors that stay float32, with what makes and reads them."""
        self.done = Conversion(notes=())
        """What the change of precision did."""
        self._model: ir.Model | None = None
        self._layers = layers
        self._store: Store = {}
        self._decided: set[str] = set()
        """Weights whose values a pass has asked for."""
        self._is_writing = False

    def write(self, store: Store, target: Path) -> LayerMap:
        """Write `target` with the values of `store`, and give the layers of the file.

        Raises BadInputError for a result that is no valid ONNX, and a full disk.
        """
        before, self._store = self._store, store
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
        model, options = ir.from_proto(self._graph), self._options
        for node in model.graph.all_nodes():
            node.name = node.metadata_props.pop(NODE_NAME, node.name)
        self._give_values(model)
        self.done = _pass(model, options, name, self.too_large)
        self._layers = exported_layers(model, self._traced)
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


def _pass(
    model: ir.Model, options: ExportOptions, name: str, too_large: tuple[str, ...] = ()
) -> Conversion:
    """Run all passes that the options ask for; `name` is the file's in messages."""
    done = Conversion(notes=())
    fold_stored(model)
    optimize(model)
    if options.opset == OLDEST_OPSET:
        to_opset_17(model)
    if options.precision is not Precision.FLOAT32:
        kept = Kept(globs=options.float32_nodes, too_large=too_large)
        done = narrow(model, options.precision, name, kept)
    make_zeros_positive(model)
    return done


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
    layers = exported_layers(model, traced.layers)
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.size > LARGEST_PASSED_OVER:
            shape = ir.Shape(tensor.shape)
            value.const_value = ir.ExternalTensor("", 0, 0, tensor.dtype, shape=shape, name=name)
    proto = ir.to_proto(model)
    for tensor in external_tensors(proto):
        leave_out(tensor, 0, 0)
    return OpenedModel(Path(), proto), layers


def _differs(name: str, one: Store, other: Store) -> bool:
    """Whether two stores have other bits under a name."""
    first, second = (store[name].array().reshape(-1).view(np.uint8) for store in (one, other))
    return not np.array_equal(first, second)


def fold_stored(model: ir.Model) -> None:
    """Cast and transpose stored weights when they are written: no other node reads them.

    Needs a graph as it was traced. Promises the same outputs, bit for bit.
    """
    for node in list(model.graph):
        weight = node.inputs[0] if node.inputs else None
        if node.op_type not in ("Cast", "Transpose") or node.domain or weight is None:
            continue
        if not weight.is_initializer() or len(weight.uses()) != 1 or weight.is_graph_output():
            continue
        if not node.outputs[0].is_graph_output() and weight.const_value is not None:
            _fold(model.graph, node, weight)


def _fold(graph: ir.Graph, node: ir.Node, weight: ir.Value) -> None:
    """What the node gives becomes an initializer; a cast weight keeps its name."""
    tensor, output = weight.const_value, node.outputs[0]
    assert tensor is not None, "asked before"
    name = weight.name if node.op_type == "Cast" else output.name
    if node.op_type == "Cast":
        dtype = ir.DataType(node.attributes["to"].as_int())
        shape = tensor.shape

        def made() -> Array:
            return cast(tensor.numpy(), dtype.numpy())
    else:
        dtype, order = tensor.dtype, _order(node, len(tensor.shape))
        shape = ir.Shape([tensor.shape[axis] for axis in order])

        def made() -> Array:
            return transposed(tensor.numpy(), order)

    folded = ir.Value(name=name, shape=shape, type=ir.TensorType(dtype))
    folded.const_value = lazy(made, dtype, shape, name)
    output.replace_all_uses_with(folded)
    graph.remove(node, safe=True)
    del graph.initializers[weight.name or ""]
    graph.register_initializer(folded)


def _order(node: ir.Node, rank: int) -> tuple[int, ...]:
    given = node.attributes.get("perm")
    return tuple(reversed(range(rank))) if given is None else tuple(given.as_ints())


def lazy(
    made: Callable[[], Array], dtype: ir.DataType, shape: ir.Shape, name: str | None
) -> ir.LazyTensor:
    """A tensor whose values are made each time that they are asked for, and not kept."""

    def tensor() -> ir.Tensor:
        return ir.Tensor(made(), dtype=dtype, name=name)

    return ir.LazyTensor(tensor, dtype=dtype, shape=shape, name=name)


@dataclass(frozen=True, slots=True)
class _SlicesOfOneValue:
    """The nodes of a graph that read what `node` reads."""

    graph: ir.Graph
    node: ir.Node

    def __iter__(self) -> Iterator[ir.Node]:
        for value in self.node.inputs[:1]:
            yield from (value.consumers() if value is not None else ())


class _HalvesMatcher(SimplePatternMatcher):  # type: ignore[misc]  # onnxscript has no stubs here
    """Finds two Slices of one value that halve it; onnxscript's own tries every two of a graph.

    That is a fifth of a forecast of a Llama, and minutes of a Flux.
    """

    def match(self, model: ir.Model, graph: ir.Graph, node: ir.Node, **kwargs: object) -> object:
        """The match that begins at `node`, or why there is none."""
        return super().match(model, _SlicesOfOneValue(graph, node), node, **kwargs)


slice_split_rule._matcher = _HalvesMatcher(slice_split_rule._target_pattern)  # it takes no other


def optimize(model: ir.Model) -> None:
    """Fold constants, fuse layers and remove what nothing uses, as torch.onnx does it.

    Promises the same outputs but for the rounding of what it fuses.
    """
    torch.onnx.ONNXProgram(model, None).optimize()
    OutputFixPass()(model)  # an input may not be an output as it is
    lift_constants(model)


def make_zeros_positive(model: ir.Model) -> None:
    """Write -0.0 as +0.0 in the weights of products (Conv to Einsum).

    Batch-norm folding multiplies pruned weights by negative scales; some sparse kernels take the
    -0.0 that this leaves for a non-zero (vLLM issue 13198). Promises the same outputs.
    """
    for node in model.graph.all_nodes():
        for value in weight_operands(node):
            tensor = value.const_value
            if tensor is not None and value.is_initializer() and value.dtype in _FLOATS:
                made = _without_sign(tensor)
                value.const_value = lazy(made, tensor.dtype, ir.Shape(tensor.shape), value.name)


def _without_sign(tensor: ir.TensorProtocol) -> Callable[[], Array]:
    def made() -> Array:
        values: Array = tensor.numpy()
        bits = values.view(np.dtype(f"u{values.itemsize}"))
        sign_alone = bits == np.array(1, bits.dtype) << (8 * values.itemsize - 1)
        if not sign_alone.any():
            return values
        return np.where(sign_alone, np.zeros_like(values), values)

    return made


def _strip_paths(model: ir.Model) -> None:
    """Remove every metadata entry and doc string that names a source file.

    torch keeps the Python stack of each node under `pkg.torch.onnx.stack_trace`.
    """
    graphs = [model.graph, *model.functions.values()]
    holders = [model, *graphs, *model.graph.initializers.values()]
    nodes = [node for graph in graphs for node in graph.all_nodes()]
    values = [value for node in nodes for value in node.outputs]
    for holder in (*holders, *nodes, *values):
        for key, value in list(holder.metadata_props.items()):
            if _SOURCE_PATH.search(value):
                del holder.metadata_props[key]
        if _SOURCE_PATH.search(getattr(holder, "doc_string", None) or ""):
            holder.doc_string = None
