"""Example inputs bound to the forward's signature, and the names that inputs and outputs get."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import re
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils import _pytree as pytree

from twofour.errors import BadInputError
from twofour.export.model_code import describe_error
from twofour.inputs.fits import float32_array

FakeQuantize = Any
"""Rounds in quantization-aware training: a module of torch.ao's, or of torchao's copy of it."""

EXAMPLES = "the example inputs"


@dataclass(frozen=True, slots=True, kw_only=True)
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


def bind(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundCall:
    """The arguments as one call; raises BadInputError when the forward does not take them."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise forward_error(module, error) from error
    positional, named = bound.args, bound.kwargs
    if not named and positional and isinstance(positional[-1], dict):
        # torch.onnx.export takes a dict in the last place for keyword arguments
        name = list(bound.arguments)[-1]
        positional, named = positional[:-1], {name: positional[-1]}
    parameters = bound.signature.parameters.values()
    keywords = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
    return BoundCall(
        args=positional, kwargs=named, by_parameter=dict(bound.arguments), keywords=keywords
    )


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
        with torch.no_grad():
            yield
    finally:
        for fake in fakes:
            fake.__dict__.pop("forward", None)
        for part, training in flags:
            part.training = training


def _with_constant_scale(fake: FakeQuantize) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a trained FakeQuantize does, in operators that torch exports to Q/DQ nodes."""
    if not fake.fake_quant_enabled.any():
        return lambda x: x
    ops = torch.ops.quantized_decomposed
    kind = torch.int8 if fake.dtype in (torch.qint8, torch.int8) else torch.uint8
    if fake.is_per_channel:
        scales: tuple[Any, ...] = fake.scale, fake.zero_point, fake.ch_axis
        quantize, dequantize = ops.quantize_per_channel, ops.dequantize_per_channel
    else:
        scales = fake.scale.item(), fake.zero_point.item()
        quantize, dequantize = ops.quantize_per_tensor, ops.dequantize_per_tensor
    given = *scales, fake.quant_min, fake.quant_max, kind
    return lambda x: dequantize(quantize(x, *given), *given)


def copy_with(module: nn.Module, changed: Mapping[int, torch.Tensor]) -> nn.Module:
    """A copy that shares all tensors but those that `changed` has by id; deepcopy may raise."""
    tensors = {id(t): t for t in chain(module.parameters(), module.buffers())}
    return copy.deepcopy(module, {**tensors, **changed})


def float32_module(module: nn.Module) -> nn.Module:
    """The module where it is float32, else a float32 copy that shares what needs no conversion."""
    tensors = chain(module.parameters(), module.buffers())
    copied: dict[int, torch.Tensor] = {}
    for tensor in (t for t in tensors if t.is_floating_point() and t.dtype != torch.float32):
        wide = tensor.detach().float()
        is_parameter = isinstance(tensor, nn.Parameter)
        copied[id(tensor)] = nn.Parameter(wide, requires_grad=False) if is_parameter else wide
    if not copied:
        return module
    try:
        return copy_with(module, copied)
    except Exception as error:
        raise BadInputError(
            f"{type(module).__name__} cannot be copied to float32: {error}",
            hint="a module must survive copy.deepcopy to be converted; "
            "remove weight_norm and the like before, or convert it yourself",
        ) from error


def forward_error(
    module: nn.Module, error: BaseException, call: BoundCall | None = None
) -> BadInputError:
    """The error for a forward that fails on this call; None: it does not take the arguments."""
    what = f"{type(module).__name__}.forward fails on {EXAMPLES}"
    if call is not None:
        tensors = zip(tensor_names(call), call.tensors, strict=True)
        shapes = (
            f"{name} {'x'.join(map(str, tensor.shape)) or 'scalar'} {tensor.dtype}"
            for name, tensor in tensors
        )
        what += f" ({', '.join(shapes)})".replace("torch.", "")
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


def float32_call(call: BoundCall) -> BoundCall:
    """The call with every floating-point tensor in float32."""
    return with_tensors(call, [t.float() if t.is_floating_point() else t for t in call.tensors])


def input_arrays(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[NDArray[Any], ...]:
    """The example inputs of the exported file, float32 in every precision, in its inputs' order.

    Raises BadInputError when the forward does not take these arguments.
    """
    call = float32_call(bind(module, args, kwargs))
    return tuple(map(float32_array, call.tensors))


def with_tensors(call: BoundCall, tensors: Sequence[torch.Tensor]) -> BoundCall:
    """The call with these instead of its tensors, in order."""

    def filled(tree: Any) -> Any:  # noqa: ANN401 - a tree of the caller's own types
        new = iter(tensors)
        return pytree.tree_map_only(torch.Tensor, lambda _: next(new), tree)

    args, kwargs = filled((call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs, by_parameter=filled(call.by_parameter))


def tensor_names(call: BoundCall) -> tuple[str, ...]:
    """Name of the ONNX input of each tensor, in order: its argument, and its place in that."""
    leaves: list[tuple[Any, Any]] = pytree.tree_leaves_with_path(call.by_parameter)
    paths = [path for path, leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tuple(_leaf_name(p[1:] if p[0].key == call.keywords else p) for p in paths)


def _leaf_name(path: Sequence[object]) -> str:
    """Keys, fields and places on the way to a tensor, joined as in a variable's name."""
    # past_key_values[0]["key"] is the path (MappingKey, SequenceKey(0), MappingKey("key")), and the
    # name past_key_values_0_key
    attributes = ("key", "idx", "name")
    parts = [next((getattr(k, a) for a in attributes if hasattr(k, a)), k) for k in path]
    return re.sub(r"\W", "_", "_".join(map(str, parts)))


def name_outputs(model: ir.Model, structure: pytree.TreeSpec, module: nn.Module) -> None:
    """Name the outputs after what the forward returned.

    That is the keys of a dict or ModelOutput, the fields of a named tuple, or the variables in its
    return statements where all of them name the same; else output_0, output_1, ...
    """
    outputs = model.graph.outputs
    if structure.num_leaves != len(outputs):
        return
    taken = {v.name for v in (*model.graph.inputs, *model.graph.initializers.values())}
    taken |= {v.name for node in model.graph.all_nodes() for v in node.outputs}
    taken -= {value.name for value in outputs}
    places = pytree.tree_flatten_with_path(structure.unflatten(range(structure.num_leaves)))[0]
    variables = returned_variables(module)
    for at, (value, (path, _)) in enumerate(zip(outputs, places, strict=True)):
        if value.producer() is None:
            continue
        wanted = (_from_place(path, variables), f"output_{at}", f"{value.name}_output")
        value.name = next((n for n in wanted if n and n not in taken), value.name)
        taken.add(value.name)


def returned_variables(module: nn.Module) -> tuple[str, ...]:
    """Variables that forward returns, one alone or in a tuple, by its source; () where not known.

    The source is read, not run. Several return statements must agree.
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(module).forward)))
        function = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):
        return ()
    found = {_variables(statement) for statement in _returns(function)}
    return found.pop() if len(found) == 1 else ()


def _from_place(path: Sequence[object], variables: Sequence[str]) -> str | None:
    """None for a place that no one has named."""
    if not path:
        return variables[0] if len(variables) == 1 else None
    if isinstance(getattr(path[0], "idx", None), int):
        at = path[0].idx  # type: ignore[attr-defined]  # a SequenceKey, as just found
        if at >= len(variables):
            return None
        return "_".join((variables[at], *(_leaf_name(path[1:]) for _ in path[1:2])))
    return _leaf_name(path)


def _returns(function: ast.AST) -> Iterator[ast.Return]:
    """The return statements of this function, without those of functions inside it."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.Return):
            yield child
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _returns(child)


def _variables(statement: ast.Return) -> tuple[str, ...]:
    value = statement.value
    if isinstance(value, ast.Name):
        return (value.id,)
    if isinstance(value, ast.Tuple | ast.List):
        names = tuple(e.id for e in value.elts if isinstance(e, ast.Name))
        return names if len(names) == len(value.elts) else ()
    return ()
