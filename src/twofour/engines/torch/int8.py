"""INT8 on the CPU with torch.ao.quantization: dynamic, and static with calibration by FX."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from twofour.engines.torch.attention import without_fast_path
from twofour.engines.torch.device import TorchDevice, in_one_line
from twofour.engines.torch.placed import Placed, Ready, TorchProgram, place
from twofour.errors import BuildFailedError, MissingToolError

if TYPE_CHECKING:
    from torch import nn


def dynamic_int8(program: TorchProgram, device: TorchDevice, stack: ExitStack) -> Ready:
    """INT8 weights in Linear and recurrent layers, activations quantised in every run; in place.

    Raises BuildFailedError where there is no such layer.
    """
    import torch
    from torch import nn

    quantization = _quantization()
    placed = place(program, device)
    kinds = {nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell}
    # layers are replaced in what holds them
    holder = nn.Sequential(placed.module) if type(placed.module) in kinds else placed.module
    module = quantization.quantize_dynamic(holder, kinds, dtype=torch.qint8, inplace=True)
    if int8_layers(module) == 0:
        raise BuildFailedError(
            f"{program.source} has no Linear, LSTM or GRU layer that dynamic INT8 could take",
            hint="convolutions take static INT8: torch:static-int8 or onnxruntime:int8",
        )
    return _ready(placed, module, stack, "weights per tensor, activations in every run")


def static_int8(program: TorchProgram, device: TorchDevice, stack: ExitStack) -> Ready:
    """INT8 weights and activations, their ranges taken from the example inputs (FX graph mode).

    Raises BuildFailedError for a module that torch.fx cannot trace, or without such a layer.
    """
    import torch

    quantization = _quantization()
    placed = place(program, device)
    args, kwargs = program.arguments(placed.put(program.tensors))
    mapping = quantization.get_default_qconfig_mapping(torch.backends.quantized.engine)
    try:
        prepared = quantization.quantize_fx.prepare_fx(placed.module, mapping, args)
    except Exception as error:
        raise BuildFailedError(
            f"torch.fx cannot trace {type(placed.module).__name__}: {in_one_line(error)}",
            hint="static INT8 in torch needs a forward without branches on its inputs; "
            "onnxruntime:int8 quantises the exported graph",
        ) from error
    with torch.inference_mode():
        prepared(*args, **kwargs)
    module = quantization.quantize_fx.convert_fx(prepared)
    if int8_layers(module) == 0:
        raise BuildFailedError(f"{program.source} has no layer that static INT8 could take")
    return _ready(placed, module, stack, f"calibrated with {_rows(program)} rows")


def int8_layers(module: nn.Module) -> int:
    """Layers of the module that have INT8 weights."""
    return sum(
        type(layer).__module__.startswith("torch.ao.nn.")
        and (hasattr(layer, "weight") or hasattr(layer, "_all_weight_values"))
        for layer in module.modules()
    )


def _ready(placed: Placed, module: nn.Module, stack: ExitStack, how: str) -> Ready:
    import torch

    without_fast_path(stack)  # it looks for weights that quantised layers do not have
    options = (
        f"int8_layers={int8_layers(module)}",
        how,
        f"kernels={torch.backends.quantized.engine}",
    )
    program = replace(placed.program, module=module)
    return Ready(
        placed=replace(placed, program=program),
        forward=module,
        precision="int8",
        options=options,
        layers=module,
    )


def _rows(program: TorchProgram) -> int:
    return next((int(t.shape[0]) for t in program.tensors if t.dim()), 1)


def _quantization() -> Any:  # noqa: ANN401  # a package of torch without types
    """torch.ao.quantization, which is deprecated: later releases of torch may lack it."""
    try:
        import torch.ao.quantization.quantize_fx
        from torch.ao import quantization
    except ImportError as error:
        raise MissingToolError(
            "this torch has no torch.ao.quantization",
            hint="onnxruntime:int8 quantises without it",
        ) from error
    if torch.backends.quantized.engine == "none":
        raise MissingToolError("this torch was built without INT8 kernels for this CPU")
    return quantization
