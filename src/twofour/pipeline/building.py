"""The build stages: one per variant, and build.json over them and their times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from twofour.engines.inputs import beyond_ranges, bind_shapes, profiles_for, shapes_of
from twofour.engines.machine import find_gpu
from twofour.engines.onnxruntime.engine import not_opened, opened
from twofour.engines.onnxruntime.session import CannotRunError
from twofour.engines.protocol import BuildRequest
from twofour.engines.registry import AUTO, EngineRow
from twofour.engines.tensorrt.build import opset_advice
from twofour.errors import BuildFailedError
from twofour.latency.naming import parse_variant_name
from twofour.pipeline.agreement import example_inputs
from twofour.pipeline.engine_host import (
    CRASH_HINT,
    CrashedError,
    build_in,
    crashed_build,
    in_words,
    lasts,
)
from twofour.pipeline.stages import (
    DENSE,
    INPUTS,
    SPARSE,
    Made,
    Run,
    Stage,
    onnx_files,
    onnx_name,
)
from twofour.pipeline.timing import TIMES
from twofour.records.build import VariantBuild
from twofour.records.export import TensorShape
from twofour.records.latency import ComparedVariant, LatencyComparison
from twofour.records.options import BuildOptions, Variant
from twofour.records.run import BuildResult, ExportedVariant

_TIMING_CACHE = "timing.cache"


def check_asked_shapes(run: Run, inputs: Sequence[TensorShape]) -> None:
    """Raises BadInputError where --shapes does not fit the model, whatever engine will run."""
    bind_shapes(run.options.build.shapes, inputs)


def with_profiles(run: Run, exported: ExportedVariant) -> BuildOptions:
    """The build options, with one profile for each input with free sizes, by the file's names.

    The engine's own network knows no names. Where ONNX Runtime runs and nobody asked for shapes,
    the examples are timed as they are.
    """
    build = run.options.build
    if not (build.shapes or run.options.builder.builds_from_sparse):
        return build
    examples = shapes_of(example_inputs(run))
    ranges = run.models.open(run.file(exported.onnx.file)).size_ranges
    for note in beyond_ranges(build.shapes, exported.inputs, ranges):
        run.progress.note(f"WARNING: {note}")
    shapes = profiles_for(build.shapes, exported.inputs, examples, ranges)
    return replace(build, shapes=shapes)


def build_variant(run: Run, build: BuildOptions, variant: Variant) -> Stage[VariantBuild]:
    """Build one engine; TensorRT leaves plan, log, layer information and profile."""
    chosen = run.options.builder
    source = run.file(onnx_name(SPARSE if chosen.builds_from_sparse else variant))

    def work() -> Made[VariantBuild]:
        request = BuildRequest(
            variant=variant,
            onnx=source,
            folder=run.path,
            sparse_weights=variant == SPARSE,
            options=build,
            inputs=example_inputs(run),
            timing_cache=run.file(_TIMING_CACHE),
        )
        return _build(run, request), _left_by(run, chosen.row, variant)

    return Stage(
        name=f"build-{variant}",
        title=f"build {variant} with {chosen.status.engine}",
        record=f"stages/build-{variant}.json",
        kind=VariantBuild,
        work=work,
        lasting=lasts,
        options=("engine",),
        # how it is timed changes no engine
        facts={"engine": chosen.status.in_words, "build": replace(build, iterations=1, warmup=0)},
        packages=chosen.row.packages,
        reads=(INPUTS, *onnx_files(source)),
    )


def build_result(
    run: Run,
    build: BuildOptions,
    variants: tuple[VariantBuild, ...],
    times: LatencyComparison,
    no_baseline: str | None = None,
) -> Stage[BuildResult]:
    """build.json over the variants."""
    chosen = run.options.builder

    def work() -> Made[BuildResult]:
        return BuildResult(
            engine=chosen.status,
            asked_for=run.options.engine,
            not_used=chosen.not_used,
            gpu=find_gpu(),
            options=build,
            variants=variants,
            times=times,
            notes=(*filter(None, [no_baseline]), *_notes(run), *_tries(variants)),
        ), ()

    return Stage(
        name="build",
        title="put the builds together",
        record="build.json",
        kind=BuildResult,
        work=work,
        options=("engine",),
        facts={"engine": chosen.status.in_words, "no_baseline": no_baseline},
        reads=(*(f"stages/build-{v.variant}.json" for v in variants), TIMES),
    )


def refuse_crashed(built: BuildResult) -> None:
    """Raise BuildFailedError for an engine that ended its process: to be asked when all is done."""
    crashed = [f"{weights}: {v.error}" for weights, v in _failed(built) if v.hint == CRASH_HINT]
    if crashed:
        raise BuildFailedError("; ".join(crashed), hint=CRASH_HINT)


def refuse_all_failed(built: BuildResult) -> None:
    """Raise BuildFailedError where no variant could be run: a build alone gives nothing else."""
    failed = [f"{weights}: {v.error}" for weights, v in _failed(built)]
    if failed and len(failed) == len(built.variants):
        raise BuildFailedError("; ".join(failed))


def _failed(built: BuildResult) -> Iterator[tuple[str, ComparedVariant]]:
    for row in built.times.variants:
        name = parse_variant_name(row.name)
        if row.error is not None and not name.again:
            yield name.weights, row


def _build(run: Run, request: BuildRequest) -> VariantBuild:
    """A build; with a row of what there is where the engine ends its process in every try."""
    row = run.options.builder.row
    try:
        if row.is_reference:
            return _build_in_session(run, request)
        run.sessions.close()
        return build_in(run.host, row, request, run.progress.step)
    except CrashedError as error:
        run.progress.note(f"{request.variant}: no engine was built: {error}")
        return crashed_build(request, row, error)


def _build_in_session(run: Run, request: BuildRequest) -> VariantBuild:
    """The session that checked the file is taken, not a second one."""
    try:
        session = run.sessions.open(request.onnx)
    except CrashedError:
        raise
    except BuildFailedError as error:
        # a type without a kernel is a row that says so; all else only where nobody asked for it
        if run.options.engine != AUTO and not isinstance(error, CannotRunError):
            raise
        return not_opened(request, error)
    built = opened(request, load_s=session.load_s, providers=session.providers)
    return replace(built, failed_tries=session.failed_tries, level=session.level)


def _left_by(run: Run, row: EngineRow, variant: Variant) -> tuple[str, ...]:
    names = (f"{variant}{suffix}" for suffix in row.leaves)
    return tuple(name for name in names if run.file(name).is_file())


def _notes(run: Run) -> Iterator[str]:
    chosen = run.options.builder
    if not chosen.builds_from_sparse:
        yield (
            f"no TensorRT engine was built: {chosen.row.title} ran dense kernels, to which zeros "
            "bring no speed, and every verdict is predicted from the rules"
        )
        return
    yield f"both engines were built from {onnx_name(SPARSE)}; {DENSE} had sparsity off"
    if run.options.build.allow:
        types = ", ".join(allowed.name for allowed in run.options.build.allow)
        yield f"weakly typed: beside float32 the builder was allowed {types}"
    opset = run.models.open(run.file(onnx_name(SPARSE))).opset
    advice = opset_advice(chosen.status.version, opset)
    if advice is not None:
        yield advice


def _tries(variants: Sequence[VariantBuild]) -> Iterator[str]:
    """What was built at a lower optimization level than the others, and why."""
    for built in variants:
        if built.failed_tries and built.error is None:
            yield (
                f"{built.variant}: {in_words(built.failed_tries)}; it was built and timed at "
                f"level {built.level}, so its times do not compare with another level's"
            )
