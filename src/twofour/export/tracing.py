"""A torch module traced, once and without its values: a graph whose weights are names.

Initializers bear the names of the module's state dict. Parameters and buffers are fake tensors
while torch traces, floats all in float32, so that a graph takes no memory whatever the size of the
model, and no copy of a half precision module is made.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import onnx_ir as ir
import torch
from onnx_ir.passes.common import OutputFixPass, RemoveUnusedNodesPass
from onnxscript.optimizer import fold_constants
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.utils import stateless

from twofour.errors import BadInputError
from twofour.export.calls import (
    BoundCall,
    failing_layer,
    forward_error,
    in_eval_mode,
    name_outputs,
    tensor_names,
    with_tensors,
)
from twofour.export.ir_models import new_name
from twofour.export.layer_names import AGAIN, NODE_NAME, layer_map, module_scopes
from twofour.export.model_code import silenced, user_line
from twofour.export.sizes import (
    BATCH,
    Axes,
    batch_condition,
    checked_axes,
    dynamic_shapes,
    frozen_size_error,
    name_dimensions,
    suggested_sizes,
    with_batch,
    without_ones,
)
from twofour.graph.files import numpy_dtype
from twofour.graph.opened import range_metadata
from twofour.graph.stored import Store, StoredTensor
from twofour.inputs.fits import float32_array
from twofour.records import frozen
from twofour.records.export import LayerMap
from twofour.records.options import ExportOptions, Precision
from twofour.store import writing

OLDEST_OPSET = 17
"""What TensorRT 8.6 reads; a graph is traced in a later one and rewritten."""
TRACED_OPSET = 18
"""The oldest that torch.onnx.export has implementations of (torch 2.13)."""
_BFLOAT16_OPSET = 22
"""The first opset whose Conv takes bfloat16."""
_SPECIALISED = re.compile(
    r"specializ|constraints? violated|marked .{1,40} as dynamic", re.IGNORECASE
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
_CONTEXT_LINE = re.compile(r"^(from user code|failed to|the following|summary|$)", re.IGNORECASE)


@frozen
class TracedModule:
    """A module's graph as torch traced it, and the layers that its products are."""

    model: ir.Model
    """In float32, not optimised; constants of the code have values, weights have none."""
    layers: LayerMap

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""
        return tuple(value.name for value in self.model.graph.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in order."""
        return tuple(value.name for value in self.model.graph.outputs)


def trace(module: nn.Module, given: BoundCall, options: ExportOptions) -> TracedModule:
    """The graph of a module, which may be without values and stays as it is.

    Inputs and outputs are float32 in every precision; outputs are named after the keys of the dict
    that the forward returns, where it does. Raises BadInputError when the forward fails on the
    example inputs, and where torch cannot export the module.
    """
    axes = checked_axes(given, options.dynamic)
    if options.dynamic_batch:
        axes = with_batch(given, axes)
    call = without_ones(given, axes)
    traced = replace(options, precision=Precision.FLOAT32, opset=traced_opset(options))
    with in_eval_mode(module), silenced():
        try:
            model = _export(module, call, traced, axes)
        except Exception as error:
            raise _explained(module, given, error, options) from error
    # torch makes a size constant without a word where the forward compares it to a number
    lost = name_dimensions(model, tensor_names(call), axes)
    if BATCH in lost:
        raise _static_batch_only(module, f"the forward depends on a batch of {lost[BATCH]}")
    if lost:
        raise frozen_size_error(module, axes, lost)
    model.metadata_props.update(range_metadata(options.ranges))
    return TracedModule(model=model, layers=layer_map(model, module))


@contextlib.contextmanager
def fake_values(module: nn.Module) -> Iterator[FakeTensorMode]:
    """Within it parameters and buffers are fake tensors on the CPU, floats in float32."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[str, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    # a module under two names comes once here: what is put in twice would not come out again
    for path, part in module.named_modules():
        own = (path, False, False)  # not those of its children, and all names of a tied one
        for name, tensor in chain(part.named_parameters(*own), part.named_buffers(*own)):
            if id(tensor) not in made:
                made[id(tensor)] = _fake(tensor, mode)
            fakes[name] = made[id(tensor)]
    with stateless._reparametrize_module(module, fakes):
        yield mode


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    dtype = tensor.dtype
    if tensor.is_floating_point():
        dtype = torch.float32
    with mode:
        fake = torch.empty(tensor.shape, dtype=dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=False)
    return fake


def fake_call(call: BoundCall, mode: FakeTensorMode) -> BoundCall:
    """The call with fake tensors of the same shapes and types."""
    return with_tensors(call, [mode.from_tensor(tensor) for tensor in call.tensors])


def _export(module: nn.Module, call: BoundCall, options: ExportOptions, axes: Axes) -> ir.Model:
    """The graph with what it needs to be a file of its own: values, names, an opset."""
    program = _traced_program(module, call, options, axes)
    assert program.exported_program is not None, "it was traced just now"
    condition = batch_condition(program.exported_program, tensor_names(call), axes)
    if condition is not None:
        raise _static_batch_only(module, f"the trace is right only where {condition}")
    model = program.model
    # torch stays with its oldest opset, with a warning only, where it knows no way to another
    if options.opset not in (None, model.opset_imports.get("")):
        raise BadInputError(
            f"torch cannot write this model in opset {options.opset}",
            hint="use an older one, or leave --opset out",
        )
    _take_real_values(model, module)
    # weights have no values, so they stay as they are; sequences of their pieces become Splits
    fold_constants(model)
    RemoveUnusedNodesPass()(model)
    _saturate_in_quantizers(model)
    _name_apart(model)
    OutputFixPass()(model)  # an input may not be an output as it is
    name_outputs(model, program.exported_program.call_spec.out_spec)
    return model


def _traced_program(
    module: nn.Module, call: BoundCall, options: ExportOptions, axes: Axes
) -> torch.onnx.ONNXProgram:
    largest = {size.name: size.max for size in options.ranges if size.max is not None}
    with _as_later_torch_traces(), fake_values(module) as mode:
        fake = fake_call(call, mode)
        program = torch.onnx.export(
            module,
            fake.args,
            kwargs=fake.kwargs,
            dynamic_shapes=dynamic_shapes(call, axes, largest) if axes else None,
            input_names=options.input_names,
            opset_version=options.opset,
            dynamo=True,
            optimize=False,
            verify=False,
            verbose=False,
        )
    assert program is not None, "torch.onnx.export gives no program only for dynamo=False"
    return program


@contextlib.contextmanager
def _as_later_torch_traces() -> Iterator[None]:
    """Within it torch 2.8 takes no third way to trace, which holds for the example alone."""
    if torch.__version__ >= "2.9":
        yield
        return
    from torch.onnx._internal.exporter import _capture_strategies

    ways = _capture_strategies.CAPTURE_STRATEGIES
    _capture_strategies.CAPTURE_STRATEGIES = ways[:2]
    try:
        yield
    finally:
        _capture_strategies.CAPTURE_STRATEGIES = ways


def _saturate_in_quantizers(model: ir.Model) -> None:
    """Remove each Clip that torch puts behind QuantizeLinear: TensorRT takes Q/DQ only in pairs."""
    for node in model.graph:
        if node.op_type != "Clip" or node.inputs[0] is None:
            continue
        maker = node.inputs[0].producer()
        if maker is not None and maker.op_type == "QuantizeLinear":
            node.outputs[0].replace_all_uses_with(node.inputs[0])
            model.graph.remove(node, safe=True)


def _name_apart(model: ir.Model) -> None:
    """Rename tensors that are called like a weight: torch keeps the two apart, a file cannot."""
    taken = {*model.graph.initializers, *(value.name for value in model.graph.inputs)}
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.name:
                value.name = new_name(taken, value.name)


def _take_real_values(model: ir.Model, module: nn.Module) -> None:
    """Buffers get their values; weights, which come from files, get none."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if not isinstance(getattr(tensor, "raw", None), FakeTensor):
            continue
        value.const_value = None
        buffer = buffers.get(name)
        if buffer is not None and not buffer.is_meta:
            value.const_value = ir.tensor(float32_array(buffer), name=name)


def traced_opset(options: ExportOptions) -> int | None:
    """The opset to trace in; raises BadInputError for one that cannot be written."""
    bfloat16 = options.precision is Precision.BFLOAT16
    if options.opset is None:
        return _BFLOAT16_OPSET if bfloat16 else None
    if bfloat16 and options.opset < _BFLOAT16_OPSET:
        raise BadInputError(
            f"opset {options.opset} has no bfloat16 convolution",
            hint=f"bfloat16 needs opset {_BFLOAT16_OPSET} or later, or choose float16",
        )
    if options.opset < OLDEST_OPSET:
        raise BadInputError(
            f"opset {options.opset} is older than {OLDEST_OPSET}, the oldest that is written",
            hint=f"use --opset {OLDEST_OPSET}, which TensorRT 8.6 reads, or a later one",
        )
    return max(options.opset, TRACED_OPSET)


def _static_batch_only(module: nn.Module, why: str) -> BadInputError:
    return BadInputError(
        f"{type(module).__name__} cannot be exported with a dynamic batch: {why}",
        hint="--static-batch exports it for the batch of the example inputs alone",
    )


def _explained(
    module: nn.Module, call: BoundCall, error: Exception, options: ExportOptions
) -> BadInputError:
    """The error for the user; `call` is the example call as it was given."""
    if isinstance(error, BadInputError):
        return error
    _raise_interrupt(error)
    failure = _forward_failure(module, call)
    if failure is not None:
        return forward_error(module, failure, call)
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lost = suggested_sizes(str(error), options.dynamic)
    if lost:
        return frozen_size_error(module, checked_axes(call, options.dynamic), lost)
    if options.dynamic_batch and _SPECIALISED.search(str(error)):
        return _static_batch_only(module, _first_line(cause))
    layer = failing_layer(module, error)
    part = type(module).__name__
    if layer:
        part = f"layer {layer} of {part}"
    why = f"{type(cause).__name__}: {_first_line(cause)}"
    line = _line_in(str(error)) or _line_in(str(cause))
    if line:
        why += f" ({line})"
    hint = f"{_way_out(why)}, or export it yourself and give the .onnx"
    return BadInputError(f"torch cannot export {part} to ONNX: {why}", hint=hint)


def _way_out(why: str) -> str:
    if "data-dependent" in why:  # the boxes that a detector keeps
        return "a size or a branch depends on values there: give the part before it"
    return "rewrite what torch.export cannot trace, try --static-batch"


def _raise_interrupt(error: BaseException) -> None:
    """Raise the Ctrl-C behind an error: while torch loads its exporter, it raises others then."""
    before: BaseException | None = error
    while before is not None:
        if isinstance(before, KeyboardInterrupt):
            raise before
        before = before.__cause__ or before.__context__


def _line_in(text: str) -> str | None:
    """The line of the user's code that a message of torch quotes."""
    return user_line([(match[1], int(match[2])) for match in _FRAME.finditer(text)])


def _forward_failure(module: nn.Module, call: BoundCall) -> Exception | None:
    """What the forward raises; in fake tensors where the module has no values in float32."""
    is_real = all(p.dtype == torch.float32 and not p.is_meta for p in module.parameters())
    try:
        if is_real:
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            torch.func.functional_call(module, buffers, call.args, dict(call.kwargs))
        else:
            with fake_values(module) as mode:
                fake = fake_call(call, mode)
                module(*fake.args, **fake.kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return None  # it needs values, and fake tensors have none
    except Exception as error:  # noqa: BLE001 - the user's forward can raise anything
        return error
    return None


def _first_line(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if not _CONTEXT_LINE.match(line)), "no message")


def write_graph(traced: TracedModule, store: Store, target: Path) -> None:
    """Write the graph with its weights where they are stored: in files beside it.

    A weight that is stored in another type than float32 is cast. Raises BadInputError for a weight
    that is not stored, and one of another shape.
    """
    model = traced.model
    _name_after_layers(traced)
    for name, value in list(model.graph.initializers.items()):
        if value.const_value is None or name in store:
            _place(model.graph, value, store.get(name))
    with writing(target):
        ir.save(model, target)


def _name_after_layers(traced: TracedModule) -> None:
    """Give products the names of their layers, so that pruning speaks of these.

    A layer that runs twice is "fc" and "fc#2"; a table is named after its module. Products of the
    model's own code keep the names that they have in the file.
    """
    layers = {row.node: row.layer for row in traced.layers.layers}
    used: Counter[str] = Counter()
    for node in traced.model.graph.all_nodes():
        layer = layers.get(node.name)
        if node.op_type == "Gather" and not layer:
            layer = "".join(module_scopes(node.metadata_props)[-1:])
        if layer:
            used[layer] += 1
            node.metadata_props[NODE_NAME] = node.name
            node.name = layer
            if used[layer] > 1:
                node.name += f"{AGAIN}{used[layer]}"


def _place(graph: ir.Graph, value: ir.Value, stored: StoredTensor | None) -> None:
    # "w", float32 in the graph and bfloat16 in the file: "w" of bfloat16 -> Cast -> "w/float"
    name = value.name
    shape = tuple(int(length) for length in value.shape or ())
    if stored is None or stored.shape != shape:
        there = "no" if stored is None else f"a {list(stored.shape)}"
        raise BadInputError(
            f"the model needs {name} of shape {list(shape)}, and its files have {there} tensor",
            hint="config.json and the weights must belong together",
        )
    tensor = _stored_tensor(name, stored)
    dtype = tensor.dtype
    if dtype == value.dtype:
        value.const_value = tensor
        return
    weight = ir.Value(name=name, shape=value.shape, type=ir.TensorType(dtype), const_value=tensor)
    del graph.initializers[name]
    value.name = f"{name}/{value.dtype.name.lower()}"
    made = ir.node("Cast", [weight], {"to": int(value.dtype)}, outputs=[value], name=value.name)
    graph.register_initializer(weight)
    graph.insert_before(graph[0], made)


def _stored_tensor(name: str, stored: StoredTensor) -> ir.ExternalTensor:
    """A tensor of these values, which are read when they are asked for."""
    return ir.ExternalTensor(
        stored.file.name,
        stored.offset,
        stored.size_bytes,
        ir.DataType.from_numpy(numpy_dtype(stored.dtype or "")),
        shape=ir.Shape(stored.shape),
        name=name,
        base_dir=stored.file.parent,
    )
