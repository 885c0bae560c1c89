"""A torch module and example inputs to an ONNX program in memory, quietly."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import OutputFixPass
from torch import nn

from twofour.errors import BadInputError
from twofour.export import opset17
from twofour.export.example_inputs import Call, converted, forward_error
from twofour.export.precision import TORCH_DTYPES
from twofour.export.quiet import quiet
from twofour.export.sizes import (
    BATCH,
    checked_axes,
    dynamic_shapes,
    line_in,
    name_dimensions,
    name_outputs,
    suggested_sizes,
    tensor_names,
    why_frozen,
    with_batch,
    without_ones,
)
from twofour.graph.opened import range_metadata
from twofour.records.options import DynamicAxis, ExportOptions, Precision

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
    axes = checked_axes(given, options.dynamic)
    if options.dynamic_batch:
        axes = with_batch(given, axes)
    call = without_ones(given, axes)
    with in_eval_mode(module), quiet():
        try:
            model = _export(module, call, options, axes)
        except Exception as error:
            raise _explained(module, (given, call), error, options) from error
    if options.opset == opset17.OPSET:
        opset17.to_opset_17(model)
    _check_opset(model, options)
    lost = name_dimensions(model, tensor_names(call), axes)
    if lost:
        _refuse_frozen(module, call, axes, lost)
    model.metadata_props.update(range_metadata(options.ranges))
    return model


def _export(
    module: nn.Module, call: Call, options: ExportOptions, axes: Sequence[DynamicAxis]
) -> ir.Model:
    largest = {size.name: size.max for size in options.ranges if size.max is not None}
    program = torch.onnx.export(
        module,
        call.args,
        kwargs=call.kwargs,
        dynamic_shapes=dynamic_shapes(call, axes, largest) if axes else None,
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
    if options.output_names is None and program.exported_program is not None:
        name_outputs(program.model, program.exported_program.call_spec.out_spec, module)
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


def _refuse_frozen(
    module: nn.Module, call: Call, axes: Sequence[DynamicAxis], lost: Mapping[str, str]
) -> None:
    """Torch makes a size constant without a word where the forward compares it to a number."""
    if BATCH not in lost:
        with in_eval_mode(module):
            raise why_frozen(module, call, axes, lost)
    first = lost[BATCH]
    raise _static_batch_only(module, f"the forward depends on a batch of {first}")


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
    lost = suggested_sizes(str(error), options.dynamic)
    if lost and doubled is None:
        axes = checked_axes(calls[1], options.dynamic)
        return why_frozen(module, calls[1], axes, lost)
    if options.dynamic_batch and (doubled or _SPECIALISED.search(str(error))):
        return _static_batch_only(module, _first_line(cause))
    line = line_in(str(error)) or line_in(str(cause))
    place = f" ({line})" if line else ""
    return BadInputError(
        f"torch cannot export {name} to ONNX: {type(cause).__name__}: {_first_line(cause)}{place}",
        hint="rewrite what torch.export cannot trace, try --static-batch or another --precision, "
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
