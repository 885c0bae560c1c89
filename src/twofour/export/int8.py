"""Quantization to INT8 with Q/DQ nodes, and the ranges of activations."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from twofour.errors import BadInputError, BuildFailedError, first_line
from twofour.export.float32 import LAYERS
from twofour.export.ir_models import load_float32
from twofour.export.model_code import silenced
from twofour.graph.files import Array, load_external
from twofour.graph.opened import OpenedModel, open_onnx, widen
from twofour.store import atomic_file

FLOAT16_MAX = float(np.finfo(np.float16).max)
_MASKED = 0.99 * float(np.finfo(np.float32).max)
"""From here on it is float32's own limit: a mask, which is float16's limit in the new file."""
_PREFIX = "largest value of "
_MOST_NAMED = 6
_FLOATS = frozenset({"float32", "float16", "bfloat16"})

Examples = Mapping[str, Array]


def write_with_ranges(opened: OpenedModel, target: Path, names: Sequence[str]) -> None:
    """Write the model with one more output per tensor of its main graph: its largest magnitude."""
    model = load_float32(opened)
    graph = model.graph
    made = {value.name: value for node in graph for value in node.outputs}
    made.update((value.name, value) for value in graph.inputs)
    for name in (name for name in names if name in made):  # others are inside functions
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
    own = dict(outputs)
    added = [name for name in own if name.startswith(_PREFIX)]
    ranges = {name.removeprefix(_PREFIX): float(own.pop(name)) for name in added}
    return own, ranges


def refuse_overflow(model: OpenedModel, ranges: Mapping[str, float]) -> None:
    """Raise BadInputError where a finite value of float32 is beyond float16, naming the nodes."""
    over = [name for name, value in ranges.items() if FLOAT16_MAX < value < _MASKED]
    if not over:
        return
    users = (node.name for node in model.nodes if {*node.outputs, *node.inputs} & {*over})
    named = list(dict.fromkeys(users))
    keep = " ".join(f"--keep-float32 {name!r}" for name in named[:_MOST_NAMED])
    more = f" (and {len(named) - _MOST_NAMED} more)" if len(named) > _MOST_NAMED else ""
    others = f"; so do {len(over) - 1} others" if len(over) > 1 else ""
    raise BadInputError(
        f"{model.path}: tensor {over[0]!r} reaches {ranges[over[0]]:g} on the example inputs, and "
        f"float16 ends at {FLOAT16_MAX:g}{others}",
        hint=f"use --precision bfloat16, or leave float32 what makes and uses it: {keep}{more}",
    )


def quantize_int8(
    source: Path, target: Path, examples: Examples, *, symmetric: bool = True
) -> None:
    """Quantize the weights of an ONNX file and write it, whole or not at all, to `target`.

    Weights are int8 per channel around zero, so that 2:4 holds after as before. Activations are
    int8 around zero too where `symmetric`, as TensorRT needs it, else uint8, which ONNX Runtime's
    x86 kernels are fast for; their ranges are the smallest and largest values over the rows of
    `examples` (by input name). Half precision is widened to float32 first; biases stay float32.
    Raises BadInputError for weights of another type and BuildFailedError where ONNX Runtime fails.
    """
    opened = open_onnx(source)
    types = {t for w in opened.weights().weights for t in (w.dtype, w.math_dtype) if w.weight}
    if not types or not types <= _FLOATS:
        found = ", ".join(sorted(types)) or "none"
        raise BadInputError(
            f"{source}: INT8 is made from floating-point weights, found {found}",
            hint="leave this variant out",
        )
    model = opened.whole()
    load_external(model, source)
    widen(model)
    # the quantizer warns, and logs to the root logger
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with atomic_file(target) as temporary, silenced():
            _quantize(model, temporary, calibration_rows(model, examples), symmetric=symmetric)
    except OSError:
        raise
    except Exception as error:  # ONNX Runtime's own kinds, and asserts and KeyErrors of its script
        raise BuildFailedError(
            f"ONNX Runtime cannot quantize {source}: {first_line(error)}"
        ) from error
    finally:
        logging.disable(before)


def calibration_rows(model: onnx.ModelProto, examples: Examples) -> list[dict[str, Array]]:
    """The examples cut into what the model takes at a time: one row where its first axis is free.

    Inputs that do not share their number of rows are taken whole.
    """
    inputs = {value.name: value.type.tensor_type for value in model.graph.input}
    arrays = {
        name: np.asarray(array, onnx.helper.tensor_dtype_to_np_dtype(inputs[name].elem_type))
        for name, array in examples.items()
    }
    lengths = {array.shape[0] if array.ndim else 0 for array in arrays.values()}
    fixed = [inputs[name].shape.dim[0].dim_value for name, array in arrays.items() if array.ndim]
    step = max(1, *fixed) if fixed else 1
    if len(lengths) != 1 or max(lengths) < step:
        return [arrays]
    starts = range(0, max(lengths) - step + 1, step)
    return [{name: a[start : start + step] for name, a in arrays.items()} for start in starts]


def _quantize(
    model: onnx.ModelProto, target: Path, rows: list[dict[str, Array]], *, symmetric: bool
) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # ONNX Runtime carries no types
        def __init__(self) -> None:
            self._rows = iter(rows)

        def get_next(self) -> dict[str, Array] | None:
            return next(self._rows, None)

    with tempfile.TemporaryDirectory() as folder:
        whole, prepared = Path(folder, "whole.onnx"), Path(folder, "prepared.onnx")
        onnx.save(model, whole)  # its preparation looks for external data in a folder of its own
        # ONNX's own shape inference is enough for types; the symbolic one fails on some models
        quant_pre_process(str(whole), str(prepared), skip_symbolic_shape=True)
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
