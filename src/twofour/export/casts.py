"""A float32 ONNX file converted to float16 or bfloat16."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from twofour.errors import BadInputError
from twofour.export.float32 import FLOAT, FLOAT16_MAX, LAYERS, CastPlan, plan_casts
from twofour.export.ir_models import (
    cast,
    insert_behind,
    lazy,
    load_float32,
    new_name,
    save,
    taken_names,
)
from twofour.graph.files import Array
from twofour.graph.layers import FLOAT_ON_PURPOSE
from twofour.graph.opened import OpenedModel
from twofour.records import frozen
from twofour.records.options import Precision
from twofour.records.weights import LARGEST_PASSED_OVER
from twofour.words import count, listed

_HALVES = {Precision.FLOAT16: ir.DataType.FLOAT16, Precision.BFLOAT16: ir.DataType.BFLOAT16}
_LARGEST = {ir.DataType.FLOAT16: FLOAT16_MAX, ir.DataType.BFLOAT16: float.fromhex("0x1.fep+127")}
_BOUNDED = frozenset({"Clip", "Min", "Max"})
"""Where float32's limit means no limit."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@frozen
class PrecisionChange:
    """What was converted, and what kept float32."""

    notes: tuple[str, ...]
    too_large: dict[str, None] = field(default_factory=dict)
    """Names of constants that did not fit; large ones are read when the file is written."""
    changed: bool = False
    """Something was float32 that is half precision now."""


@frozen
class Kept:
    """What stays float32 in a model that is converted."""

    globs: tuple[str, ...] = ()
    """Over names of nodes (fnmatch, case-sensitive): what the user asked for."""
    too_large: tuple[str, ...] = ()
    """Tensors whose values do not fit; so what makes and reads them keeps float32."""


def until_all_fits(convert: Callable[[Kept], PrecisionChange], kept: Kept) -> PrecisionChange:
    """Write a file, again with more in float32 where constants turn out not to fit."""
    while True:
        done = convert(kept)
        if not done.too_large:
            return done
        kept = replace(kept, too_large=(*kept.too_large, *done.too_large))


def convert_onnx(
    opened: OpenedModel, target: Path, precision: Precision, kept: Kept
) -> PrecisionChange:
    """Write the model to `target` in half precision; what does not fit the type stays float32.

    Raises BadInputError for a glob that matches nothing, and a layer that does not have the type in
    the file's opset.
    """
    source = opened.path
    read = {source.resolve(), *opened.data_files}
    for written in (target, target.with_name(f"{target.name}.data")):
        if written.resolve() in read:
            raise BadInputError(
                f"writing {written} would overwrite a file that is being read",
                hint="choose another name or folder for the converted model",
            )

    def convert(kept: Kept) -> PrecisionChange:
        model = load_float32(opened)
        done = narrow(model, precision, str(source), kept)
        save(model, target, source)
        return done

    return until_all_fits(convert, kept)


def narrow(model: ir.Model, precision: Precision, source: str, kept: Kept) -> PrecisionChange:
    """Make a model half precision in place. Needs float32, whose constants are initializers.

    Promises that inputs and outputs stay float32, so that whoever feeds the float32 file can feed
    this one: numpy has no bfloat16, and a metric should not depend on the precision. Large weights
    are rounded when the file is written. Raises as `convert_onnx`, with `source` in the messages.
    """
    _refuse_unmatched(model, source, kept.globs)
    half = _HALVES[precision]
    plan = plan_casts(model, half, kept.globs, kept.too_large)
    _refuse_layers_without(plan, precision, source)
    casting = _Casting(model=model, half=half, plan=plan, names=taken_names(model))
    casting.rewrite()
    for node in plan.beyond:
        node.metadata_props[FLOAT_ON_PURPOSE] = "true"
    return PrecisionChange(
        notes=tuple(_notes(plan)), too_large=casting.too_large, changed=bool(casting.is_half)
    )


def _refuse_unmatched(model: ir.Model, source: str, globs: tuple[str, ...]) -> None:
    names = [node.name or "" for node in model.graph.all_nodes()]
    for glob in globs:
        if not fnmatch.filter(names, glob):
            raise BadInputError(
                f"--keep-float32 {glob!r} matches no node of {source}",
                hint="globs are matched with the names of the nodes, such as "
                + ", ".join(names[:3]),
            )


def _refuse_layers_without(plan: CastPlan, precision: Precision, source: str) -> None:
    layers = [node for node in plan.without if node.op_type in LAYERS]
    if layers:
        raise BadInputError(
            f"{source}: {plan.without[layers[0]]} has no {precision.value} "
            f"(node {layers[0].name}; {len(layers)} in all)",
            hint="use --precision float16, or write the file in opset 22 first "
            "(onnx.version_converter)",
        )


def _notes(plan: CastPlan) -> Iterator[str]:
    """What keeps float32 although the user did not ask for it, in words."""
    half = plan.half.name.lower()
    for op, times in Counter(plan.without.values()).items():
        yield f"{op} ({times}) has no {half} and stays float32"
    if plan.beyond:
        names = [node.name or node.op_type for node in plan.beyond]
        nodes = count(len(names), "node")
        yield f"{nodes} kept in float32, because values do not fit {half}: {listed(names)}"


@dataclass(slots=True, kw_only=True)
class _Casting:
    """A model while it is converted; its lifetime is one call of `narrow`."""

    model: ir.Model
    half: ir.DataType
    plan: CastPlan
    names: set[str]
    """All that are taken."""
    is_half: set[ir.Value] = field(default_factory=set)
    casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = field(default_factory=dict)
    too_large: dict[str, None] = field(default_factory=dict)

    def rewrite(self) -> None:
        """Round the constants, add the casts and declare the new types, in place."""
        # In x -> MatMul(x, W) -> Softmax -> y, where the plan makes the MatMul half precision:
        # W becomes float16, x gets a Cast to float16 in front of the MatMul, and the Softmax, which
        # keeps float32, reads a Cast of the product. Each tensor is cast once, whatever reads it.
        graphs = list(self.model.graphs())
        uses = list(self._float_uses())
        self._mark_outputs()
        wanted = self._wanted_constants(uses)
        for node, at, value in uses:
            half = self._reads_half(node, at)
            if value.is_initializer():
                self._give_constant((node, at), value, wanted[value])
            elif half != (value in self.is_half):
                node.replace_input_with(at, self._cast_of(value, half=half))
        for graph in graphs:  # outputs keep type and name
            for at, output in enumerate(graph.outputs):
                if output in self.is_half and self.plan.is_float32(output):
                    graph.outputs[at] = self._cast_output(graph, output)
        for value in self.is_half:
            if value.type is not None or not value.is_graph_input():
                value.type = ir.TensorType(self.half)

    def _reads_half(self, node: ir.Node, at: int) -> bool:
        return at in self.plan.inputs.get(node, ())

    def _float_uses(self) -> Iterator[tuple[ir.Node, int, ir.Value]]:
        """Each place where a node reads a tensor that was float32."""
        for node in self.model.graph.all_nodes():
            for at, value in enumerate(node.inputs):
                if value is not None and self.plan.is_float32(value):
                    yield node, at, value

    def _mark_outputs(self) -> None:
        for node, positions in self.plan.outputs.items():
            self.is_half.update(node.outputs[at] for at in positions)
        for node in self.model.graph.all_nodes():
            if node.op_type == "Cast" and node.domain == "" and self._is_read_in_half(node):
                node.attributes["to"] = ir.AttrInt64("to", int(self.half))
                self.is_half.add(node.outputs[0])

    def _is_read_in_half(self, cast_to_float: ir.Node) -> bool:
        """A tensor made float32 is read by nodes alone that cast it again at once."""
        value = cast_to_float.outputs[0]
        uses = value.uses()
        if not uses or value.is_graph_output() or cast_to_float in self.plan.asked:
            return False
        return self.plan.is_float32(value) and all(self._reads_half(*use) for use in uses)

    def _wanted_constants(
        self, uses: list[tuple[ir.Node, int, ir.Value]]
    ) -> dict[ir.Value, set[bool]]:
        """For each constant whether it is used in half precision, in float32, or in both."""
        wanted: dict[ir.Value, set[bool]] = {}
        for node, at, value in uses:
            if value.is_initializer():
                kinds = wanted.setdefault(value, set())
                kinds.add(self._reads_half(node, at))
                if value.is_graph_output():
                    kinds.add(False)
        return wanted

    def _give_constant(self, use: tuple[ir.Node, int], value: ir.Value, wanted: set[bool]) -> None:
        node, at = use
        # a limit above what half precision holds limits nothing
        saturate = node.op_type == "Clip" and at > 0
        if not self._reads_half(node, at):
            if node not in self.plan.asked and node.op_type not in _BOUNDED:
                self._limit(value)
        elif wanted != {True}:
            node.replace_input_with(at, self._narrow_copy(value, saturate=saturate))
        elif value not in self.is_half:
            self.is_half.add(value)
            value.const_value = self._narrowed(value, value.name, saturate=saturate)

    def _limit(self, value: ir.Value) -> None:
        """float32's lowest number masks scores; narrowed behind its float32 node it is -inf."""
        tensor = value.const_value
        if tensor is None or tensor.size > LARGEST_PASSED_OVER or value.is_graph_output():
            return
        values = tensor.numpy()
        masks = np.abs(values) == _FLOAT32_MAX
        if masks.any():
            limits = np.copysign(np.float32(_LARGEST[self.half]), values)
            limited = np.where(masks, limits, values).astype(np.float32)
            value.const_value = ir.Tensor(limited, name=value.name)

    def _narrow_copy(self, value: ir.Value, *, saturate: bool) -> ir.Value:
        """A second constant, for nodes that compute in half precision while others keep float32."""
        key = (value, self.half)
        if key not in self.casts:
            copy = self._new_value(value, self.half, f"{value.name}_{self.half.name.lower()}")
            copy.const_value = self._narrowed(value, copy.name, saturate=saturate)
            value.graph.register_initializer(copy)
            self.casts[key] = copy
            self.is_half.add(copy)
        return self.casts[key]

    def _narrowed(self, value: ir.Value, name: str, *, saturate: bool) -> ir.TensorProtocol:
        """A constant rounded to nearest even; read when the file is written where it is large."""
        tensor = value.const_value
        known = value.name

        def checked() -> Array:
            try:
                return _rounded(tensor, self.half, saturate=saturate)
            except OverflowError:
                self.too_large[known] = None
                return _rounded(tensor, self.half, saturate=True)

        if tensor.size <= LARGEST_PASSED_OVER:
            return ir.Tensor(checked(), dtype=self.half, name=name)
        return lazy(checked, self.half, tensor.shape, name)

    def _cast_of(self, value: ir.Value, *, half: bool) -> ir.Value:
        """The tensor in the other type, cast once in the graph that makes it."""
        dtype = self.half if half else FLOAT
        key = (value, dtype)
        if key in self.casts:
            return self.casts[key]
        output = self._new_value(value, dtype, f"{value.name}_{dtype.name.lower()}")
        node = self._cast(value, output)
        if value.graph is None:
            raise BadInputError(
                f"{value.name!r} is read, and no node, input or dense initializer makes it",
                hint="store it as a dense tensor if it is a sparse initializer; "
                "onnx.checker.check_model says what else is wrong with the file",
            )
        insert_behind(value, [node])
        self.casts[key] = output
        if half:
            self.is_half.add(output)
        return output

    def _cast_output(self, graph: ir.Graph, value: ir.Value) -> ir.Value:
        """The float32 output of a graph that computes it in half precision, under its own name."""
        # y becomes y_float16, which other nodes read, and Cast(y_float16) is y; an input that is an
        # output too keeps its name, and Cast(x) is x_out
        name = value.name or "output"
        if value.is_graph_input():
            name = f"{name}_out"
        else:
            value.name = new_name(self.names, f"{name}_{self.half.name.lower()}")
            known = self.casts.get((value, FLOAT))
            if known is not None:
                known.name = name
                return known
        output = ir.Value(name=name, shape=value.shape, type=ir.TensorType(FLOAT))
        graph.append(self._cast(value, output))
        return output

    def _new_value(self, like: ir.Value, dtype: ir.DataType, wish: str) -> ir.Value:
        name = new_name(self.names, wish)
        return ir.Value(name=name, shape=like.shape, type=ir.TensorType(dtype))

    def _cast(self, value: ir.Value, output: ir.Value) -> ir.Node:
        to = {"to": int(output.dtype)}
        name = new_name(self.names, f"cast_{output.name}")
        return ir.node("Cast", [value], to, outputs=[output], name=name)


def _rounded(tensor: ir.TensorProtocol, half: ir.DataType, *, saturate: bool = False) -> Array:
    """The values in half precision; raises OverflowError for one that it has no number near to."""
    # in float16, 70000 raises (65504 with `saturate`), and float32's own lowest number, which masks
    # attention scores, becomes -65504, not -inf: -inf - -inf is NaN in a row that is masked whole
    values: Array = tensor.numpy()
    limit = _LARGEST[half]
    rounded = cast(values, half.numpy())
    if values.size == 1 and values.any() and not rounded.any() and not saturate:
        raise OverflowError  # the 1e-10 of log(x + 1e-10)
    if values.size and max(values.max(), -values.min()) <= limit:
        return rounded
    over = np.isinf(rounded.astype(np.float32)) & np.isfinite(values)
    if over.any():
        beyond = values[over]
        if not saturate and (np.abs(beyond) < _FLOAT32_MAX).any():
            raise OverflowError
        rounded[over] = np.copysign(limit, beyond).astype(rounded.dtype)
    return rounded
