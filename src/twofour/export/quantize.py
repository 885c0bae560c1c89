"""Static INT8: QuantizeLinear/DequantizeLinear pairs around the layers that have weights."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from twofour.errors import BadInputError, BuildFailedError, first_line
from twofour.export.quiet import quiet
from twofour.export.widen import is_half, widen
from twofour.graph import find_weights, load_model
from twofour.graph_files import external_tensors, load_external
from twofour.graph_tensors import size_bytes
from twofour.store import atomic_file

Examples = Mapping[str, npt.NDArray[Any]]

_LAYERS = ["Conv", "ConvTranspose", "Gemm", "MatMul"]
"""Only these: with the additions and normalizations of a transformer in INT8 too, its outputs
stray twice as far (all-MiniLM-L6-v2: cosine 0.38 against 0.72), and nothing becomes faster."""
_FLOATS = frozenset({"float32", "float16", "bfloat16"})
_PROTOBUF_LIMIT_BYTES = 2**31 - 1


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
    model = load_model(source, weights=False)
    _refuse_other_types(model, source)
    _refuse_too_large(model, source)
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
            op_types_to_quantize=_LAYERS,
            per_channel=True,
            activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options={
                "ActivationSymmetric": symmetric,
                "WeightSymmetric": True,
                "QuantizeBias": False,  # TensorRT takes float biases only
            },
        )


def _refuse_other_types(model: onnx.ModelProto, source: Path) -> None:
    weights = [w for w in find_weights(model, path=source).weights if w.weight is not None]
    if not weights:
        raise BadInputError(f"{source} has no weights to quantize", hint="choose another mode")
    for weight in weights:
        if not {weight.dtype, weight.math_dtype} <= _FLOATS:
            raise BadInputError(
                f"{source}: INT8 is made from floating-point weights, {weight.weight} of layer "
                f"{weight.layer} is {weight.dtype} and computes in {weight.math_dtype}",
                hint="leave this variant out",
            )


def _refuse_too_large(model: onnx.ModelProto, source: Path) -> None:
    total = source.stat().st_size + sum(map(size_bytes, external_tensors(model)))
    total *= 2 if is_half(model) else 1
    if total > _PROTOBUF_LIMIT_BYTES:
        raise BadInputError(
            f"{source} has {total / 2**30:.1f} GiB with its weights in float32: "
            "quantizing ends at 2 GiB",
            hint="leave this variant out",
        )


def _cast(array: npt.NDArray[Any], value: onnx.ValueInfoProto) -> npt.NDArray[Any]:
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
