"""A folder to build on another machine: model and build.sh go there, and its times come back."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median

from twofour.eligibility.build_facts import DEPRECATED, Typing
from twofour.engines.tensorrt.bindings import Precisions, opset_advice, precisions_of
from twofour.engines.tensorrt.plan import plan_mode
from twofour.engines.timing import with_samples
from twofour.engines.trtexec import (
    AGAIN,
    DENSE,
    ONNX,
    Releases,
    releases_of,
    script_text,
    trtexec_commands,
)
from twofour.errors import BadInputError, system_errors
from twofour.graph.opened import OpenedModel, open_onnx
from twofour.inputs.examples import beyond_ranges, bind_shapes, profiles_for
from twofour.inputs.fits import Shapes, is_fixed
from twofour.latency.noise import LEAST_ROUNDS
from twofour.latency.ratios import contrasts, ratios_and_noise
from twofour.logs.layer_info import read_profile
from twofour.packages import __version__
from twofour.pipeline.evidence_files import EMITTED, failed_variants, read_build, read_emitted
from twofour.pipeline.folder import LAYERS, is_run_folder, onnx_name
from twofour.pipeline.onnx.model import write_onnx
from twofour.pipeline.stages import refuse_kept_without_change, shapes_of_file, with_inputs_beside
from twofour.pipeline.validating import refuse_other_files, why_not_sparse
from twofour.records.export import LayerMap, LayerTime, TrtexecFolder, TrtexecRounds, TrtexecVariant
from twofour.records.latency import (
    ComparedVariant,
    LatencyComparison,
    VariantSettings,
    variant_name,
)
from twofour.records.log import Build, SparsityFlag
from twofour.records.options import AllowedType, CompareOptions, RunOptions, ShapeProfile
from twofour.store import read_record, write_record, write_text

SCRIPT = "build.sh"
_EXECUTABLE = 0o111
Passes = Mapping[int, tuple[float, ...]]
"""Round -> milliseconds of the single runs."""
ENGINE = "trtexec"
_NO_GRAPH = "--useCudaGraph flag has been ignored"
"""What trtexec says of an engine that cannot be captured (samples/common/sampleInference.cpp)."""


def emit_trtexec(onnx: Path, folder: Path, options: RunOptions, version: str) -> TrtexecFolder:
    """Fill a new or empty folder with all that a machine with trtexec of `version` needs.

    The dense engine is that of --dense-reference, else of the dense.onnx beside the sparse.onnx of
    a run. Raises BadInputError for a file that is no ONNX model, a folder that is not empty, a
    version without a script, and a dynamic shape that is not given; nothing is left in the folder
    then.
    """
    releases = releases_of(version)
    refuse_other_files(onnx)
    refuse_kept_without_change(options, options.precision)
    model = open_onnx(onnx)
    build = replace(options.build, shapes=_profiles(model, options))
    with _fresh_folder(folder):
        layer_map = _copy_layer_map(onnx.parent, folder)
        converted = write_onnx(model, folder / ONNX, options)
        dense = _write_dense(onnx, folder, options)
        precisions = precisions_of(open_onnx(folder / ONNX).proto)
        variants, rounds = trtexec_commands(releases, build, precisions, dense)
        advice = _advice(model, options, releases, precisions)
        emitted = TrtexecFolder(
            source=str(onnx),
            twofour_version=__version__,
            tensorrt=str(releases),
            onnx=ONNX,
            script=SCRIPT,
            layer_map=layer_map,
            options=build,
            variants=variants,
            rounds=rounds,
            notes=tuple(filter(None, (*converted, *advice))),
        )
        script = folder / SCRIPT
        write_text(script, script_text(releases, variants, rounds))
        script.chmod(script.stat().st_mode | _EXECUTABLE)
        # the record comes last: it is what makes the folder one of ours
        write_record(folder / EMITTED, emitted)
    return emitted


def _write_dense(onnx: Path, folder: Path, options: RunOptions) -> str:
    """Copy the dense model, if there is one; gives the file that the dense engine is built from."""
    name = onnx_name(DENSE)
    beside = onnx.with_name(name)
    given = options.dense_reference
    if given is None and onnx.name == ONNX and is_run_folder(onnx.parent) and beside.is_file():
        given = str(beside)
    if given is None:
        return ONNX
    write_onnx(open_onnx(Path(given)), folder / name, options)
    return name


def _copy_layer_map(source: Path, folder: Path) -> str | None:
    """Take the names of the layers along, where the model comes from a run folder."""
    layers = source / LAYERS
    if not is_run_folder(source) or not layers.is_file():
        return None
    read_record(LayerMap, layers)
    shutil.copyfile(layers, folder / LAYERS)
    return LAYERS


def _advice(
    model: OpenedModel, options: RunOptions, releases: Releases, precisions: Precisions
) -> Iterator[str | None]:
    """What to know of the file, its shapes, and what --fp16, --int8 and --bf16 mean for it."""
    yield opset_advice(str(releases), model.opset)
    yield why_not_sparse(model, str(model.path))
    yield from beyond_ranges(options.build.shapes, model.inputs, model.size_ranges)
    allow = options.build.allow
    if allow and releases.typing is not Typing.WEAK:
        yield DEPRECATED
    if AllowedType.INT8 in allow and not precisions.int8:
        yield (
            "the file has no Q/DQ nodes: with --int8 trtexec makes up ranges, so its outputs "
            "are of no use; its times and tactics are those of INT8"
        )


def _profiles(model: OpenedModel, options: RunOptions) -> tuple[ShapeProfile, ...]:
    """The profiles of a build here, from --shapes and the shapes of the run's example inputs."""
    asked = bind_shapes(options.build.shapes, model.inputs)
    examples: Shapes = {}
    free = {tensor.name for tensor in model.inputs if not is_fixed(tensor)}
    if free - {profile.input for profile in asked}:
        examples = shapes_of_file(model, with_inputs_beside(model.path, options))
    return profiles_for(asked, model.inputs, examples, model.size_ranges)


@contextlib.contextmanager
def _fresh_folder(folder: Path) -> Iterator[None]:
    """A new or empty folder to write into; no file stays in it where that fails."""
    with system_errors(f"cannot use {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        entries = [entry.name for entry in folder.iterdir()]
    if entries:
        raise BadInputError(
            f"{folder} is not empty (it contains {entries[0]!r})",
            hint="name a new folder; nothing in this one was touched",
        )
    try:
        yield
    except BaseException:  # an interrupt leaves nothing either
        for entry in folder.iterdir():
            entry.unlink()
        raise


def read_trtexec_times(path: Path, *, warmup_ms: float) -> tuple[float, ...]:
    """Milliseconds that the GPU computed for each run behind the warm-up, in order.

    Older releases export the warm-up too. Raises BadInputError for a file that cannot be read or
    contains no time.
    """
    with system_errors(f"cannot read {path}"):
        text = path.read_bytes()
    # [{"startComputeMs": 212.4, "computeMs": 0.83, ...}, ...]
    try:
        rows = [r for r in json.loads(text) if r.get("startComputeMs", math.inf) >= warmup_ms]
        times = tuple(float(row["computeMs"]) for row in rows)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        times = ()
    if not times or not all(0 < ms < math.inf for ms in times):
        raise BadInputError(
            f"no times in {path}", hint="trtexec --exportTimes=FILE writes them; run it again"
        )
    return times


def compare_emitted(folder: Path, options: CompareOptions) -> LatencyComparison:
    """Compare what build.sh of an emitted folder left, once the folder is back.

    A sample is the median of a round's pass. Raises BadInputError for a folder without rounds, and
    for options that ask for a measurement: nothing is measured here.
    """
    emitted = read_emitted(folder)
    _refuse(options, emitted)
    passes = _read_passes(folder, emitted.rounds)
    whole = _whole_rounds(folder, emitted, passes)
    model = open_onnx(folder / emitted.onnx)
    variants = tuple(_rows(folder, emitted, passes, whole, model))
    baseline = _baseline(emitted)
    ratios, noise = ratios_and_noise(variants, baseline, options.seed)
    return LatencyComparison(
        source=str(folder),
        baseline=baseline,
        machine=None,
        options=replace(options, rounds=len(whole), warmup=0),
        variants=variants,
        ratios=ratios,
        noise=noise,
        layers=contrasts(variants, ratios, model.nodes),
        notes=(*_left_out(emitted.rounds, passes, whole), *_notes(emitted, variants, len(whole))),
    )


def _read_passes(folder: Path, rounds: TrtexecRounds) -> Mapping[str, Passes]:
    """The times of each engine by round; {} for one that was never timed."""
    passes: dict[str, dict[int, tuple[float, ...]]] = {engine: {} for engine in rounds.engines}
    place = folder / rounds.folder
    # times/sparse.3.json is the pass of the sparse engine in round 3
    for path in place.glob("*"):
        engine, _, number = path.name.removesuffix(".json").partition(".")
        if path.suffix == ".json" and engine in passes and number.isdecimal():
            with contextlib.suppress(BadInputError):  # a damaged file costs its round alone
                passes[engine][int(number)] = read_trtexec_times(path, warmup_ms=rounds.warmup_ms)
    return passes


def _whole_rounds(folder: Path, emitted: TrtexecFolder, passes: Mapping[str, Passes]) -> list[int]:
    """The rounds in which every engine was timed that was timed at all; raises without any."""
    timed = [rounds.keys() for rounds in passes.values() if rounds]
    if timed:
        whole = set(timed[0]).intersection(*timed)
        if whole:
            return sorted(whole)
    why = ""
    for variant in failed_variants(folder)[:1]:
        why = f": trtexec failed, {variant}.log says why"
    raise BadInputError(
        f"{folder} contains no times of whole rounds{why}",
        hint=f"run {emitted.script} in it on a machine with TensorRT {emitted.tensorrt}, "
        "without ROUNDS=0, and copy the whole folder back (only the .plan files may stay)",
    )


def _left_out(
    rounds: TrtexecRounds, passes: Mapping[str, Passes], whole: Sequence[int]
) -> Iterator[str]:
    begun = {number for timed in passes.values() for number in timed}
    missing = ", ".join(map(str, sorted(begun.difference(whole))))
    if missing:
        yield f"left out, as an engine has no times of it: round {missing} ({rounds.folder}/*.log)"


def _baseline(emitted: TrtexecFolder) -> str:
    """Name of the engine that is not allowed sparse kernels."""
    return next(_name(variant) for variant in emitted.variants if variant.variant == DENSE)


def _name(variant: TrtexecVariant, *, again: bool = False) -> str:
    return variant_name(variant.weights, ENGINE, plan_mode(variant), again=again)


def _refuse(options: CompareOptions, emitted: TrtexecFolder) -> None:
    # what is left of the options once all are dropped that would need a measurement
    kept = CompareOptions(seed=options.seed, fail_if=options.fail_if, trust=options.trust)
    if options != kept:
        raise BadInputError(
            f"these engines were timed by trtexec, {_baseline(emitted)} twice: only --seed and "
            "--fail-if apply",
            hint=f"leave the others out; ROUNDS=n sh {emitted.script} changes the rounds there",
        )


def _rows(
    folder: Path,
    emitted: TrtexecFolder,
    passes: Mapping[str, Passes],
    whole: Sequence[int],
    model: OpenedModel,
) -> Iterator[ComparedVariant]:
    """A row for each engine, with the medians of its passes as samples, or why there are none."""
    builds = _builds(folder, emitted)
    precision = precisions_of(model.proto).in_words
    for engine, timed in passes.items():
        again = engine.endswith(AGAIN)
        name = engine.removesuffix(AGAIN)
        variant = next(v for v in emitted.variants if v.variant == name)
        build = builds.get(name)
        row = ComparedVariant(
            name=_name(variant, again=again),
            batch=_batch(emitted, model),
            settings=_settings(folder, emitted, variant, builds, precision),
            size_bytes=_size_of(folder / variant.plan),
            open_s=None if build is None else build.build_s,
            layers=() if again else _layers(folder / variant.profile),
            error=None if timed else "no timing pass of it left its times",
        )
        rounds = [timed[number] for number in whole if timed]
        yield with_samples(row, [*map(median, rounds)], [*chain.from_iterable(rounds)])


def _size_of(plan: Path) -> int | None:
    """Its bytes; None where it stayed on the other machine."""
    return plan.stat().st_size if plan.is_file() else None


def _builds(folder: Path, emitted: TrtexecFolder) -> dict[str, Build]:
    """What the logs say of each variant; a log may be missing or say nothing."""
    builds: dict[str, Build] = {}
    for variant in emitted.variants:
        wanted = SparsityFlag.ENABLED if variant.sparse_weights else SparsityFlag.DISABLED
        with contextlib.suppress(BadInputError):
            builds[variant.variant] = read_build(folder / variant.log, wanted).build
    return builds


def _batch(emitted: TrtexecFolder, model: OpenedModel) -> int | None:
    """The size that the first axes of all inputs have; None where they differ or are free."""
    shapes: dict[str, Sequence[int | str]] = {each.name: each.shape for each in model.inputs}
    shapes |= {profile.input: profile.opt for profile in emitted.options.shapes}
    first = {shape[0] if shape else None for shape in shapes.values()}  # {8} of (8, 3, 224, 224)
    size = first.pop() if len(first) == 1 else None
    return size if isinstance(size, int) else None


def _settings(
    folder: Path,
    emitted: TrtexecFolder,
    variant: TrtexecVariant,
    builds: Mapping[str, Build],
    precision: str,
) -> VariantSettings:
    """The settings of a variant; what one log says is true of both, because one script ran both."""
    read = [builds[v] for v in (variant.variant, *builds) if v in builds]
    # --saveEngine=sparse.plan is of one variant, --noTF32 of both
    alike = list(variant.arguments)
    for other in emitted.variants:
        alike = [argument for argument in alike if argument in other.arguments]
    return VariantSettings(
        engine=ENGINE,
        mode=plan_mode(variant),
        version=next((b.tensorrt_version for b in read if b.tensorrt_version), None),
        device=next((b.gpu for b in read if b.gpu), "GPU"),
        model=variant.onnx,
        weights=variant.weights,
        precision=precision,
        sparse_kernels=variant.sparse_weights,
        threads=None,
        timing=_timing_words(folder / emitted.rounds.folder, emitted.rounds, variant),
        options=tuple(dict.fromkeys((*alike, *emitted.rounds.arguments))),
    )


def _timing_words(times: Path, rounds: TrtexecRounds, variant: TrtexecVariant) -> str:
    seconds = rounds.duration_ms / 1000
    words = (
        f"the median of {seconds:g} s of runs on the GPU between CUDA events, without copies of "
        "inputs and outputs (trtexec's GPU Compute Time)"
    )
    for log in times.glob(f"{variant.variant}.*.log"):
        if _NO_GRAPH in log.read_text(encoding="utf-8", errors="replace"):
            return f"{words}; no CUDA graph could be captured"
    return words


def _layers(profile: Path) -> tuple[LayerTime, ...]:
    """Mean times of a profile; () where it is missing or damaged."""
    try:
        rows = read_profile(profile).layers
    except BadInputError:
        return ()
    return tuple(
        LayerTime(name=row.name, mean_ms=row.average_ms)
        for row in rows
        if row.average_ms is not None
    )


def _notes(
    emitted: TrtexecFolder, variants: Sequence[ComparedVariant], rounds: int
) -> Iterator[str]:
    where = next(v.settings for v in variants if v.settings is not None)
    yield f"timed by trtexec of TensorRT {where.version or emitted.tensorrt} on {where.device}"
    yield "p90 and p99 are of all single runs, the samples are medians of the passes"
    if rounds < LEAST_ROUNDS:
        yield (
            f"{rounds} rounds give no interval, it takes {LEAST_ROUNDS}: run {emitted.script} with "
            "ROUNDS=n for more"
        )
