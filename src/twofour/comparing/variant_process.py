"""A variant with a process of its own: built, loaded and asked, and what it can do there.

A process of its own gives each variant its own peak memory and thread pools, and lets one crash
without the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twofour.comparing.compared import TorchRequest
from twofour.comparing.variants import PlannedVariant
from twofour.engines.machine import available_bytes, has_room_for, peak_resident_bytes, reset_peak
from twofour.engines.protocol import (
    ENGINES,
    BuildRequest,
    EngineInput,
    EngineRow,
    OpenRequest,
    ProgressCallback,
    no_progress,
)
from twofour.engines.timing import WarmModel, with_error
from twofour.errors import BuildFailedError, TwofourError
from twofour.inputs.fits import Arrays
from twofour.records.export import EngineStatus, LayerTime
from twofour.records.latency import ComparedVariant, VariantSettings
from twofour.records.options import ShapeProfile, Variant
from twofour.sources.source import safe_name
from twofour.workers.host import EngineHost, Tries, build_in
from twofour.workers.process import WorkerProcess

if TYPE_CHECKING:
    from twofour.comparing.compared import ComparisonSetup
    from twofour.engines.protocol import TimedModel
    from twofour.engines.torch.engine import TorchProgram

_SERVICE = "twofour.comparing.variant_process:Worker"
Note = Callable[[str], None]


def start_worker(threads: int) -> WorkerProcess:
    """A process for one variant, whose libraries use so many threads."""
    return WorkerProcess(_SERVICE, threads)


class VariantProcess:
    """A variant with a process of its own, until it fails or the comparison ends."""

    def __init__(self, planned: PlannedVariant) -> None:
        self.planned = planned
        self.process: WorkerProcess | None = None
        self.row = ComparedVariant(name=planned.name, can_run=planned.why_not is None)
        """What is known of it, without its times."""

    @property
    def name(self) -> str:
        """Its name, without the batch of a sweep."""
        return self.planned.name

    @property
    def runs(self) -> bool:
        """It is loaded and has not failed."""
        return self.row.settings is not None and self.row.error is None

    def open(self, opening: OpenRequest, build_s: float | None, note: Note) -> None:
        """Load what was built in `build_s`, if it was; raises what loading raises.

        Where its process dies it is tried at the engine's lower optimization levels, with a `note`.
        """
        engine = ENGINES[self.planned.engine]
        torch = self.planned.model.torch if engine.takes is EngineInput.MODULE else None
        levels = engine.engine().open_levels

        def load(level: str | None) -> None:
            self.close()
            self.process = start_worker(opening.threads)
            wanted = replace(opening, level=level)
            opened: ComparedVariant = self.process.call("open", self.row, engine, wanted, torch)
            self.row = opened if build_s is None else replace(opened, open_s=build_s)

        if levels:
            tries = Tries(engine=self.name, levels=levels, note=note)
            tries.until_alive(load, lambda: f"loading {opening.model}")
        else:
            load(None)

    def fail(self, error: TwofourError) -> None:
        """Note why, and let the process go."""
        self.row = with_error(self.row, error)
        self.close()

    def run_ms(self) -> float:
        """One timed run."""
        return float(self.call("run_ms"))

    def with_peaks(self, row: ComparedVariant) -> ComparedVariant:
        """The row with the peaks of memory since `prepare`; none where its process has ended."""
        try:
            measured: ComparedVariant = self.call("with_peaks", row)
        except TwofourError:
            return row
        return measured

    def call(self, command: str, *arguments: object) -> Any:  # noqa: ANN401  # each command has its own
        """Ask its process."""
        assert self.process is not None, "it was opened"
        return self.process.call(command, *arguments)

    def close(self) -> None:
        """End its process."""
        if self.process is not None:
            self.process.close()
            self.process = None


def prepare_request(
    compared: ComparisonSetup,
    planned: PlannedVariant,
    threads: int,
    shapes: tuple[ShapeProfile, ...],
    note: Note,
) -> tuple[OpenRequest, float | None]:
    """The request of a variant, after a process of its own has built or quantised what it needs.

    The second value is the seconds that took; None: it was there. `note` is called where that
    process died and another try follows. Raises what building raises.
    """
    model = planned.model
    takes = ENGINES[planned.engine].takes
    opening = OpenRequest(
        mode=planned.mode,
        weights=model.weights,
        threads=threads,
        shapes=shapes,
        model=str(model.onnx),
        precision=planned.known_mode.precision_words(model.precision),
        file=model.onnx,
    )
    if takes is EngineInput.MODULE:
        assert model.torch is not None, "planned only where there is one"
        return replace(opening, model=model.torch.source, file=None), None
    if takes is EngineInput.PLAN:
        file, build_s = _plan(compared, planned, shapes, note)
        opening = replace(opening, sparse_kernels=planned.allows_sparse)
    elif planned.known_mode.activations is not None:
        file, build_s = _quantized(compared, planned, threads)
    else:
        return opening, None
    return replace(opening, model=str(file), file=file), build_s


def _quantized(
    compared: ComparisonSetup, planned: PlannedVariant, threads: int
) -> tuple[Path, float]:
    model = planned.model
    started = time.perf_counter()
    file = compared.work / f"{safe_name(model.weights)}.{planned.mode}.onnx"
    activations = planned.known_mode.activations
    with start_worker(threads) as process:
        process.call("quantize", model.onnx, file, compared.examples, activations)
    return file, time.perf_counter() - started


def _plan(
    compared: ComparisonSetup,
    planned: PlannedVariant,
    shapes: tuple[ShapeProfile, ...],
    note: Note,
) -> tuple[Path, float | None]:
    """The plan that is there, or a new one; the twin's is built again, without a timing cache."""
    model = planned.model
    known = model.plans.get(planned.mode)
    if known is not None and not (planned.again and model.onnx):
        return known, None
    assert model.onnx is not None, "planned only where there is one of the two"
    options = compared.build
    if not options.shapes:
        options = replace(options, shapes=shapes)
    request = BuildRequest(
        variant=Variant.SPARSE if planned.allows_sparse else Variant.DENSE,
        stem=safe_name(planned.name),
        onnx=model.onnx,
        folder=compared.work,
        sparse_weights=bool(planned.allows_sparse),
        options=options,
        inputs=compared.inputs,
    )
    with EngineHost(note=lambda text: note(f"{planned.name}: {text}")) as host:
        built = build_in(host, ENGINES[planned.engine], request, no_progress)
    return request.file(".plan"), built.build_s


def refuse_without_memory(largest_bytes: int) -> None:
    """Raise BuildFailedError where another variant as large as the largest would not fit."""
    if not has_room_for(largest_bytes):
        raise BuildFailedError(
            f"not opened: {available_bytes() / 2**30:.1f} GiB of memory are left, and the "
            f"largest variant took {largest_bytes / 2**30:.1f} GiB",
            hint="every variant stays loaded while the rounds run: name fewer with --engines",
        )


class Worker:
    """The commands; each is a method, and what it raises goes back to the parent."""

    def __init__(self, _report: ProgressCallback) -> None:
        self._loaded: WarmModel | None = None

    def open(
        self,
        row: ComparedVariant,
        engine: EngineRow,
        opening: OpenRequest,
        torch: TorchRequest | None,
    ) -> ComparedVariant:
        """Load the variant; everything else needs that first, `quantize` apart."""
        started = time.perf_counter()
        if torch is not None:
            opening = replace(opening, program=_program(torch))
        model = engine.engine().open(opening)
        open_s = time.perf_counter() - started
        self._loaded = WarmModel(opening.model, model)
        return replace(row, settings=model.settings, size_bytes=model.size_bytes, open_s=open_s)

    def statuses(self, engine: EngineRow, modes: Sequence[str]) -> tuple[EngineStatus, ...]:
        """Whether the engine can run here in each of the modes."""
        return tuple(map(engine.engine().status, modes))

    def quantize(self, onnx: Path, target: Path, examples: Path, activations: str) -> None:
        """Write an INT8 file beside the others of the comparison."""
        from onnx_ir import DataType

        from twofour.engines.onnxruntime.session import LEVELS, OrtSession
        from twofour.export.ir_models import save
        from twofour.export.quantize import quantized
        from twofour.graph.opened import open_onnx
        from twofour.inputs.fits import stored_arrays

        folder = target.parent
        folder.mkdir(parents=True, exist_ok=True)
        inputs = stored_arrays(examples)
        kind = DataType[activations.upper()]

        def tensors_of(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
            with OrtSession(path, level=LEVELS[-1]) as session:
                yield {**inputs, **session.outputs(inputs)}

        with quantized(open_onnx(onnx), folder, tensors_of, kind) as (model, _):
            save(model, target, onnx)

    def prepare(self, inputs: Arrays, warmup: int) -> VariantSettings:
        """Take the inputs of the rounds and warm up, which settles how runs are timed.

        Peaks count from here.
        """
        reset_peak()
        self._warm.prepare(inputs, warmup)
        return self._opened.settings

    def run_ms(self) -> float:
        """One timed run."""
        return self._warm.run_ms()

    def outputs(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Outputs by name."""
        return self._opened.outputs(inputs)

    def metric(self, reference: str, seed: int) -> dict[str, float]:
        """The user's metric, with this variant behind `predict`."""
        from twofour.sources.user_code import run_metric

        names = [tensor.name for tensor in self._opened.inputs]
        return run_metric(reference, names, self._opened.outputs, seed=seed)

    def check_metric(self, reference: str) -> None:
        """Import the user's metric, so that a typo is found before anything is timed."""
        from twofour.sources.user_code import load_metric

        load_metric(reference)

    def layer_times(self, iterations: int) -> tuple[LayerTime, ...]:
        """Mean times of the layers."""
        return self._opened.layer_times(iterations)

    def with_peaks(self, row: ComparedVariant) -> ComparedVariant:
        """The row with the peaks of memory since `prepare`."""
        return replace(
            row,
            peak_memory_bytes=peak_resident_bytes(),
            peak_device_memory_bytes=self._opened.peak_device_memory_bytes(),
        )

    @property
    def _warm(self) -> WarmModel:
        assert self._loaded is not None, "open comes first"
        return self._loaded

    @property
    def _opened(self) -> TimedModel:
        return self._warm.model


def _program(torch: TorchRequest) -> TorchProgram:
    """The module with the weights of the source, or with those that the prune stage saved."""
    from twofour.engines.torch.engine import TorchProgram
    from twofour.pipeline.torch.graph import SourceModule
    from twofour.pipeline.torch.weight_files import load_weights
    from twofour.sources.source import OnnxSource, open_source

    source = open_source(torch.source, torch.arguments)
    assert not isinstance(source, OnnxSource), "planned only for torch sources"
    loaded = SourceModule(source, lambda _note: None).loaded()
    if torch.weights is not None:
        load_weights(loaded.module, torch.weights)
    return TorchProgram(
        module=loaded.module,
        args=loaded.args,
        kwargs=loaded.kwargs,
        inputs=torch.inputs,
        output_names=torch.output_names,
        source=torch.source,
    )
