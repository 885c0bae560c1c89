"""A float32 ONNX file converted to float16 or bfloat16."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from twofour.errors import BadInputError
from twofour.export.arrays import cast
from twofour.export.float32 import FLOAT, LAYERS, CastPlan, plan_casts
from twofour.export.ir_models import load_float32, new_name, save, taken_names
from twofour.graph.layers import FLOAT_ON_PURPOSE
from twofour.graph.opened import OpenedModel
from twofour.records.options import Precision
from twofour.records.weights import LARGEST_PASSED_OVER
from twofour.words import count, listed

_HALVES = {Precision.FLOAT16: ir.DataType.FLOAT16, Precision.BFLOAT16: ir.DataType.BFLOAT16}
_LARGEST = {ir.DataType.FLOAT16: 65504.0, ir.DataType.BFLOAT16: float.fromhex("0x1.fep+127")}
_BOUNDED = frozenset({"Clip", "Min", "Max"})
"""Where float32's limit means no limit."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What was converted, and what kept float32."""

    notes: tuple[str, ...]
    too_large: dict[str, None] = field(default_factory=dict)
    """Names of constants that did not fit; large ones are read when the file is written."""
    changed: bool = False
    """Something was float32 that is half precision now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What stays float32 in a model that is converted."""

    globs: tuple[str, ...] = ()
    """Over names of nodes (fnmatch, case-sensitive): what the user asked for."""
    too_large: tuple[str, ...] = ()
    """Tensors whose values do not fit; so what makes and reads them keeps float32."""


NOTHING_KEPT = Kept()


def until_all_fits(convert: Callable[[Kept], Conversion], kept: Kept) -> Conversion:
    """Write a file, again with more in float32 where constants turn out not to fit."""
    while True:
        done = convert(kept)
        if not done.too_large:
            return done
        kept = replace(kept, too_large=(*kept.too_large, *done.too_large))


def convert_onnx(
    opened: OpenedModel, target: Path, precision: Precision, kept: Kept = NOTHING_KEPT
) -> Conversion:
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

    def convert(kept: Kept) -> Conversion:
        model = load_float32(opened)
        done = narrow(model, precision, str(source), kept)
        save(model, target, source)
        return done

    return until_all_fits(convert, kept)


def narrow(
    model: ir.Model, precision: Precision, source: str, kept: Kept = NOTHING_KEPT
) -> Conversion:
    """Make a float32 model, whose constants are initializers, half precision in place.

    Inputs and outputs stay float32, so that whoever feeds the float32 file can feed this one: numpy
    has no bfloat16, and a metric should not depend on the precision. Large weights are rounded when
    the file is written. Raises as `convert_onnx`, with `source` in the messages.
    """
    names = [node.name or "" for node in model.graph.all_nodes()]
    unmatched = [glob for glob in kept.globs if not fnmatch.filter(names, glob)]
    if unmatched:
        raise BadInputError(
            f"--keep-float32 {unmatched[0]!r} matches no node of {source}",
            hint="globs are matched with the names of the nodes, such as " + ", ".join(names[:3]),
        )
    half = _HALVES[precision]
    planned = plan_casts(model, half, kept.globs, kept.too_large)
    missing = [node for node in planned.without if node.op_type in LAYERS]
    if missing:
        raise BadInputError(
            f"{source}: {planned.without[missing[0]]} has no {precision.value} "
            f"(node {missing[0].name}; {len(missing)} in all)",
            hint="use --precision float16, or write the file in opset 22 first "
            "(onnx.version_converter)",
        )
    casting = _Casting(model=model, half=half, plan=planned, names=taken_names(model))
    _rewrite(casting)
    word, absent = half.name.lower(), Counter(planned.without.values())
    notes = [f"{op} ({times}) has no {word} and stays float32" for op, times in absent.items()]
    if planned.beyond:
        for node in planned.beyond:
            node.metadata_props[FLOAT_ON_PURPOSE] = "true"
        names = [node.name or node.op_type for node in planned.beyond]
        stay = f"{count(len(names), 'node')} kept in float32, because values do not fit {word}"
        notes.append(f"{stay}: {listed(names)}")
    return Conversion(
        notes=tuple(notes), too_large=casting.too_large, changed=bool(casting.is_half)
    )


@dataclass(slots=True, kw_only=True)
class _Casting:
    """A model while it is converted; its lifetime is one call of `_rewrite`."""

    model: ir.Model
    half: ir.DataType
    plan: CastPlan
    is_half: set[ir.Value] = field(default_factory=set)
    casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = field(default_factory=dict)
    names: set[str]
    """All that are taken."""
    too_large: dict[str, None] = field(default_factory=dict)


def _rewrite(state: _Casting) -> None:
    """Round the constants, add the casts and declare the new types, in place."""
    # In x -> MatMul(x, W) -> Softmax -> y, where the plan makes the MatMul half precision:
    # W becomes float16, x gets a Cast to float16 in front of the MatMul, and the Softmax, which
    # keeps float32, reads a Cast of the product. Each tensor is cast once, whatever reads it.
    model, planned = state.model, state.plan
    graphs, half_type = list(model.graphs()), ir.TensorType(state.half)
    uses = [
        (node, index, value)
        for node in list(model.graph.all_nodes())
        for index, value in enumerate(node.inputs)
        if value is not None and state.plan.is_float32(value)
    ]
    _mark_outputs(state)
    wanted = _wanted_constants(state, uses)
    for node, index, value in uses:
        half = index in planned.inputs.get(node, ())
        if value.is_initializer():
            _give_constant(state, (node, index), half=half, kinds=wanted[value])
        elif half != (value in state.is_half):
            node.replace_input_with(index, _cast_of(state, value, half=half))
    for graph in graphs:  # outputs keep type and name
        for index, output in enumerate(graph.outputs):
            if output in state.is_half and planned.is_float32(output):
                graph.outputs[index] = _cast_output(state, graph, output)
    for value in state.is_half:
        value.type = None if value.type is None and value.is_graph_input() else half_type


def _mark_outputs(state: _Casting) -> None:
    for node, positions in state.plan.outputs.items():
        state.is_half.update(node.outputs[i] for i in positions)
    for node in state.model.graph.all_nodes():
        if node.op_type in ("Cast", "ConstantOfShape") and node.domain == "":
            _retype_source(state, node)


def _retype_source(state: _Casting, node: ir.Node) -> None:
    """A tensor made float32 that only half-precision nodes use is made half precision at once."""
    value = node.outputs[0]
    uses, planned = value.uses(), state.plan
    everywhere = bool(uses) and all(i in planned.inputs.get(n, ()) for n, i in uses)
    kept = value.is_graph_output() or not planned.is_float32(value) or node in planned.asked
    if kept or not everywhere:
        return
    if node.op_type == "Cast":
        node.attributes["to"] = ir.AttrInt64("to", int(state.half))
    else:
        given = node.attributes.get("value")
        tensor = ir.tensor(np.zeros(1, np.float32)) if given is None else given.as_tensor()
        try:
            node.attributes["value"] = ir.AttrTensor("value", _rounded(tensor, state.half))
        except OverflowError:
            return  # it stays float32, and is cast where it is used
    state.is_half.add(value)


def _wanted_constants(
    state: _Casting, uses: list[tuple[ir.Node, int, ir.Value]]
) -> dict[ir.Value, set[bool]]:
    """For each constant whether it is used in half precision, in float32, or in both."""
    wanted: dict[ir.Value, set[bool]] = {}
    for node, index, value in uses:
        if value.is_initializer():
            kinds = wanted.setdefault(value, {False} if value.is_graph_output() else set())
            kinds.add(index in state.plan.inputs.get(node, ()))
    return wanted


def _give_constant(
    state: _Casting, use: tuple[ir.Node, int], *, half: bool, kinds: set[bool]
) -> None:
    node, index = use
    value = node.inputs[index]
    assert value is not None, "uses have values"
    # a limit above what half precision holds limits nothing
    saturate = node.op_type == "Clip" and index > 0
    if not half:
        if node not in state.plan.asked and node.op_type not in _BOUNDED:
            _without_limit(state, value)
    elif kinds != {True}:
        node.replace_input_with(index, _narrow_copy(state, value, saturate))
    elif value not in state.is_half:
        state.is_half.add(value)
        value.const_value = _narrowed(state, value, value.name or "", saturate=saturate)


def _narrow_copy(state: _Casting, value: ir.Value, saturate: bool) -> ir.Value:
    """A second constant, for nodes that compute in half precision while others keep float32."""
    key = (value, state.half)
    if key not in state.casts:
        name = new_name(state.names, f"{value.name}_{state.half.name.lower()}")
        copy = ir.Value(name=name, shape=value.shape, type=ir.TensorType(state.half))
        copy.const_value = _narrowed(state, value, name, saturate=saturate)
        assert value.graph is not None, "an initializer belongs to a graph"
        value.graph.register_initializer(copy)
        state.casts[key] = copy
        state.is_half.add(copy)
    return state.casts[key]


def _narrowed(
    state: _Casting, value: ir.Value, name: str, *, saturate: bool = False
) -> ir.TensorProtocol:
    """A constant rounded to nearest even; read when the file is written where it is large."""
    tensor = value.const_value
    assert tensor is not None, "constants have values"
    known = value.name or ""

    def checked() -> ir.Tensor:
        try:
            return _rounded(tensor, state.half, saturate=saturate)
        except OverflowError:
            state.too_large[known] = None
            return _rounded(tensor, state.half, saturate=True)

    if tensor.size <= LARGEST_PASSED_OVER:
        return ir.Tensor(checked().numpy(), dtype=state.half, name=name)
    return ir.LazyTensor(checked, dtype=state.half, shape=tensor.shape, name=name)


def _rounded(tensor: ir.TensorProtocol, half: ir.DataType, *, saturate: bool = False) -> ir.Tensor:
    """The values in half precision; raises OverflowError for one that it has no number near to."""
    # in float16, 70000 raises (65504 with `saturate`), and float32's own lowest number, which masks
    # attention scores, becomes -65504, not -inf: -inf - -inf is NaN in a row that is masked whole
    values = tensor.numpy()
    limit = _LARGEST[half]
    narrow = cast(values, half.numpy())
    if values.size == 1 and values.any() and not narrow.any() and not saturate:
        raise OverflowError  # the 1e-10 of log(x + 1e-10)
    if values.size and max(values.max(), -values.min()) <= limit:
        return ir.Tensor(narrow, dtype=half)
    over = np.isinf(narrow.astype(np.float32)) & np.isfinite(values)
    if over.any():
        beyond = values[over]
        if not saturate and (np.abs(beyond) < _FLOAT32_MAX).any():
            raise OverflowError
        narrow[over] = np.copysign(limit, beyond).astype(narrow.dtype)
    return ir.Tensor(narrow, dtype=half)


def _without_limit(state: _Casting, value: ir.Value) -> None:
    """float32's lowest number masks scores; narrowed behind its float32 node it would be -inf."""
    tensor = value.const_value
    if tensor is None or tensor.size > LARGEST_PASSED_OVER or value.is_graph_output():
        return
    values = tensor.numpy()
    limits = np.abs(values) == _FLOAT32_MAX
    if limits.any():
        limit = np.float32(_LARGEST[state.half])
        changed = np.where(limits, np.copysign(limit, values), values).astype(np.float32)
        value.const_value = ir.Tensor(changed, name=value.name)


def _cast_of(state: _Casting, value: ir.Value, *, half: bool) -> ir.Value:
    """The tensor in the other type, cast once in the graph that makes it."""
    dtype = state.half if half else FLOAT
    key = (value, dtype)
    if key not in state.casts:
        cast = _cast(
            state, value, dtype, new_name(state.names, f"{value.name}_{dtype.name.lower()}")
        )
        maker = value.producer()
        graph = value.graph if maker is None else maker.graph
        if graph is None:
            raise BadInputError(
                f"{value.name!r} is read, and nothing in the graph makes it",
                hint="onnx.checker.check_model says what is wrong with the file",
            )
        if maker is None:
            graph.insert_before(graph[0], cast)
        else:
            graph.insert_after(maker, cast)
        state.casts[key] = cast.outputs[0]
        if half:
            state.is_half.add(cast.outputs[0])
    return state.casts[key]


def _cast(state: _Casting, value: ir.Value, dtype: ir.DataType, name: str) -> ir.Node:
    output = ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype))
    to, named = {"to": int(dtype)}, new_name(state.names, f"cast_{name}")
    return ir.node("Cast", [value], to, outputs=[output], name=named)


def _cast_output(state: _Casting, graph: ir.Graph, value: ir.Value) -> ir.Value:
    name = value.name or "output"
    made = state.casts.get((value, FLOAT))
    if not value.is_graph_input():
        value.name = new_name(state.names, f"{name}_{state.half.name.lower()}")
        if made is not None:
            made.name = name
            return made
    cast = _cast(state, value, FLOAT, name if not value.is_graph_input() else f"{name}_out")
    graph.append(cast)
    return cast.outputs[0]
