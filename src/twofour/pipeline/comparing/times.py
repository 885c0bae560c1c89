"""The comparison of two engines that trtexec built and timed elsewhere."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from twofour.engines.buildlog.layer_information import read_profile
from twofour.engines.latency import percentile
from twofour.engines.tensorrt.precision import precisions_of
from twofour.engines.trtexec import AGAIN, DENSE
from twofour.errors import BadInputError
from twofour.pipeline.comparing.passes import EmittedTimes, EngineTimes, read_emitted_times
from twofour.pipeline.emitting import read_emitted
from twofour.pipeline.evidence import read_build
from twofour.pipeline.onnx_io import describe
from twofour.records.build import LayerTime, TrtexecFolder, TrtexecVariant
from twofour.records.latency import (
    ComparedVariant,
    LatencyComparison,
    LatencyRatio,
    NoiseFloor,
    VariantSettings,
)
from twofour.records.log import Build, LayerProfile
from twofour.records.options import CompareOptions
from twofour.reports.comparison.intervals import LEAST_ROUNDS
from twofour.reports.comparison.layer_contrast import contrasts
from twofour.reports.comparison.naming import variant_name
from twofour.reports.comparison.ratios import ratios_and_noise, unpaired_ratios

ENGINE, MODE = "trtexec", "gpu"
BASELINE = variant_name(DENSE, ENGINE, MODE)
_KEPT = ("seed", "baseline")
"""Options that a comparison of times from elsewhere can follow."""
_FLAGS = {
    "batches": "--batch",
    "time_limit_s": "--time-limit",
    "input_shapes": "--input-shape",
    "input_shape_names": "--input-shape",
}
"""Options that are not called as their field is."""


def compare_emitted(folder: Path, options: CompareOptions) -> LatencyComparison:
    """Compare what build.sh of an emitted folder left, once the folder is back.

    A sample is the median of a round's pass; without rounds it is one run, and the ratio is of two
    runs of trtexec one after the other. Raises BadInputError for a folder without times, and for
    options that ask for a measurement: nothing is measured here.
    """
    emitted = read_emitted(folder)
    _refuse(options, emitted.script)
    times = read_emitted_times(folder, emitted)
    read = _Emitted(folder=folder, record=emitted, times=times, builds=_builds(folder, emitted))
    batch, precision = _batch(read), _precision(read)
    variants = tuple(_variant(read, e, batch, precision) for e in times.engines)
    ratios, noise = _ratios(variants, options.seed, in_rounds=times.rounds is not None)
    return LatencyComparison(
        source=str(folder),
        baseline=BASELINE,
        machine=None,
        options=replace(options, rounds=times.rounds or 1, warmup=0),
        variants=variants,
        ratios=ratios,
        noise=noise,
        layers=contrasts(variants, ratios),
        notes=(*times.notes, *_notes(read, variants)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Emitted:
    """What was read from the folder."""

    folder: Path
    record: TrtexecFolder
    times: EmittedTimes
    builds: Mapping[str, Build]
    """By variant; logs that are missing or say nothing are left out."""

    def variant_of(self, engine: str) -> TrtexecVariant:
        """The variant whose plan an engine of a round is."""
        name = engine.removesuffix(AGAIN)
        return next(v for v in self.record.variants if v.variant == name)


def _refuse(options: CompareOptions, script: str) -> None:
    default = CompareOptions()
    asked = [
        _FLAGS.get(field.name, "--" + field.name)
        for field in fields(options)
        if field.name not in _KEPT and getattr(options, field.name) != getattr(default, field.name)
    ]
    if asked:
        raise BadInputError(
            f"{', '.join(asked)}: these engines were timed by trtexec, nothing is measured here",
            hint=f"leave it out; ROUNDS=n sh {script} changes the rounds there",
        )
    if options.baseline not in (None, BASELINE):
        raise BadInputError(
            f"--baseline: {options.baseline!r} was not timed twice",
            hint=f"it is {BASELINE}: leave it out",
        )


def _ratios(
    variants: Sequence[ComparedVariant], seed: int, *, in_rounds: bool
) -> tuple[tuple[LatencyRatio, ...], tuple[NoiseFloor, ...]]:
    if in_rounds:
        return ratios_and_noise(variants, BASELINE, seed)
    return unpaired_ratios(variants, BASELINE, seed), ()


def _builds(folder: Path, emitted: TrtexecFolder) -> dict[str, Build]:
    builds = {}
    for variant in emitted.variants:
        with contextlib.suppress(BadInputError):
            dense = not variant.sparse_weights
            builds[variant.variant] = read_build(folder / variant.log, dense=dense)
    return builds


def _batch(read: _Emitted) -> int | None:
    """Length of the inputs' first axis in the timed runs."""
    shapes: dict[str, Sequence[int | str]] = {p.input: p.opt for p in read.record.options.shapes}
    with contextlib.suppress(BadInputError):
        inputs, _, _ = describe(read.folder / read.record.onnx)
        shapes = {i.name: i.shape for i in inputs} | shapes
    lengths = {shape[0] if shape else None for shape in shapes.values()}
    length = lengths.pop() if len(lengths) == 1 else None
    return length if isinstance(length, int) else None


def _precision(read: _Emitted) -> str:
    """Of the graph, which may have stayed on the other machine."""
    try:
        return precisions_of(read.folder / read.record.onnx).in_words
    except BadInputError:
        return "unknown"


def _variant(
    read: _Emitted, times: EngineTimes, batch: int | None, precision: str
) -> ComparedVariant:
    variant = read.variant_of(times.engine)
    again = times.engine != variant.variant
    samples, runs = times.samples_ms, times.runs_ms
    median_ms = statistics.median(samples) if samples else None
    build = read.builds.get(variant.variant)
    plan = read.folder / variant.plan
    return ComparedVariant(
        name=variant_name(variant.variant, ENGINE, MODE, again=again),
        samples_ms=samples,
        median_ms=median_ms,
        p90_ms=percentile(runs, 90) if runs else None,
        p99_ms=percentile(runs, 99) if runs else None,
        throughput=1e3 * (batch or 1) / median_ms if median_ms else None,
        peak_memory_bytes=None,
        error=times.error,
        batch=batch,
        settings=_settings(read, variant, precision),
        size_bytes=plan.stat().st_size if plan.is_file() else None,
        open_s=None if build is None else build.build_s,
        layers=() if again else _layers(read.folder / variant.profile),
    )


def _settings(read: _Emitted, variant: TrtexecVariant, precision: str) -> VariantSettings:
    """One script runs both, so what only one of the logs says holds for the other too."""
    builds = [read.builds[v] for v in (variant.variant, *read.builds) if v in read.builds]
    rounds = None if read.times.rounds is None else read.record.rounds
    one = "one run" if rounds is None else f"the median of {rounds.duration_ms / 1000:g} s of runs"
    alike = (a for a in variant.arguments if all(a in v.arguments for v in read.record.variants))
    return VariantSettings(
        engine=ENGINE,
        mode=MODE,
        version=next((b.tensorrt_version for b in builds if b.tensorrt_version), None),
        device=next((b.gpu for b in builds if b.gpu), "GPU"),
        model=read.record.onnx,
        weights=variant.variant,
        precision=precision,
        sparse_kernels=variant.sparse_weights,
        threads=None,
        timing=f"{one} on the GPU between CUDA events, without copies of inputs and outputs "
        "(trtexec's GPU Compute Time)",
        options=tuple(dict.fromkeys((*alike, *(() if rounds is None else rounds.arguments)))),
    )


def _layers(profile: Path) -> tuple[LayerTime, ...]:
    """Mean times of a profile; () where it is missing or damaged."""
    with contextlib.suppress(BadInputError):
        read = read_profile(profile)
        means = ((row.name, _mean_ms(row, read.iterations)) for row in read.layers)
        return tuple(LayerTime(name=name, mean_ms=ms) for name, ms in means if ms is not None)
    return ()


def _mean_ms(row: LayerProfile, iterations: int | None) -> float | None:
    if row.average_ms is not None or row.total_ms is None or not iterations:
        return row.average_ms
    return row.total_ms / iterations


def _notes(read: _Emitted, variants: Sequence[ComparedVariant]) -> tuple[str, ...]:
    rounds = read.times.rounds
    where = next(v.settings for v in variants if v.settings is not None)
    notes = [
        f"timed by trtexec of TensorRT {where.version or read.record.tensorrt} on {where.device}",
        f"both engines hold the weights of {read.record.onnx}: in {BASELINE} the builder was not "
        "allowed to use sparse kernels",
    ]
    if rounds is not None:
        notes.append("p90 and p99 are of all single runs, the samples are medians of the passes")
    if rounds is not None and rounds < LEAST_ROUNDS:
        notes.append(
            f"{rounds} rounds give no interval, it takes {LEAST_ROUNDS}: {read.record.script} "
            "times more with ROUNDS=n"
        )
    return tuple(notes)
