"""From a planned variant to what its worker loads; plans and INT8 files are made on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from twofour.engines.inputs import at_shapes
from twofour.engines.protocol import BuildRequest, Mode, OpenOptions, OpenRequest, no_progress
from twofour.engines.registry import ENGINES, Takes
from twofour.errors import BadInputError
from twofour.pipeline.compare.plan import Planned
from twofour.pipeline.compare.process import QuantizeRequest, VariantRequest, start_worker
from twofour.pipeline.compare.variants import Compared
from twofour.pipeline.engine_host import EngineHost, Tries, build_in
from twofour.pipeline.sources.source import safe_name
from twofour.records.options import ShapeProfile, Variant

OPTIMIZED, AS_IT_IS = "BASIC", "NONE"
"""Optimization levels of the graph before it is quantized."""
_HALF = frozenset({"float16", "bfloat16"})


def prepare_request(
    compared: Compared,
    planned: Planned,
    threads: int,
    shapes: tuple[ShapeProfile, ...],
    note: Callable[[str], None],
) -> tuple[VariantRequest, float | None]:
    """The request of a variant, after a process of its own has built or quantised what it needs.

    With the seconds that took; None: it was there. `note` is told where that process died and
    another try follows.

    Raises BuildFailedError and BadInputError as building and quantising do.
    """
    model, row = planned.model, ENGINES[planned.engine]
    file, build_s, torch = model.onnx, None, None
    if row.takes is Takes.PLAN:
        file, build_s = _plan(compared, planned, shapes, note)
    elif planned.known_mode.activations is not None:
        started = time.perf_counter()
        file = _quantized(compared, planned, threads, note)
        build_s = time.perf_counter() - started
    if row.takes is Takes.MODULE:
        file, torch = None, model.torch
    opening = OpenRequest(
        mode=planned.mode,
        options=OpenOptions(weights=model.weights, threads=threads, shapes=shapes),
        model=str(file) if torch is None else torch.source,
        precision=precision_words(planned.known_mode, model.precision),
        file=file,
        sparse_kernels=_flag(planned) if row.takes is Takes.PLAN else None,
    )
    return VariantRequest(engine=row, opening=opening, torch=torch), build_s


def precision_words(mode: Mode, graph: str) -> str:
    """What the settings say of the types that layers run in, from those of the file's graph."""
    if mode.activations is not None:
        return "int8" if mode.activations == "int8" else f"int8 ({mode.activations} activations)"
    return f"{graph} (graph)" if mode.widens_half and graph in _HALF else graph


def batch_of(inputs: Mapping[str, np.ndarray]) -> int | None:
    """Length of the first axis that all inputs share; None where there is none."""
    lengths = {array.shape[0] if array.ndim else None for array in inputs.values()}
    return lengths.pop() if len(lengths) == 1 else None


def at_batch(inputs: Mapping[str, np.ndarray], batch: int) -> dict[str, np.ndarray]:
    """The inputs cut, or repeated, to so many rows.

    Raises BadInputError where they have no common first axis.
    """
    rows = batch_of(inputs)
    if not rows:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
        raise BadInputError(
            f"--batch: the inputs have no common first axis ({shapes})",
            hint="leave --batch out, and give inputs of the size you want with --inputs",
        )
    return at_shapes(inputs, {name: (batch, *a.shape[1:]) for name, a in inputs.items()})


def profiles_over(
    inputs: Mapping[str, np.ndarray], batches: Sequence[int]
) -> tuple[ShapeProfile, ...]:
    """Shapes for an engine that serves all batches; tactics are chosen for the largest."""

    def shape(array: np.ndarray, rows: int) -> tuple[int, ...]:
        return (rows, *array.shape[1:]) if batches else array.shape

    smallest, largest = min(batches, default=0), max(batches, default=0)
    return tuple(
        ShapeProfile(input=name, min=shape(array, smallest), opt=largest_shape, max=largest_shape)
        for name, array in inputs.items()
        for largest_shape in (shape(array, largest),)
    )


def _flag(planned: Planned) -> bool | None:
    """Whether the builder may use sparse kernels; None for a plan of unknown origin."""
    if planned.known_mode.sparse_kernels is False:
        return False
    if planned.model.onnx is None:
        return None
    return not planned.model.dense


def _plan(
    compared: Compared,
    planned: Planned,
    shapes: tuple[ShapeProfile, ...],
    note: Callable[[str], None],
) -> tuple[Path, float | None]:
    """The plan that is there, or a new one; the twin's is built again, without a timing cache."""
    known = planned.model.plans.get((planned.engine, planned.mode))
    if known is not None and not (planned.again and planned.model.onnx):
        return known, None
    assert planned.model.onnx is not None, "planned only where there is one of the two"
    flag = bool(_flag(planned))
    options = compared.build if compared.build.shapes else replace(compared.build, shapes=shapes)
    request = BuildRequest(
        variant=Variant.SPARSE if flag else Variant.DENSE,
        stem=safe_name(planned.name),
        onnx=planned.model.onnx,
        folder=compared.work,
        sparse_weights=flag,
        options=options,
        inputs=compared.inputs,
    )
    with EngineHost(note=lambda text: note(f"{planned.name}: {text}")) as host:
        built = build_in(host, ENGINES[planned.engine], request, no_progress)
    return request.file(".plan"), built.build_s


def _quantized(
    compared: Compared, planned: Planned, threads: int, note: Callable[[str], None]
) -> Path:
    onnx, activations = planned.model.onnx, planned.known_mode.activations
    assert onnx is not None, "planned only where there is one"
    assert activations is not None, "only asked for by modes that quantise"
    target = compared.work / f"{safe_name(planned.model.weights)}.{planned.mode}.onnx"
    request = QuantizeRequest(
        onnx=onnx,
        target=target,
        examples=compared.examples,
        activations=activations,
    )
    tries = Tries(engine=planned.name, levels=(OPTIMIZED, AS_IT_IS), note=note)

    def quantize(level: str) -> None:
        with start_worker(threads) as process:
            process.call("quantize", replace(request, optimized=level == OPTIMIZED))

    tries.until_alive(quantize, lambda: f"quantizing {request.onnx.name}")
    return target
