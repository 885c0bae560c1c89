"""One call of a module's forward: its arguments, what its tensors are called, what it returns."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from twofour.errors import BadInputError
from twofour.export.float32 import FLOAT16_MAX, MASKED
from twofour.export.ir_models import new_name, taken_names
from twofour.export.model_code import describe_error
from twofour.inputs.fits import Array, float32_array
from twofour.records import frozen

FakeQuantize = Any
"""Rounds in quantization-aware training: a module of torch.ao's, or of torchao's copy of it."""

EXAMPLES = "the example inputs"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@frozen
class BoundCall:
    """One call of a module's forward, in the order of its signature.

    torch.export keeps keyword arguments in the caller's order; binding them first makes the order
    of the ONNX inputs a property of the module.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_parameter: dict[str, Any]
    """The same values by the names of the signature, `*args` and `**kwargs` under their own."""
    keywords: str | None = None
    """Name of the parameter that takes `**kwargs`: the values in it have names of their own."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the call: one ONNX input each, in this order."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

    @property
    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The same by the names of their ONNX inputs."""
        return dict(zip(tensor_names(self), self.tensors, strict=True))


def bind(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundCall:
    """The arguments as one call, its floating-point tensors in float32.

    Raises BadInputError when the forward does not take them.
    """
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise forward_error(module, error) from error
    positional = bound.args
    named = bound.kwargs
    if not named and positional and isinstance(positional[-1], dict):
        # torch.onnx.export takes a dict in the last place for keyword arguments
        name = list(bound.arguments)[-1]
        named = {name: positional[-1]}
        positional = positional[:-1]
    parameters = bound.signature.parameters.values()
    keywords = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
    call = BoundCall(
        args=positional, kwargs=named, by_parameter=dict(bound.arguments), keywords=keywords
    )
    return with_tensors(call, [t.float() if t.is_floating_point() else t for t in call.tensors])


def with_tensors(call: BoundCall, tensors: Sequence[torch.Tensor]) -> BoundCall:
    """The call with these instead of its tensors, in order."""

    def filled(tree: Any) -> Any:  # noqa: ANN401 - a tree of the caller's own types
        new = iter(tensors)
        return pytree.tree_map_only(torch.Tensor, lambda _: next(new), tree)

    args, kwargs = filled((call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs, by_parameter=filled(call.by_parameter))


def input_arrays(call: BoundCall) -> tuple[Array, ...]:
    """The example inputs of the exported file, float32 in every precision, in its inputs' order."""
    return tuple(map(float32_array, call.tensors))


def copy_with(module: nn.Module, changed: Mapping[int, torch.Tensor]) -> nn.Module:
    """A copy that shares all tensors but those that `changed` has by id; deepcopy may raise."""
    tensors = {id(t): t for t in chain(module.parameters(), module.buffers())}
    return copy.deepcopy(module, {**tensors, **changed})


def float32_module(module: nn.Module) -> nn.Module:
    """The module where it is float32, else a float32 copy that shares what needs no conversion."""
    wide: dict[int, torch.Tensor] = {}
    for tensor in chain(module.parameters(), module.buffers()):
        if not tensor.is_floating_point() or tensor.dtype == torch.float32:
            continue
        values = tensor.detach().float()
        if isinstance(tensor, nn.Parameter):
            values = nn.Parameter(values, requires_grad=False)
        wide[id(tensor)] = values
    if not wide:
        return module
    try:
        return copy_with(module, wide)
    except Exception as error:
        raise BadInputError(
            f"{type(module).__name__} cannot be copied to float32: {error}",
            hint="a module must survive copy.deepcopy to be converted; "
            "remove weight_norm and the like before, or convert it yourself",
        ) from error


@contextlib.contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside; every training flag is put back after.

    The FakeQuantize modules of quantization-aware training have constant scales inside.
    """
    with contextlib.suppress(ImportError):  # registers operators, of which the first export asks
        import torch.ao.quantization.fx._decomposed
    flags = [(part, part.training) for part in module.modules()]
    fakes = [part for part in module.modules() if hasattr(part, "fake_quant_enabled")]
    module.eval()
    try:
        for fake in fakes:
            fake.forward = _with_constant_scale(fake)
        with torch.no_grad(), without_fast_path():
            yield
    finally:
        for fake in fakes:
            fake.__dict__.pop("forward", None)
        for part, training in flags:
            part.training = training


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """Within it TransformerEncoder runs as it is traced: its fast path gives 0 for padding."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(value=False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(value=enabled)


def _with_constant_scale(fake: FakeQuantize) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a trained FakeQuantize does, in operators that torch exports to Q/DQ nodes."""
    if not fake.fake_quant_enabled.any():
        return lambda x: x
    ops = torch.ops.quantized_decomposed
    kind = torch.uint8
    if fake.dtype in (torch.qint8, torch.int8):
        kind = torch.int8
    limits = (fake.quant_min, fake.quant_max, kind)
    if fake.is_per_channel:
        axis = (fake.scale, fake.zero_point, fake.ch_axis, *limits)
        return lambda x: ops.dequantize_per_channel(ops.quantize_per_channel(x, *axis), *axis)
    whole = (fake.scale.item(), fake.zero_point.item(), *limits)
    return lambda x: ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *whole), *whole)


def reference_outputs(module: nn.Module, call: BoundCall) -> tuple[Array, ...]:
    """Outputs of the module in float32 and evaluation mode, in the order of the ONNX outputs.

    Raises BadInputError when the forward fails on the example inputs.
    """
    ready = float32_module(module)
    # what the forward prints goes to stderr: stdout may carry our JSON
    with in_eval_mode(ready), contextlib.redirect_stdout(sys.stderr):
        try:
            outputs = ready(*call.args, **call.kwargs)
        except (Exception, SystemExit) as error:
            raise forward_error(module, error, call) from error
    return output_arrays(module, outputs)


def output_arrays(module: nn.Module, outputs: object) -> tuple[Array, ...]:
    """What a forward returned as float32 arrays, in the order of the ONNX outputs.

    Raises BadInputError where it has no tensors, or texts among them.
    """
    leaves = pytree.tree_leaves(outputs)
    tensors = tuple(float32_array(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    texts = [f"a {type(leaf).__name__}" for leaf in leaves if isinstance(leaf, str | bytes)]
    if texts or not tensors:
        returned = texts[0] if texts else "no tensor"
        raise BadInputError(
            f"{type(module).__name__}.forward returns {returned}, and ONNX has tensors only",
            hint="let forward return tensors: one, a tuple, or a dict of them",
        )
    return tensors


class Overflow(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Whether an operator gives finite values that float16 cannot hold, while it is entered."""

    has_overflown = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204  # as torch has it
        """Run the operator and look at what it gives."""
        given = func(*args, **(kwargs or {}))
        self.has_overflown = self.has_overflown or any(map(_is_beyond, pytree.tree_leaves(given)))
        return given


def _is_beyond(given: object) -> bool:
    """Whether it is a tensor with a finite value beyond float16, float32's own limit apart."""
    if not isinstance(given, torch.Tensor) or given.dtype not in _FLOATS or given.is_nested:
        return False
    if given.layout is not torch.strided or not given.numel():
        return False
    low, high = given.aminmax()
    if max(-low, high) <= FLOAT16_MAX:
        return False
    sizes = given.abs()
    return bool(((sizes > FLOAT16_MAX) & (sizes < MASKED)).any())


def forward_error(
    module: nn.Module, error: BaseException, call: BoundCall | None = None
) -> BadInputError:
    """The error for a forward that fails on this call; None: it does not take the arguments."""
    what = f"{type(module).__name__}.forward fails on {EXAMPLES}"
    if call is not None:
        shapes = []
        for name, tensor in call.named_tensors.items():
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            shapes.append(f"{name} {shape} {tensor.dtype}".replace("torch.", ""))
        what += f" ({', '.join(shapes)})"
    layer = failing_layer(module, error)
    if layer is not None:
        what += f" in layer {layer}"
    return BadInputError(
        f"{what}: {describe_error(error)}",
        hint="give inputs that fit the model with --inputs FILE.npz or --input-shape",
    )


def failing_layer(module: nn.Module, error: BaseException) -> str | None:
    """The innermost layer in which an error was raised; None: it was raised in none.

    torch converts the nodes of a graph outside of the layers; each node names its own.
    """
    names = {id(part): name for name, part in module.named_modules()}
    layer = ""
    cause: BaseException | None = error
    while cause is not None:
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            stack = getattr(frame.f_locals.get("node"), "meta", {}).get("nn_module_stack")
            if stack:
                layer = next(reversed(stack.values()))[0]
            layer = names.get(id(frame.f_locals.get("self")), layer)
        cause = cause.__cause__
    return layer or None


def tensor_names(call: BoundCall) -> tuple[str, ...]:
    """Name of the ONNX input of each tensor, in order: its argument, and its place in that."""
    names = []
    for path, leaf in pytree.tree_leaves_with_path(call.by_parameter):
        if isinstance(leaf, torch.Tensor):
            if path[0].key == call.keywords:  # type: ignore[attr-defined]  # a MappingKey
                path = path[1:]  # noqa: PLW2901
            names.append(_joined(path))
    return tuple(names)


def _joined(path: Sequence[object]) -> str:
    """Keys, fields and places on the way to a tensor, joined as in a variable's name."""
    # past_key_values[0]["key"] is the path (MappingKey, SequenceKey(0), MappingKey("key")), and the
    # name past_key_values_0_key
    parts = []
    for step in path:
        attribute = next((name for name in ("key", "idx", "name") if hasattr(step, name)), None)
        parts.append(str(step if attribute is None else getattr(step, attribute)))
    return re.sub(r"\W", "_", "_".join(parts))


def name_outputs(model: ir.Model, structure: pytree.TreeSpec) -> None:
    """Name the outputs after what the forward returned.

    That is the keys of a dict or ModelOutput, or the fields of a named tuple; else output_0,
    output_1, ...
    """
    outputs = model.graph.outputs
    if structure.num_leaves != len(outputs):
        return
    taken = taken_names(model) - {value.name for value in outputs}
    returned = structure.unflatten(range(structure.num_leaves))
    if isinstance(returned, dict):  # torch 2.8 knows no keys of a ModelOutput
        returned = {**returned}
    places = pytree.tree_leaves_with_path(returned)
    for at, (value, (path, _)) in enumerate(zip(outputs, places, strict=True)):
        if value.producer() is None:
            continue
        wish = _joined(path)
        # ("logits",) is a key or a field, (1,) the second of a tuple, () all that was returned
        if not path or hasattr(path[0], "idx") or wish in taken:
            wish = f"output_{at}"
        value.name = new_name(taken, wish)
