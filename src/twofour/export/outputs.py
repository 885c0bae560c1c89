"""Outputs of a torch module as arrays, in the order of the ONNX outputs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from twofour.errors import BadInputError
from twofour.export.example_inputs import (
    bind,
    float32_call,
    float32_module,
    forward_error,
    in_eval_mode,
)
from twofour.export.ranges import FLOAT16_MAX, MASKED
from twofour.inputs.fits import float32_array

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Overflow(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Whether an operator gives finite values that float16 cannot hold, while it is entered."""

    found = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204  # as torch has it
        """Run the operator and look at what it gives."""
        given = func(*args, **(kwargs or {}))
        self.found = self.found or any(map(_is_beyond, pytree.tree_leaves(given)))
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


def reference_outputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[NDArray[Any], ...]:
    """Outputs of the module in float32 and evaluation mode, in the order of the ONNX outputs.

    Raises BadInputError when the forward fails on the example inputs.
    """
    call = float32_call(bind(module, args, kwargs))
    ready = float32_module(module)
    # what the forward prints goes to stderr: stdout may carry our JSON
    with in_eval_mode(ready), contextlib.redirect_stdout(sys.stderr), _without_fast_path():
        try:
            outputs = ready(*call.args, **call.kwargs)
        except (Exception, SystemExit) as error:
            raise forward_error(module, error, call) from error
    return output_arrays(module, outputs)


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    """Within it TransformerEncoder runs as it is traced: its fast path gives 0 for padding."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(value=False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(value=enabled)


def output_arrays(module: nn.Module, outputs: object) -> tuple[NDArray[Any], ...]:
    """What a forward returned as float32 arrays, in the order of the ONNX outputs.

    Raises BadInputError where it has no tensors, or texts among them.
    """
    leaves = pytree.tree_leaves(outputs)
    tensors = tuple(float32_array(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    strange = next((leaf for leaf in leaves if isinstance(leaf, str | bytes)), None)
    if not tensors or strange is not None:
        given = "no tensor" if strange is None else f"a {type(strange).__name__}"
        raise BadInputError(
            f"{type(module).__name__}.forward returns {given}, and ONNX has tensors only",
            hint="let forward return tensors: one, a tuple, or a dict of them",
        )
    return tensors
