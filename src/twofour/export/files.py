"""ONNX files as onnx_ir holds them: read in one graph, written and checked."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import (
    InlinePass,
    LiftConstantsToInitializersPass,
    RemoveInitializersFromInputsPass,
)

from twofour.errors import BadInputError, first_line
from twofour.graph.files import SEPARATE_INITIALIZERS, check_inline
from twofour.graph.opened import OpenedModel
from twofour.graph.scope import scopes
from twofour.store import sync, write_error


def load_float32(opened: OpenedModel) -> ir.Model:
    """The model without functions, every node with a name, external data mapped.

    TensorRT takes functions apart too. Raises BadInputError for what onnx_ir cannot keep.
    """
    source, proto = opened.path, opened.whole()
    sparse = next((t for s in scopes(proto, source) for t in s.graph.sparse_initializer), None)
    if sparse is not None or proto.training_info:
        what = "training information" if sparse is None else "sparse initializers"
        raise BadInputError(
            f"{source} has {what}, which a change of precision would lose",
            hint="write them as dense tensors (onnxruntime or onnx-simplifier do), or leave "
            "--precision out",
        )
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


def save(model: ir.Model, target: Path, on_invalid: Callable[[Path, str], None]) -> None:
    """Write and check `<target name>.data` and `target`; the model appears last.

    `on_invalid` is given the target and what onnx.checker says of an invalid model, and raises.
    Raises BadInputError when the file system refuses.
    """
    data_name = f"{target.name}.data"
    try:
        with tempfile.TemporaryDirectory(
            dir=target.parent, prefix=f".{target.name}.", suffix=".part"
        ) as folder:
            written = Path(folder, target.name)
            ir.save(model, written, external_data=data_name)
            data = Path(folder, data_name)
            data.touch()  # tensors of a few bytes stay in the model; the pair is there all the same
            invalid = what_is_invalid(written)
            if invalid is not None:
                on_invalid(target, invalid)
            for part in (data, written):
                sync(part)
                part.replace(target.parent / part.name)
    except OSError as error:
        raise write_error(target, error) from error


def what_is_invalid(path: Path) -> str | None:
    """What onnx.checker finds wrong with a file, types of all tensors included, in one line."""
    try:
        onnx.checker.check_model(path, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return str(error).strip().splitlines()[0]
    return None
