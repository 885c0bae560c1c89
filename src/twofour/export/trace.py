"""A torch module and example inputs to an ONNX program in memory, quietly."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import OutputFixPass
from torch import nn

from twofour.errors import BadInputError
from twofour.export import opset17
from twofour.export.example_inputs import (
    Call,
    batch_size,
    converted,
    dynamic_batch,
    forward_error,
    with_two_rows,
)
from twofour.export.io_names import name_batch, name_outputs
from twofour.export.precision import TORCH_DTYPES
from twofour.export.quiet import quiet
from twofour.records import ExportOptions, Precision

BFLOAT16_OPSET = 22
"""The first opset whose Conv takes bfloat16."""
_SPECIALISED = re.compile(
    r"specializ|constraints? violated|marked .{1,40} as dynamic", re.IGNORECASE
)
_CONTEXT_LINE = re.compile(r"^(from user code|failed to|the following|summary|$)", re.IGNORECASE)


@contextlib.contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; every training flag is put back after."""
    flags = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in flags:
            part.training = training


def trace(module: nn.Module, call: Call, options: ExportOptions) -> ir.Model:
    """The module, already in its precision, as an ONNX model that shares its weights' memory.

    Raises BadInputError when the forward fails, the batch cannot be dynamic, or torch cannot
    export the module; torch's own account is the `__cause__`.
    """
    given = converted(call, TORCH_DTYPES[options.precision])
    dynamic = options.dynamic_batch and batch_size(given) is not None
    call = with_two_rows(given) if dynamic else given
    with in_eval_mode(module), quiet():
        try:
            model = _export(module, call, options, dynamic_batch(call) if dynamic else None)
        except Exception as error:
            raise _explained(module, (given, call), error, options) from error
    if options.opset == opset17.OPSET:
        opset17.to_opset_17(model)
    _check_opset(model, options)
    if dynamic:
        _check_dynamic(module, model)
    return model


def _export(
    module: nn.Module, call: Call, options: ExportOptions, shapes: dict[str, Any] | None
) -> ir.Model:
    program = torch.onnx.export(
        module,
        call.args,
        kwargs=call.kwargs,
        dynamic_shapes=shapes,
        input_names=options.input_names,
        output_names=options.output_names,
        opset_version=_opset(options),
        dynamo=True,
        optimize=True,
        verify=False,
        verbose=False,
    )
    assert program is not None, "torch.onnx.export gives no program only for dynamo=False"
    OutputFixPass()(program.model)  # an input may not be an output as it is
    name_batch(program.model)
    if options.output_names is None and program.exported_program is not None:
        name_outputs(program.model, program.exported_program.call_spec.out_spec)
    return program.model


def _opset(options: ExportOptions) -> int | None:
    bfloat16 = options.precision is Precision.BFLOAT16
    if options.opset is None:
        return BFLOAT16_OPSET if bfloat16 else None
    newest = onnx.defs.onnx_opset_version()
    if options.opset > newest:
        raise BadInputError(
            f"opset {options.opset} is newer than the onnx package knows",
            hint=f"use --opset {newest} or older, or update onnx",
        )
    if bfloat16 and options.opset < BFLOAT16_OPSET:
        raise BadInputError(
            f"opset {options.opset} has no bfloat16 convolution",
            hint=f"bfloat16 needs opset {BFLOAT16_OPSET} or later, or choose float16",
        )
    if options.opset < opset17.OPSET:
        raise BadInputError(
            f"opset {options.opset} is older than {opset17.OPSET}, the oldest that is written",
            hint=f"use --opset {opset17.OPSET}, which TensorRT 8.6 reads, or a later one",
        )
    return max(options.opset, opset17.FROM)


def _check_opset(model: ir.Model, options: ExportOptions) -> None:
    """Torch stays with its oldest opset, with a warning only, where it knows no way to another."""
    written = model.opset_imports.get("")
    if options.opset not in (None, written):
        raise BadInputError(
            f"torch cannot write this model in opset {options.opset}",
            hint="use an older one, or leave --opset out",
        )


def _check_dynamic(module: nn.Module, model: ir.Model) -> None:
    """Torch makes the batch static without a word where the forward compares it to a number."""
    shapes = [value.shape for value in model.graph.inputs if value.shape is not None]
    if shapes and all(isinstance(length, int) for shape in shapes for length in shape[:1]):
        raise _static_batch_only(module, f"the forward depends on a batch of {shapes[0][0]}")


def _static_batch_only(module: nn.Module, why: str) -> BadInputError:
    return BadInputError(
        f"{type(module).__name__} cannot be exported with a dynamic batch: {why}",
        hint="the forward works for one batch size only; export it with --static-batch",
    )


def _explained(
    module: nn.Module, calls: tuple[Call, Call], error: Exception, options: ExportOptions
) -> BadInputError:
    """What to tell the user; `calls` are the example call as given and as it was exported."""
    if isinstance(error, BadInputError):
        return error
    failure = _forward_failure(module, calls[0])
    if failure is not None:
        return forward_error(module, failure, options.precision)
    doubled = _forward_failure(module, calls[1])
    name, cause = type(module).__name__, doubled or _root_cause(error)
    if options.dynamic_batch and (doubled or _SPECIALISED.search(str(error))):
        return _static_batch_only(module, _first_line(cause))
    return BadInputError(
        f"torch cannot export {name} to ONNX: {type(cause).__name__}: {_first_line(cause)}",
        hint="rewrite what torch.export cannot trace, try --static-batch, "
        "or export it yourself and give the .onnx",
    )


def _forward_failure(module: nn.Module, call: Call) -> Exception | None:
    try:
        module(*call.args, **call.kwargs)
    except Exception as error:  # noqa: BLE001 - the user's forward can raise anything
        return error
    return None


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _first_line(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if not _CONTEXT_LINE.match(line)), "no message")
