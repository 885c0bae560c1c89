"""From a request to a loaded variant, inside its worker process."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from twofour.pipeline.compare.plan import (
    QuantizeRequest,
    TorchRequest,
    VariantRequest,
)

if TYPE_CHECKING:
    from twofour.engines.protocol import TimedModel
    from twofour.engines.torch.placed import TorchProgram
    from twofour.pipeline.sources.loaded import LoadedModule


def open_variant(request: VariantRequest) -> TimedModel:
    """Load it with its engine.

    Raises BadInputError, MissingToolError and BuildFailedError as the engines do.
    """
    opening, torch = request.opening, request.torch
    if torch is not None:
        opening = replace(opening, program=_program(torch))
    return request.engine.engine().open(opening)


def _program(torch: TorchRequest) -> TorchProgram:
    from twofour.engines.torch.placed import TorchProgram

    loaded = _load(torch)
    return TorchProgram(
        module=loaded.module,
        args=loaded.args,
        kwargs=loaded.kwargs,
        input_names=torch.input_names,
        output_names=torch.output_names,
        source=torch.source,
    )


def _load(request: TorchRequest) -> LoadedModule:
    """The module with the weights of the source, or with those that the prune stage saved."""
    from twofour.pipeline.sources.onnx import OnnxSource
    from twofour.pipeline.sources.open import open_source
    from twofour.pipeline.torch_model import TorchModel

    source = open_source(request.source, request.arguments)
    assert not isinstance(source, OnnxSource), "planned only for torch sources"
    model = TorchModel(source, lambda _note: None)
    return model.dense() if request.weights is None else model.pruned(request.weights)


def quantize(request: QuantizeRequest) -> None:
    """An INT8 file beside the others of the comparison."""
    from twofour.export.int8 import Activations, quantize_int8
    from twofour.pipeline.agreement import load_arrays

    request.target.parent.mkdir(parents=True, exist_ok=True)
    quantize_int8(
        request.onnx,
        request.target,
        load_arrays(request.examples),
        activations=Activations(request.activations),
        optimized=request.optimized,
    )
