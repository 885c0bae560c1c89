"""What the process that one variant runs in can do.

A process of its own gives each variant its own peak memory and thread pools, and lets one crash
without the others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from twofour.engines.machine import peak_resident_bytes, reset_peak
from twofour.engines.protocol import ProgressCallback
from twofour.engines.timing import WarmModel
from twofour.pipeline.compare.plan import (
    Memory,
    Opened,
    QuantizeRequest,
    TorchRequest,
    VariantRequest,
)

if TYPE_CHECKING:
    from twofour.engines.protocol import ModeStatus, TimedModel
    from twofour.engines.registry import EngineRow
    from twofour.engines.torch.placed import TorchProgram
    from twofour.pipeline.sources.source import LoadedModule
    from twofour.records.build import LayerTime


class Worker:
    """The commands; each is a method, and what it raises goes back to the parent."""

    def __init__(self, _report: ProgressCallback) -> None:
        self._loaded: WarmModel | None = None

    def open(self, request: VariantRequest) -> Opened:
        """Load the variant; everything else needs that first, `quantize` apart."""
        started = time.perf_counter()
        model = _open_variant(request)
        open_s = time.perf_counter() - started
        self._loaded = WarmModel(request.opening.model, model)
        return Opened(
            settings=model.settings,
            inputs=model.inputs,
            size_bytes=model.size_bytes,
            open_s=open_s,
        )

    def statuses(self, engine: EngineRow, modes: Sequence[str]) -> Mapping[str, ModeStatus]:
        """Which modes of an engine can run here."""
        return {status.mode: status for status in engine.engine().statuses(modes)}

    def quantize(self, request: QuantizeRequest) -> None:
        """Write an INT8 file."""
        _quantize(request)

    def prepare(self, inputs: Mapping[str, np.ndarray], warmup: int) -> None:
        """Take the inputs of the rounds and warm up; peaks count from here."""
        reset_peak()
        self._warm.prepare(inputs, warmup)

    def run_ms(self) -> float:
        """One timed run."""
        return self._warm.run_ms()

    def outputs(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name."""
        return self._opened.outputs(inputs)

    def metric(self, reference: str, seed: int) -> dict[str, float]:
        """The user's metric, with this variant behind `predict`."""
        from twofour.pipeline.sources.metric import load_metric, predictor, run_metric

        names = [tensor.name for tensor in self._opened.inputs]
        predict = predictor(names, self._opened.outputs)
        return run_metric(load_metric(reference), predict, seed=seed)

    def check_metric(self, reference: str) -> None:
        """Import the user's metric, so that a typo is found before anything is timed."""
        from twofour.pipeline.sources.metric import load_metric

        load_metric(reference)

    def layer_times(self, iterations: int) -> tuple[LayerTime, ...]:
        """Mean times of the layers."""
        return self._opened.layer_times(iterations)

    def memory(self) -> Memory:
        """Peaks since `prepare`."""
        return Memory(
            host_bytes=peak_resident_bytes(),
            device_bytes=self._opened.peak_device_memory_bytes(),
        )

    @property
    def _warm(self) -> WarmModel:
        assert self._loaded is not None, "open comes first"
        return self._loaded

    @property
    def _opened(self) -> TimedModel:
        return self._warm.model


def _open_variant(request: VariantRequest) -> TimedModel:
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


def _quantize(request: QuantizeRequest) -> None:
    """An INT8 file beside the others of the comparison."""
    from twofour.export.int8 import Activations, quantize_int8
    from twofour.pipeline.sources.inputs import stored_arrays

    request.target.parent.mkdir(parents=True, exist_ok=True)
    quantize_int8(
        request.onnx,
        request.target,
        stored_arrays(request.examples),
        activations=Activations(request.activations),
        optimized=request.optimized,
    )
