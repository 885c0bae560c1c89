"""Times that trtexec measured elsewhere, as a comparison."""

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from twofour.engines.tensorrt.build import precisions_of
from twofour.engines.trtexec import AGAIN, DENSE
from twofour.errors import BadInputError
from twofour.graph.opened import OpenedModel, open_onnx
from twofour.latency.layers import contrasts
from twofour.latency.noise import LEAST_ROUNDS
from twofour.latency.ratios import ratios_and_noise, unpaired_ratios
from twofour.latency.variants import variant_name, with_samples
from twofour.logs.layer_info import read_profile
from twofour.pipeline.emitting import failed_variants, read_emitted
from twofour.pipeline.evidence import read_build
from twofour.records.build import LayerTime, TrtexecFolder, TrtexecRounds, TrtexecVariant
from twofour.records.latency import (
    ComparedVariant,
    LatencyComparison,
    LatencyRatio,
    NoiseFloor,
    VariantSettings,
)
from twofour.records.log import Build, LayerProfile
from twofour.records.options import CompareOptions

_DEFAULT_WARMUP_MS = 200
"""trtexec's --warmUp where it is not given (defaultWarmUp in sampleOptions.h)."""
Passes = Mapping[int, tuple[float, ...]]
"""Round -> milliseconds of the single runs."""
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


def read_times(path: Path, *, warmup_ms: float = _DEFAULT_WARMUP_MS) -> tuple[float, ...]:
    """Milliseconds that the GPU computed for each run behind the warm-up, in order.

    Older releases export the warm-up too; as in trtexec's own summary, the first run that starts
    behind it is the first to count. Raises BadInputError for a file that cannot be read or holds no
    time.
    """
    rows = _rows(path)
    first = next((n for n, row in enumerate(rows) if _started(row) >= warmup_ms), len(rows))
    times = tuple(ms for row in rows[first:] if (ms := _number(row, "computeMs")) is not None)
    if not times or min(times) <= 0:
        raise BadInputError(
            f"no times in {path}", hint="trtexec --exportTimes=FILE writes them; run it again"
        )
    return times


def _rows(path: Path) -> list[dict[str, object]]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path} is damaged: {error}", hint="copy or make it again") from error
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _started(row: dict[str, object]) -> float:
    """From the beginning of the warm-up; a row that does not say is counted as behind it."""
    started = _number(row, "startComputeMs")
    return math.inf if started is None else started


def _number(row: dict[str, object], key: str) -> float | None:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON allows whole numbers of any length
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """What there is of one engine."""

    engine: str
    """Name of a variant, with "-again" behind it where its plan was timed a second time."""
    samples_ms: tuple[float, ...]
    """In rounds the median of each; else every run."""
    runs_ms: tuple[float, ...]
    """Every run."""
    error: str | None = None
    """Why there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmittedTimes:
    """All times of a folder."""

    engines: tuple[EngineTimes, ...]
    rounds: int | None
    """In which every engine was timed; None: one run for each engine, one after the other."""
    notes: tuple[str, ...] = ()


def read_emitted_times(folder: Path, emitted: TrtexecFolder) -> EmittedTimes:
    """Of the rounds where both variants were timed in one; else of the runs behind the builds.

    Raises BadInputError where there are no times at all.
    """
    notes: tuple[str, ...] = ()
    if emitted.rounds is not None:
        found = _read_rounds(folder, emitted.rounds)
        needed = {variant.variant for variant in emitted.variants}
        if found.rounds and needed <= {e.engine for e in found.engines if e.samples_ms}:
            return found
        notes = found.notes
    dense_first = sorted(emitted.variants, key=lambda variant: variant.sparse_weights)
    engines = tuple(_read_single(folder, variant) for variant in dense_first)
    if not any(engine.samples_ms for engine in engines):
        raise BadInputError(
            f"{folder} holds no times: " + "; ".join(str(e.error) for e in engines),
            hint=f"run {emitted.script} in it on a machine with TensorRT {emitted.tensorrt}, and "
            "copy the whole folder back (only the .plan files may stay)",
        )
    return EmittedTimes(engines=engines, rounds=None, notes=(*notes, _unpaired(emitted)))


def _unpaired(emitted: TrtexecFolder) -> str:
    remedy = (
        "make the folder again with this twofour to time in rounds"
        if emitted.rounds is None
        else f"{emitted.script} times in rounds unless ROUNDS is 0"
    )
    return (
        "each engine was timed in one run, right behind its build: what changed between the two "
        "runs (clocks, heat, other work) is in the ratio and not in its interval, and no noise is "
        f"known; {remedy}"
    )


def _read_rounds(folder: Path, rounds: TrtexecRounds) -> EmittedTimes:
    """The rounds in which every engine was timed that was timed at all."""
    place = folder / rounds.folder
    numbers = _round_numbers(place, rounds.engines)
    passes = {engine: _read_passes(place, engine, numbers, rounds) for engine in rounds.engines}
    timed = [engine for engine in rounds.engines if passes[engine]]
    whole = [n for n in numbers if timed and all(n in passes[engine] for engine in timed)]
    return EmittedTimes(
        engines=tuple(_engine_times(name, passes[name], whole) for name in rounds.engines),
        rounds=len(whole),
        notes=tuple(
            _missing(rounds.folder, engine, missing)
            for engine in rounds.engines
            if (missing := [n for n in numbers if n not in passes[engine]])
        ),
    )


def _round_numbers(place: Path, engines: Sequence[str]) -> list[int]:
    """Rounds that were begun: a pass that failed has left its log."""
    names = re.compile(f"(?:{'|'.join(map(re.escape, engines))})\\.([0-9]{{1,3}})\\.(?:json|log)")
    entries = place.iterdir() if place.is_dir() else ()
    found = (names.fullmatch(entry.name) for entry in entries)
    return sorted({int(match[1]) for match in found if match is not None})


def _read_passes(
    place: Path, engine: str, numbers: Sequence[int], rounds: TrtexecRounds
) -> dict[int, tuple[float, ...]]:
    passes: dict[int, tuple[float, ...]] = {}
    for number in numbers:
        try:
            file = place / f"{engine}.{number}.json"
            passes[number] = read_times(file, warmup_ms=rounds.warmup_ms)
        except BadInputError:
            continue
    return passes


def _engine_times(engine: str, passes: Passes, whole: Sequence[int]) -> EngineTimes:
    if not passes:
        return EngineTimes(
            engine=engine, samples_ms=(), runs_ms=(), error="no timing pass of it left its times"
        )
    return EngineTimes(
        engine=engine,
        samples_ms=tuple(statistics.median(passes[number]) for number in whole),
        runs_ms=tuple(ms for number in whole for ms in passes[number]),
    )


def _missing(folder: str, engine: str, numbers: Sequence[int]) -> str:
    which = ("round " if len(numbers) == 1 else "rounds ") + ", ".join(map(str, numbers))
    return (
        f"{engine} has no times of {which}, left out for all engines: "
        f"see {folder}/{engine}.{numbers[0]}.log"
    )


def _read_single(folder: Path, variant: TrtexecVariant) -> EngineTimes:
    try:
        times = read_times(folder / variant.times)
    except BadInputError as error:
        failed = variant.variant in failed_variants(folder)
        why = f"trtexec failed: {variant.log} says why" if failed else error.message
        return EngineTimes(engine=variant.variant, samples_ms=(), runs_ms=(), error=why)
    return EngineTimes(engine=variant.variant, samples_ms=times, runs_ms=times)


def compare_emitted(folder: Path, options: CompareOptions) -> LatencyComparison:
    """Compare what build.sh of an emitted folder left, once the folder is back.

    A sample is the median of a round's pass; without rounds it is one run, and the ratio is of two
    runs of trtexec one after the other. Raises BadInputError for a folder without times, and for
    options that ask for a measurement: nothing is measured here.
    """
    emitted = read_emitted(folder)
    _refuse(options, emitted.script)
    times = read_emitted_times(folder, emitted)
    model = None
    with contextlib.suppress(BadInputError):  # it may have stayed on the other machine
        model = open_onnx(folder / emitted.onnx)
    read = _Emitted(folder=folder, record=emitted, times=times, builds=_builds(folder, emitted))
    batch = _batch(emitted, model)
    precision = "unknown" if model is None else precisions_of(model.proto).in_words
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
    builds: dict[str, Build] = {}
    for variant in emitted.variants:
        with contextlib.suppress(BadInputError):
            dense = not variant.sparse_weights
            builds[variant.variant] = read_build(folder / variant.log, dense=dense)
    return builds


def _batch(emitted: TrtexecFolder, model: OpenedModel | None) -> int | None:
    """Length of the inputs' first axis in the timed runs."""
    shapes: dict[str, Sequence[int | str]] = {p.input: p.opt for p in emitted.options.shapes}
    if model is not None:
        shapes = {i.name: i.shape for i in model.inputs} | shapes
    lengths = {shape[0] if shape else None for shape in shapes.values()}
    length = lengths.pop() if len(lengths) == 1 else None
    return length if isinstance(length, int) else None


def _variant(
    read: _Emitted, times: EngineTimes, batch: int | None, precision: str
) -> ComparedVariant:
    variant = read.variant_of(times.engine)
    again = times.engine != variant.variant
    build = read.builds.get(variant.variant)
    plan = read.folder / variant.plan
    row = ComparedVariant(
        name=variant_name(variant.variant, ENGINE, MODE, again=again),
        error=times.error,
        batch=batch,
        settings=_settings(read, variant, precision),
        size_bytes=plan.stat().st_size if plan.is_file() else None,
        open_s=None if build is None else build.build_s,
        layers=() if again else _layers(read.folder / variant.profile),
    )
    return with_samples(row, times.samples_ms, times.runs_ms)


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
