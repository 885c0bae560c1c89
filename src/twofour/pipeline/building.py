"""The build stages: one per variant, and build.json over both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from twofour.engines.gpu import find_gpu
from twofour.engines.onnxruntime import CannotRunError, OnnxRuntimeEngine
from twofour.engines.opset_advice import opset_advice
from twofour.engines.protocol import BuildRequest, Engine
from twofour.engines.select import AUTO, choose_engine
from twofour.engines.shapes import bind_shapes, profiles_for, shapes_of
from twofour.errors import BuildFailedError
from twofour.pipeline.agreement import example_inputs
from twofour.pipeline.context import DENSE, INPUTS, SPARSE, Run, onnx_files, onnx_name
from twofour.pipeline.onnx_io import describe, size_ranges
from twofour.pipeline.stages import Stage, versions
from twofour.records import (
    BuildResult,
    EngineName,
    EngineStatus,
    ExportedVariant,
    TensorShape,
    VariantBuild,
)

_TIMING_CACHE = "timing.cache"
_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "polygraphy")
_SUFFIXES = (".plan", ".log", ".layers.json", ".profile.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenEngine:
    """The engine of a run, and what was preferred to it and cannot run here."""

    engine: Engine
    status: EngineStatus
    not_used: tuple[EngineStatus, ...]

    @property
    def builds_from_sparse(self) -> bool:
        """TensorRT: both engines come from sparse.onnx and differ in the sparsity flag alone."""
        return self.engine.name is EngineName.TENSORRT


def pick_engine(run: Run) -> ChosenEngine:
    """Choose by trying, and say so in one line where the preferred engine cannot run.

    Raises MissingToolError when nothing that was asked for can run here.
    """
    engine, status, not_used = choose_engine(run.options.engine)
    for other in not_used:
        run.progress.note(
            f"{other.engine.value} cannot run here: {other.why_not}; "
            f"going on with {status.engine.value}"
        )
    return ChosenEngine(engine=engine, status=status, not_used=not_used)


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
    shapes = profiles_for(build.shapes, exported.inputs, examples, size_ranges(path))
    run.options = replace(run.options, build=replace(build, shapes=shapes))


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
        return _build(run, chosen.engine, request), _left_by(run, variant)

    stage = Stage(
        name=f"build-{variant}",
        title=f"build {variant} with {chosen.status.engine.value}",
        record=f"stages/build-{variant}.json",
        depends={
            "engine": chosen.status.in_words,
            "options": asdict(run.options.build),
            "versions": versions(*_PACKAGES),
        },
        reads=(INPUTS, *onnx_files(source)),
    )
    return run.runner.run(stage, VariantBuild, work)


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
            notes=tuple(_notes(run, chosen)),
        ), ()

    stage = Stage(
        name="build",
        title="put the builds together",
        record="build.json",
        depends={
            "engine": chosen.status.in_words,
            "asked": run.options.engine,
            "versions": versions(),
        },
        reads=tuple(f"stages/build-{v.variant}.json" for v in variants),
    )
    return run.runner.run(stage, BuildResult, work)


def _build(run: Run, engine: Engine, request: BuildRequest) -> VariantBuild:
    """With ONNX Runtime the session that checked the file is timed too, not a second one."""
    if not isinstance(engine, OnnxRuntimeEngine):
        run.sessions.close()
        return engine.build(request, run.progress.step)
    try:
        session = run.sessions.open(request.onnx)
    except BuildFailedError as error:
        # a type without a kernel is a row that says so; all else only where nobody asked for it
        if run.options.engine != AUTO and not isinstance(error, CannotRunError):
            raise
        return engine.not_built(request, error)
    return engine.build_from(session, request, run.progress.step)


def _left_by(run: Run, variant: str) -> tuple[str, ...]:
    names = (f"{variant}{suffix}" for suffix in _SUFFIXES)
    return tuple(name for name in names if run.file(name).is_file())


def _notes(run: Run, chosen: ChosenEngine) -> Iterator[str]:
    if not chosen.builds_from_sparse:
        yield (
            "no TensorRT engine was built: ONNX Runtime ran dense kernels, "
            "and every verdict is predicted from the rules"
        )
        return
    yield f"both engines were built from {onnx_name(SPARSE)}; {DENSE} had sparsity off"
    *_, opset = describe(run.file(onnx_name(SPARSE)))
    advice = opset_advice(chosen.status.version, opset)
    if advice is not None:
        yield advice
