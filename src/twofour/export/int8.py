"""Quantization to INT8 with Q/DQ nodes, and the ranges of activations."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from twofour.errors import BadInputError, BuildFailedError, first_line
from twofour.export.float32 import LAYERS, load_float32
from twofour.export.model_code import quiet
from twofour.graph.files import (
    Array,
    external_tensors,
    load_external,
    size_bytes,
)
from twofour.graph.half import HALF, widen
from twofour.graph.opened import OpenedModel, open_onnx
from twofour.store import atomic_file

FLOAT16_MAX = float(np.finfo(np.float16).max)
_MASKED = 0.99 * float(np.finfo(np.float32).max)
"""From here on it is float32's own limit: a mask, which is float16's limit in the new file."""
_PREFIX = "largest value of "
_MOST_NAMED = 6
_FLOATS = frozenset({"float32", "float16", "bfloat16"})
_PROTOBUF_LIMIT_BYTES = 2**31 - 1

Examples = Mapping[str, Array]


def write_with_ranges(opened: OpenedModel, target: Path, names: Sequence[str]) -> None:
    """Write the model with one more output per tensor of its main graph: its largest magnitude."""
    model = load_float32(opened)
    graph = model.graph
    made = {value.name: value for node in graph for value in node.outputs}
    made.update((value.name, value) for value in graph.inputs)
    for name in (name for name in names if name in made):  # else it stands in a function
        magnitude = ir.node("Abs", [made[name]], name=f"abs {name}")
        largest = ir.node(
            "ReduceMax",
            [magnitude.outputs[0]],
            attributes={"keepdims": 0},
            outputs=[ir.Value(name=_PREFIX + name, type=ir.TensorType(ir.DataType.FLOAT))],
            name=f"max {name}",
        )
        largest.outputs[0].shape = ir.Shape([])
        graph.extend([magnitude, largest])
        graph.outputs.append(largest.outputs[0])
    ir.save(model, target, external_data=f"{target.name}.data")


def split_ranges(outputs: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, float]]:
    """The model's own outputs, and the largest magnitude of each tensor that was asked for."""
    own = {name: array for name, array in outputs.items() if not name.startswith(_PREFIX)}
    ranges = {
        name.removeprefix(_PREFIX): float(array)
        for name, array in outputs.items()
        if name.startswith(_PREFIX)
    }
    return own, ranges


def refuse_overflow(model: OpenedModel, ranges: Mapping[str, float]) -> None:
    """Raise BadInputError where a finite value of float32 is beyond float16, naming the nodes."""
    over = [name for name, value in ranges.items() if FLOAT16_MAX < value < _MASKED]
    if not over:
        return
    first = over[0]
    users = (node.name for node in model.nodes if {*node.outputs, *node.inputs} & {*over})
    named = list(dict.fromkeys(users))
    keep = " ".join(f"--keep-float32 {name!r}" for name in named[:_MOST_NAMED])
    more = f" (and {len(named) - _MOST_NAMED} more)" if len(named) > _MOST_NAMED else ""
    raise BadInputError(
        f"{model.path}: tensor {first!r} reaches {ranges[first]:g} on the example inputs, and "
        f"float16 ends at {FLOAT16_MAX:g}"
        + (f"; so do {len(over) - 1} others" if len(over) > 1 else ""),
        hint=f"use --precision bfloat16, or leave float32 what makes and uses it: {keep}{more}",
    )


class Activations(str, Enum):
    """Type of the quantized activations; weights are symmetric int8 per channel with both."""

    INT8 = "int8"
    """Symmetric, zero point 0: the only one that TensorRT takes."""
    UINT8 = "uint8"
    """Asymmetric: the one that ONNX Runtime's x86 kernels are fast for."""


def quantize_int8(
    source: Path,
    target: Path,
    examples: Examples,
    *,
    activations: Activations = Activations.INT8,
    optimized: bool = True,
) -> None:
    """Quantize the weights of an ONNX file and write it, whole or not at all, to `target`.

    `optimized`: after ONNX Runtime has simplified the graph, where it does not crash at that.
    Half precision is widened to float32 first, so that activations are int8 or float32 in the file.

    Activation ranges are the smallest and largest values over the rows of `examples` (by input
    name, first axis the rows). Weights that are zero stay zero, so 2:4 holds after as before;
    biases stay float32. Raises BadInputError for weights of another type, more than 2 GiB, and
    examples that do not fit the inputs; BuildFailedError where ONNX Runtime fails.
    """
    opened = open_onnx(source)
    _refuse_other_types(opened)
    _refuse_too_large(opened)
    model = opened.whole()
    load_external(model, source)
    widen(model)
    rows = calibration_rows(model, examples)
    with atomic_file(target) as temporary, _failures_named(source), _silent():
        _quantize(model, temporary, rows, activations, optimized=optimized)


def calibration_rows(model: onnx.ModelProto, examples: Examples) -> list[dict[str, Any]]:
    """The examples cut along their first axes into what the model takes at a time.

    That is one row where the model's first axis is dynamic, else as many as it has; inputs that do
    not share their number of rows are taken whole. Raises BadInputError for other names and types,
    and for fewer rows than the model takes.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    if {value.name for value in inputs} != set(examples):
        raise BadInputError(
            f"the model takes the inputs {sorted(value.name for value in inputs)}, "
            f"found {sorted(examples)}",
            hint="example inputs must have the names of the model's inputs",
        )
    whole = {value.name: _cast(examples[value.name], value) for value in inputs}
    lengths = {array.shape[0] if array.ndim else None for array in whole.values()}
    if len(lengths) != 1 or None in lengths:
        return [whole]
    (length,) = lengths
    assert length is not None
    step = max((_fixed_rows(value) for value in inputs), default=1)
    if length < step:
        raise BadInputError(f"the model takes {step} rows at a time, the examples have {length}")
    return [
        {name: array[start : start + step] for name, array in whole.items()}
        for start in range(0, length - step + 1, step)
    ]


def _quantize(
    model: onnx.ModelProto,
    target: Path,
    rows: list[dict[str, Any]],
    activations: Activations,
    *,
    optimized: bool,
) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # ONNX Runtime carries no types
        def __init__(self) -> None:
            self._rows = iter(rows)

        def get_next(self) -> dict[str, Any] | None:
            return next(self._rows, None)

    symmetric = activations is Activations.INT8
    with tempfile.TemporaryDirectory() as folder:
        whole, prepared = Path(folder, "whole.onnx"), Path(folder, "prepared.onnx")
        onnx.save(model, whole)  # its preparation looks for external data in a folder of its own
        # ONNX's own shape inference is enough for types; the symbolic one fails on some models
        quant_pre_process(
            str(whole), str(prepared), skip_optimization=not optimized, skip_symbolic_shape=True
        )
        quantize_static(
            str(prepared),
            str(target),
            Reader(),
            # with the additions and normalizations of a transformer in INT8 too, its outputs stray
            # twice as far (all-MiniLM-L6-v2: cosine 0.38 against 0.72), and nothing becomes faster
            op_types_to_quantize=sorted(LAYERS),
            per_channel=True,
            activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options={
                "ActivationSymmetric": symmetric,
                "WeightSymmetric": True,
                "QuantizeBias": False,  # TensorRT takes float biases only
            },
        )


def _refuse_other_types(model: OpenedModel) -> None:
    weights = [w for w in model.weights().weights if w.weight is not None]
    if not weights:
        raise BadInputError(f"{model.path} has no weights to quantize", hint="choose another mode")
    for weight in weights:
        if not {weight.dtype, weight.math_dtype} <= _FLOATS:
            raise BadInputError(
                f"{model.path}: INT8 is made from floating-point weights, {weight.weight} of layer "
                f"{weight.layer} is {weight.dtype} and computes in {weight.math_dtype}",
                hint="leave this variant out",
            )


def _refuse_too_large(model: OpenedModel) -> None:
    total = model.path.stat().st_size + sum(map(size_bytes, external_tensors(model.proto)))
    if any(tensor.data_type in HALF for tensor in model.proto.graph.initializer):
        total *= 2
    if total > _PROTOBUF_LIMIT_BYTES:
        raise BadInputError(
            f"{model.path} has {total / 2**30:.1f} GiB with its weights in float32: "
            "quantizing ends at 2 GiB",
            hint="leave this variant out",
        )


def _cast(array: Array, value: onnx.ValueInfoProto) -> Array:
    wanted = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    found = np.asarray(array)
    if (found.dtype.kind == "f") != (wanted.kind == "f"):
        raise BadInputError(
            f"input {value.name!r} has the type {wanted} in the model, found {found.dtype}"
        )
    return np.ascontiguousarray(found.astype(wanted, copy=False))


def _fixed_rows(value: onnx.ValueInfoProto) -> int:
    dims = value.type.tensor_type.shape.dim
    return max(int(dims[0].dim_value), 1) if dims else 1  # 0: a name, or nothing


@contextlib.contextmanager
def _failures_named(source: Path) -> Iterator[None]:
    try:
        yield
    except (BadInputError, OSError):
        raise
    except ImportError as error:
        raise BuildFailedError(f"onnxruntime cannot quantize here: {error}") from error
    except Exception as error:  # ONNX Runtime's own kinds, and asserts and KeyErrors of its script
        raise BuildFailedError(
            f"ONNX Runtime cannot quantize {source}: {first_line(error)}"
        ) from error


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Hold back what the quantizer logs: to the root logger, which it would give a handler."""
    root, before = logging.getLogger(), logging.root.manager.disable
    handler = logging.NullHandler()
    root.addHandler(handler)
    logging.disable(logging.CRITICAL)
    try:
        with quiet():
            yield
    finally:
        logging.disable(before)
        root.removeHandler(handler)
