"""ONNX models as onnx_ir holds them: read in one graph, named, their arrays converted, written."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import (
    InlinePass,
    LiftConstantsToInitializersPass,
    RemoveInitializersFromInputsPass,
)

from twofour.errors import BadInputError, first_line
from twofour.graph.files import (
    PROTOBUF_LIMIT_BYTES,
    SEPARATE_INITIALIZERS,
    Array,
    check_inline,
    external_data,
    external_tensors,
    leave_out,
    point_at_itself,
)
from twofour.graph.opened import OpenedModel, write_whole
from twofour.graph.scope import scopes
from twofour.packages import installed_version
from twofour.store import sync, writing

if TYPE_CHECKING:
    import torch

MOST_INSIDE_BYTES = PROTOBUF_LIMIT_BYTES - (1 << 26)
"""Largest file with its weights inside; readers that add to the model have some room."""
_LARGE = 1 << 16
"""Elements from which on a conversion takes longer than to find out whether torch is there."""


def load_float32(opened: OpenedModel) -> ir.Model:
    """The model without functions, every node with a name, its values mapped from their files.

    TensorRT takes functions apart too. Raises BadInputError for what onnx_ir cannot keep.
    """
    source = opened.path
    proto = opened.copy()
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
    name = wish
    number = 1
    while name in taken:
        number += 1
        name = f"{wish}_{number}"
    taken.add(name)
    return name


def new_constant(graph: ir.Graph, taken: set[str], wish: str, values: Array) -> ir.Value:
    """A new constant, under that name where it is free."""
    tensor = ir.tensor(values, name=new_name(taken, wish))
    constant = ir.Value(name=tensor.name, const_value=tensor)
    graph.register_initializer(constant)
    return constant


def insert_behind(value: ir.Value, nodes: Sequence[ir.Node]) -> None:
    """Put nodes after the one that makes a tensor; first in its graph where none does."""
    maker = value.producer()
    if maker is None:
        value.graph.insert_before(value.graph[0], nodes)
    else:
        maker.graph.insert_after(maker, nodes)


def lazy(
    made: Callable[[], Array], dtype: ir.DataType, shape: ir.Shape, name: str | None
) -> ir.LazyTensor:
    """A tensor whose values are made each time that they are asked for, and not kept."""

    def tensor() -> ir.Tensor:
        return ir.Tensor(made(), dtype=dtype, name=name)

    return ir.LazyTensor(tensor, dtype=dtype, shape=shape, name=name)


def cast(values: Array, dtype: np.dtype[Any]) -> Array:
    """The values in another type of floats, rounded to nearest even.

    torch is several times as fast as numpy at this and at transposing, with the same bits.
    """
    kinds = {values.dtype.name, dtype.name}
    is_large = values.size >= _LARGE and kinds <= {"float32", "float16", "bfloat16"}
    if not is_large or not _has_torch():
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    import torch

    made = _tensor(values).to(getattr(torch, dtype.name))
    if dtype.itemsize == 2:  # numpy has no bfloat16 of its own
        return made.view(torch.int16).numpy().view(dtype)
    return made.numpy()


def transposed(values: Array, order: tuple[int, ...]) -> Array:
    """The values with their axes in another order, one after the other in memory."""
    if not _has_torch():
        return np.ascontiguousarray(values.transpose(order))
    # torch has not every type of ONNX, but integers of their sizes
    bits = _tensor(values.view(np.dtype(f"i{values.itemsize}")))
    return bits.permute(order).contiguous().numpy().view(values.dtype)


def _has_torch() -> bool:
    return installed_version("torch") is not None


def _tensor(values: Array) -> torch.Tensor:
    """A tensor of the same memory, which is only read: mapped files cannot be written."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if values.dtype.name == "bfloat16":
            return torch.from_numpy(np.asarray(values.view(np.int16))).view(torch.bfloat16)
        return torch.from_numpy(np.asarray(values))


def save(model: ir.Model, target: Path, source: Path | None = None) -> None:
    """Write and check `target`, which appears last.

    Weights lie inside where protobuf can hold them, else in `<target name>.data`. Raises
    BadInputError for a full disk, and for an invalid model, unless its `source` was invalid too.
    """
    data_name = f"{target.name}.data"
    hidden = f".{target.name}."
    with (
        writing(target),
        tempfile.TemporaryDirectory(dir=target.parent, prefix=hidden, suffix=".part") as folder,
    ):
        written = Path(folder, target.name)
        data = Path(folder, data_name)
        ir.save(model, written, external_data=data_name)
        data.touch()  # tensors of a few bytes stay in the model
        invalid = _what_is_invalid(written)
        if invalid is not None and (source is None or _what_is_invalid(source) is None):
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


def _what_is_invalid(path: Path) -> str | None:
    """What onnx.checker finds wrong with a file, types of all tensors included, in one line."""
    try:
        onnx.checker.check_model(path, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return first_line(error)
    return None
