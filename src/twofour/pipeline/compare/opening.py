"""From a request to a loaded variant, inside its worker process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twofour.pipeline.compare.plan import (
    OpenRequest,
    QuantizeRequest,
    TorchRequest,
)

if TYPE_CHECKING:
    from twofour.engines.timed_protocol import TimedModel
    from twofour.pipeline.sources.loaded import LoadedModule


def open_variant(request: OpenRequest) -> TimedModel:
    """Load it with its engine.

    Raises BadInputError, MissingToolError and BuildFailedError as the engines do.
    """
    if request.torch is not None:
        return _open_torch(request, request.torch)
    assert request.file is not None, "only torch variants have no file"
    if request.engine == "tensorrt":
        from twofour.engines.tensorrt.timed import open_tensorrt

        return open_tensorrt(
            request.file,
            request.options,
            mode=request.mode,
            model=request.model,
            precision=request.precision,
            sparse_kernels=request.sparse_kernels,
        )
    from twofour.engines.onnxruntime.timed import open_onnxruntime

    return open_onnxruntime(
        request.file, request.mode, request.options, precision=request.precision
    )


def _open_torch(request: OpenRequest, torch: TorchRequest) -> TimedModel:
    from twofour.engines.torch.placed import TorchProgram
    from twofour.engines.torch.tensorrt import open_torch_tensorrt
    from twofour.engines.torch.timed import open_torch

    loaded = _load(torch)
    program = TorchProgram(
        module=loaded.module,
        args=loaded.args,
        kwargs=loaded.kwargs,
        input_names=torch.input_names,
        output_names=torch.output_names,
        source=torch.source,
    )
    opener = open_torch if request.engine == "torch" else open_torch_tensorrt
    return opener(program, request.mode, request.options)


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
