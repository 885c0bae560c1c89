"""The build stages: one per variant, and build.json over both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from twofour.engines.gpu import find_gpu
from twofour.engines.onnxruntime import CannotRunError, OnnxRuntimeEngine
from twofour.engines.opset_advice import opset_advice
from twofour.engines.protocol import BuildRequest
from twofour.engines.select import AUTO, choose_engine
from twofour.engines.shapes import beyond_ranges, bind_shapes, profiles_for, shapes_of
from twofour.engines.tensorrt.precision import (
    DEPRECATED,
    WEAK_IS_DEPRECATED,
    never_weakly_typed,
)
from twofour.errors import BuildFailedError
from twofour.pipeline.agreement import example_inputs
from twofour.pipeline.context import DENSE, INPUTS, SPARSE, Run, onnx_files, onnx_name
from twofour.pipeline.engine_host import (
    BUILT,
    CRASH_HINT,
    CrashedError,
    build_tensorrt,
    crashed_build,
    in_words,
    lasts,
)
from twofour.pipeline.onnx_io import describe, size_ranges
from twofour.pipeline.sessions import RUNTIMES
from twofour.pipeline.stages import Stage, versions
from twofour.records.build import BuildResult, EngineStatus, VariantBuild
from twofour.records.export import TensorShape
from twofour.records.options import EngineName
from twofour.records.run import ExportedVariant
from twofour.reports.context import ALWAYS_STRONGLY_TYPED, version_numbers

_TIMING_CACHE = "timing.cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenEngine:
    """The engine of a run, and what was preferred to it and cannot run here."""

    status: EngineStatus
    not_used: tuple[EngineStatus, ...]

    @property
    def builds_from_sparse(self) -> bool:
        """TensorRT: both engines come from sparse.onnx and differ in the sparsity flag alone."""
        return self.status.engine is EngineName.TENSORRT


def pick_engine(run: Run) -> ChosenEngine:
    """Choose by trying, and say so in one line where the preferred engine cannot run.

    Raises MissingToolError when nothing that was asked for can run here.
    """
    status, not_used = choose_engine(run.options.engine, run.host.status)
    for other in not_used:
        run.progress.note(
            f"{other.engine.value} cannot run here: {other.why_not}; "
            f"going on with {status.engine.value}"
        )
    return ChosenEngine(status=status, not_used=not_used)


def check_asked_shapes(run: Run, inputs: Sequence[TensorShape]) -> None:
    """Raises BadInputError where --shapes does not fit the model, whatever engine will run."""
    bind_shapes(run.options.build.shapes, inputs)


def settle_shapes(run: Run, chosen: ChosenEngine, exported: ExportedVariant) -> None:
    """One profile for each input with free sizes, by the names that the file has for them.

    The engine's own network knows no names. Where ONNX Runtime runs and nobody asked for shapes,
    the examples are timed as they are.
    """
    build = run.options.build
    if not (build.shapes or chosen.builds_from_sparse):
        return
    path = run.file(exported.file)
    examples = shapes_of(example_inputs(run))
    ranges = size_ranges(path)
    for note in beyond_ranges(build.shapes, exported.inputs, ranges):
        run.progress.note(f"WARNING: {note}")
    shapes = profiles_for(build.shapes, exported.inputs, examples, ranges)
    run.options = replace(run.options, build=replace(build, shapes=shapes))


def check_allowed_types(run: Run, chosen: ChosenEngine) -> None:
    """Say where --fp16, --int8 and --bf16 do nothing, and refuse them for TensorRT 11."""
    allow = run.options.build.allow
    version = chosen.status.version or ""
    if not allow:
        return
    words = ", ".join(f"--{allowed.value}" for allowed in allow)
    if not chosen.builds_from_sparse:
        run.progress.note(f"{words}: of TensorRT alone; {chosen.status.engine.value} runs the file")
    elif version_numbers(version) >= ALWAYS_STRONGLY_TYPED:
        raise never_weakly_typed(version, allow[0])
    elif version_numbers(version) >= WEAK_IS_DEPRECATED:
        run.progress.note(DEPRECATED)


def build_variant(run: Run, chosen: ChosenEngine, variant: str) -> VariantBuild:
    """Build one engine and time it; TensorRT leaves plan, log, layer information and profile."""
    source = run.file(onnx_name(SPARSE if chosen.builds_from_sparse else variant))

    def work() -> tuple[VariantBuild, Sequence[str]]:
        request = BuildRequest(
            variant=variant,
            onnx=source,
            folder=run.path,
            sparse_weights=variant == SPARSE,
            options=run.options.build,
            inputs=example_inputs(run),
            timing_cache=run.file(_TIMING_CACHE),
        )
        return _build(run, chosen, request), _left_by(run, variant)

    stage = Stage(
        name=f"build-{variant}",
        title=f"build {variant} with {chosen.status.engine.value}",
        record=f"stages/build-{variant}.json",
        depends={
            "engine": chosen.status.in_words,
            "options": asdict(run.options.build),
            "versions": versions(*RUNTIMES, "polygraphy"),
        },
        reads=(INPUTS, *onnx_files(source)),
    )
    return run.runner.run(stage, VariantBuild, work, lasting=lasts)


def build_result(run: Run, chosen: ChosenEngine, variants: tuple[VariantBuild, ...]) -> BuildResult:
    """build.json over the variants."""

    def work() -> tuple[BuildResult, Sequence[str]]:
        return BuildResult(
            engine=chosen.status,
            asked_for=run.options.engine,
            not_used=chosen.not_used,
            gpu=find_gpu(),
            options=run.options.build,
            variants=variants,
            notes=(*_notes(run, chosen), *_tries(variants)),
        ), ()

    stage = Stage(
        name="build",
        title="put the builds together",
        record="build.json",
        depends={
            "engine": chosen.status.in_words,
            "asked": run.options.engine,
            "no_baseline": run.no_baseline,
            "versions": versions(),
        },
        reads=tuple(f"stages/build-{v.variant}.json" for v in variants),
    )
    return run.runner.run(stage, BuildResult, work)


def refuse_crashed(built: BuildResult) -> None:
    """Raise BuildFailedError for an engine that ended its process: to be asked when all is done."""
    crashed = [
        f"{v.variant}: {v.latency.error}"
        for v in built.variants
        if v.failed_tries and v.latency.error
    ]
    if crashed:
        raise BuildFailedError("; ".join(crashed), hint=CRASH_HINT)


def refuse_all_failed(built: BuildResult) -> None:
    """Raise BuildFailedError where no variant could be run: a build alone gives nothing else."""
    failed = [f"{v.variant}: {v.latency.error}" for v in built.variants if v.latency.error]
    if failed and len(failed) == len(built.variants):
        raise BuildFailedError("; ".join(failed))


def _build(run: Run, chosen: ChosenEngine, request: BuildRequest) -> VariantBuild:
    """A build; with a row of what there is where the engine ends its process in every try."""
    try:
        if chosen.builds_from_sparse:
            run.sessions.close()
            return build_tensorrt(run.host, request, run.progress.step)
        return _build_onnxruntime(run, request)
    except CrashedError as error:
        run.progress.note(f"{request.variant}: no engine was built: {error}")
        return crashed_build(request, chosen.status.engine, error)


def _build_onnxruntime(run: Run, request: BuildRequest) -> VariantBuild:
    """The session that checked the file is timed too, not a second one."""
    engine = OnnxRuntimeEngine()
    try:
        session = run.sessions.open(request.onnx)
    except CrashedError:
        raise
    except BuildFailedError as error:
        # a type without a kernel is a row that says so; all else only where nobody asked for it
        if run.options.engine != AUTO and not isinstance(error, CannotRunError):
            raise
        return engine.not_built(request, error)
    built = engine.build_from(session, request, run.progress.step)
    return replace(built, failed_tries=session.failed_tries, level=session.level)


def _left_by(run: Run, variant: str) -> tuple[str, ...]:
    names = (f"{variant}{suffix}" for suffix in BUILT)
    return tuple(name for name in names if run.file(name).is_file())


def _notes(run: Run, chosen: ChosenEngine) -> Iterator[str]:
    if run.no_baseline is not None:
        yield run.no_baseline
    if not chosen.builds_from_sparse:
        yield (
            "no TensorRT engine was built: ONNX Runtime ran dense kernels, "
            "and every verdict is predicted from the rules"
        )
        return
    yield f"both engines were built from {onnx_name(SPARSE)}; {DENSE} had sparsity off"
    if run.options.build.allow:
        types = ", ".join(allowed.name for allowed in run.options.build.allow)
        yield f"weakly typed: beside float32 the builder was allowed {types}"
    *_, opset = describe(run.file(onnx_name(SPARSE)))
    advice = opset_advice(chosen.status.version, opset)
    if advice is not None:
        yield advice


def _tries(variants: Sequence[VariantBuild]) -> Iterator[str]:
    """What was built at a lower optimization level than the others, and why."""
    for built in variants:
        if built.failed_tries and built.latency.error is None:
            yield (
                f"{built.variant}: {in_words(built.failed_tries)}; it was built and timed at "
                f"level {built.level}, so its times do not compare with another level's"
            )
