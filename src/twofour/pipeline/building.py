"""The build stages: an engine for each variant, their times in rounds, and build.json over both.

They follow `checks`, whose ONNX Runtime sessions they use again, and `reporting` follows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from twofour.engines.machine import describe_machine, find_gpu, read_clocks, usable_cores
from twofour.engines.onnxruntime.engine import mode_of
from twofour.engines.onnxruntime.session import CannotRunError
from twofour.engines.protocol import AUTO, BuildRequest, OpenRequest
from twofour.engines.tensorrt.bindings import opset_advice
from twofour.engines.tensorrt.plan import plan_mode
from twofour.engines.timing import EngineTimes, RoundPlan, TimedRequest
from twofour.errors import BuildFailedError
from twofour.inputs.examples import beyond_ranges, opt_shapes, profiles_for
from twofour.inputs.fits import at_shapes, shapes_of
from twofour.latency.ratios import ratios_and_noise
from twofour.pipeline.checks import refuse_too_large, why_in_turn
from twofour.pipeline.folder import BUILD, DENSE, INPUTS, SPARSE, onnx_files, record_of
from twofour.pipeline.stages import Run, Stage, StageOutput
from twofour.records.export import VariantBuild
from twofour.records.latency import (
    ComparedVariant,
    LatencyComparison,
    engine_mode_of,
    parse_variant_name,
    variant_name,
)
from twofour.records.options import BuildOptions, CompareOptions, Precision, Variant
from twofour.records.run import BuildResult, ExportedVariant
from twofour.workers.host import (
    CRASH_HINT,
    CrashedError,
    build_in,
    crashed_build,
    is_final,
    tries_in_words,
)
from twofour.workers.process import WorkerDiedError, may_be_temporary

_TIMING_CACHE = "timing.cache"
TIMES = "stages/times.json"
_TIME_LIMIT_S = 1.0
"""Limit of all rounds together: ten rounds of three runs of 33 ms (BERT-base, 7 tokens)."""
_LEAST_ROUNDS = 5
"""Rounds of slow runs, whatever the limit; too few for a verdict."""
_ONE_BY_ONE = "timed one after the other: memory has room for one engine at a time"


def with_profiles(run: Run, exported: ExportedVariant) -> BuildOptions:
    """The build options, with one profile for each input with free sizes, by the file's names.

    An engine has no names of sizes. Where ONNX Runtime runs and nobody asked for shapes, the
    examples are timed as they are.
    """
    build = run.options.build
    # a profile is a range of each free size: x 1 to 8 to 64 for (batch, 3, 224, 224)
    if not (build.shapes or run.options.engine_row.is_tensorrt):
        return build
    examples = shapes_of(run.example_inputs())
    ranges = run.opened(exported.onnx.variant).size_ranges
    for note in beyond_ranges(build.shapes, exported.inputs, ranges):
        run.progress.note(f"WARNING: {note}")
    shapes = profiles_for(build.shapes, exported.inputs, examples, ranges)
    return replace(build, shapes=shapes)


def build_variant(
    run: Run, build: BuildOptions, variant: Variant, weights: Variant
) -> Stage[VariantBuild]:
    """Build one engine of the file with these weights, without sparse kernels unless it is SPARSE.

    TensorRT writes plan, log, layer information and profile.
    """
    chosen = run.options.builder
    source = run.onnx(weights)

    def work() -> StageOutput[VariantBuild]:
        if variant == SPARSE:  # it may be of a dense build
            run.file(_TIMING_CACHE).unlink(missing_ok=True)
        request = BuildRequest(
            variant=variant,
            onnx=source,
            folder=run.path,
            sparse_weights=variant == SPARSE,
            options=build,
            inputs=run.example_inputs(),
            timing_cache=run.file(_TIMING_CACHE),
        )
        built = _build(run, request)
        names = (f"{variant}{suffix}" for suffix in run.options.engine_row.leaves)
        return built, run.there(*names)

    return Stage(
        name=f"build-{variant}",
        title=f"build {variant} with {chosen.engine}",
        kind=VariantBuild,
        work=work,
        lasting=is_final,
        depends_on=(
            run.options.engine,
            chosen.in_words,
            replace(build, iterations=1, warmup=0),  # how it is timed changes no engine
        ),
        reads=(INPUTS, *onnx_files(source)),
    )


def time_variants(
    run: Run, build: BuildOptions, variants: Sequence[VariantBuild], precision: Precision | None
) -> Stage[LatencyComparison]:
    """Time the engines in rounds, the first one twice for the noise.

    A variant that cannot run is a row that says why. `precision` is what the files were written
    in; None: their own.
    """
    engine = run.options.builder

    def work() -> StageOutput[LatencyComparison]:
        machine = describe_machine()
        requests = [_request(run, v, build.threads, precision) for v in variants]
        times = _timed_rows(run, build, variants, requests)
        comparison = _comparison(run, build, requests, times)
        return replace(comparison, machine=replace(machine, end=read_clocks())), ()

    def lasting(times: LatencyComparison) -> bool:
        errors = [v.error for v in times.variants if v.error is not None]
        return not any(map(may_be_temporary, errors))

    return Stage(
        name="times",
        title=f"time {' and '.join(v.variant for v in variants)}",
        kind=LatencyComparison,
        work=work,
        lasting=lasting,
        depends_on=(run.options.seed, engine.in_words, build, run.options.quantize),
        reads=(INPUTS, *_timed_files(run, variants)),
    )


def _timed_files(run: Run, variants: Sequence[VariantBuild]) -> Iterator[str]:
    """The records of the builds, and what was built: a plan, else the ONNX file itself."""
    for variant in variants:
        yield record_of(f"build-{variant.variant}")
        if variant.plan is not None:
            yield variant.plan
        else:
            yield from onnx_files(run.file(variant.onnx))


def _timed_rows(
    run: Run,
    build: BuildOptions,
    variants: Sequence[VariantBuild],
    requests: Sequence[TimedRequest],
) -> EngineTimes:
    """The times of what was built, and rows that say why for what was not, or finds no room."""
    # times at two levels do not compare: both take the lower one where either file needed it
    level = next((variant.level for variant in variants if variant.level), None)
    no_room = None
    if run.options.engine_row.checks_files and len(variants) > 1:
        no_room = why_in_turn(run)
    ready = []
    failed = []
    for variant, request in zip(variants, requests, strict=True):
        error = variant.error or no_room
        if error is None:
            ready.append(replace(request, opening=replace(request.opening, level=level)))
            continue
        hint = CRASH_HINT if variant.failed_tries else None
        failed.append(ComparedVariant(name=request.name, error=error, hint=hint))
    times = EngineTimes(rows=())
    if ready:
        times = _measured(run, build, ready)
    return replace(times, rows=(*times.rows, *failed))


def _measured(run: Run, build: BuildOptions, requests: Sequence[TimedRequest]) -> EngineTimes:
    """Time what was built; a crash is in each row."""
    # the same engine a second time: how far its times differ from the first ones is the noise
    first = requests[0]
    again = variant_name(first.opening.weights, first.engine.name, first.opening.mode, again=True)
    entrants = (*requests, replace(first, name=again, again=True))
    inputs = at_shapes(run.example_inputs(), opt_shapes(build.shapes))
    plan = _round_plan(run, build)
    try:
        times: EngineTimes = run.host.call("time", entrants, inputs, plan, report=run.progress.step)
        return times
    except WorkerDiedError as error:
        why = f"{first.engine.title} was timed, and {error.message}"
        rows = [ComparedVariant(name=r.name, error=why, hint=CRASH_HINT) for r in requests]
        return EngineTimes(rows=tuple(rows))
    finally:
        run.sessions.close()


def _round_plan(run: Run, build: BuildOptions) -> RoundPlan:
    return RoundPlan(
        rounds=build.iterations,
        time_limit_s=_TIME_LIMIT_S,
        seed=run.options.seed,
        least=_LEAST_ROUNDS,
        warmup=build.warmup,
    )


def _comparison(
    run: Run, build: BuildOptions, requests: Sequence[TimedRequest], times: EngineTimes
) -> LatencyComparison:
    seed = run.options.seed
    modes = dict.fromkeys(engine_mode_of(request.name) for request in requests)
    rows = times.rows
    # the first row without an error; ratios of times that were not taken in turn prove nothing
    baseline = next((row.name for row in rows if row.samples_ms), rows[0].name)
    judged = rows if times.in_rounds else ()
    ratios, noise = ratios_and_noise(judged, baseline, seed, times.loads)
    return LatencyComparison(
        source=str(run.shown),
        baseline=baseline,
        machine=None,
        options=CompareOptions(
            engines=tuple(modes),
            rounds=build.iterations,
            warmup=build.warmup,
            time_limit_s=_TIME_LIMIT_S,
            threads=requests[0].opening.threads,
            seed=seed,
        ),
        variants=rows,
        ratios=ratios,
        noise=noise,
        loads=times.loads,
        notes=() if times.in_rounds else (_ONE_BY_ONE,),
    )


def _request(
    run: Run, built: VariantBuild, threads: int | None, precision: Precision | None
) -> TimedRequest:
    """The request that `compare` would make, in the mode of the run."""
    row = run.options.engine_row
    modes = {mode.name: mode for mode in row.engine().modes}
    mode = mode_of(built.providers) if row.checks_files else plan_mode(built)
    if mode not in modes:  # an engine with modes of its own
        mode = next(iter(modes))
    written = run.options.quantize or precision
    opening = OpenRequest(
        mode=mode,
        weights=built.weights,
        threads=threads or usable_cores(),
        model=str(run.file(built.onnx)),
        precision=modes[mode].precision_words(written.value if written else "unknown"),
        file=run.file(built.plan or built.onnx),
        sparse_kernels=None if built.plan is None else built.sparse_weights,
    )
    return TimedRequest(
        name=variant_name(built.weights, row.name, mode), engine=row, opening=opening
    )


def build_result(
    run: Run,
    build: BuildOptions,
    variants: tuple[VariantBuild, ...],
    times: LatencyComparison,
    about_file: str | None = None,
) -> Stage[BuildResult]:
    """build.json over the variants."""
    chosen = run.options.builder

    def work() -> StageOutput[BuildResult]:
        return BuildResult(
            engine=chosen,
            asked_for=run.options.engine,
            not_used=run.options.not_used,
            gpu=find_gpu(),
            options=build,
            variants=variants,
            times=times,
            notes=tuple(filter(None, (about_file, *_notes(run, variants)))),
        ), ()

    return Stage(
        name="build",
        title="collect the build results",
        record=BUILD,
        kind=BuildResult,
        work=work,
        depends_on=(run.options.engine, chosen.in_words, run.options.not_used, about_file),
        reads=(*(record_of(f"build-{v.variant}") for v in variants), TIMES),
    )


def refuse_crashed(built: BuildResult) -> None:
    """Raise BuildFailedError for an engine that ended its process; called when all is done."""
    crashed = [_in_words(row) for row in _failed(built) if row.hint == CRASH_HINT]
    if crashed:
        raise BuildFailedError("; ".join(crashed), hint=CRASH_HINT)


def refuse_all_failed(built: BuildResult) -> None:
    """Raise BuildFailedError where no variant could be run: a build has no other result."""
    failed = failures(built)
    if failed and len(failed) == len(built.variants):
        raise BuildFailedError("; ".join(failed))


def failures(built: BuildResult) -> list[str]:
    """A sentence for each variant that could not be built or run."""
    return list(map(_in_words, _failed(built)))


def _failed(built: BuildResult) -> list[ComparedVariant]:
    rows = [row for row in built.times.variants if not parse_variant_name(row.name).again]
    return [row for row in rows if row.error is not None]


def _in_words(row: ComparedVariant) -> str:
    return f"{parse_variant_name(row.name).weights}: {row.error}"


def _build(run: Run, request: BuildRequest) -> VariantBuild:
    """Build; where the engine ends its process in every try, the row says so."""
    row = run.options.engine_row
    try:
        if row.checks_files:
            return _build_in_session(run, request)
        run.sessions.close()  # the builder needs the memory
        return build_in(run.host, row, request, run.progress.step)
    except CrashedError as error:
        run.progress.note(f"{request.variant}: no engine was built: {error}")
        return crashed_build(request, row, error)


def _build_in_session(run: Run, request: BuildRequest) -> VariantBuild:
    """Take the session that checked the file, not a second one."""
    built = VariantBuild(
        variant=request.variant,
        onnx=request.onnx.name,
        sparse_weights=False,  # ONNX Runtime's own providers have no sparse kernels to allow
        build_s=0.0,
    )
    try:
        refuse_too_large(request.onnx)
        session = run.sessions.open(request.onnx)
    except CrashedError:
        raise
    except BuildFailedError as error:
        # a type without a kernel is a row that says so; all else only where nobody asked for it
        if run.options.engine != AUTO and not isinstance(error, CannotRunError):
            raise
        return replace(built, error=error.message)
    opened = session.load()
    return replace(
        built,
        build_s=opened.load_s,
        providers=opened.providers,
        failed_tries=session.failed_tries,
        level=session.level,
    )


def _notes(run: Run, variants: Sequence[VariantBuild]) -> Iterator[str | None]:
    chosen = run.options.builder
    if run.options.engine_row.is_tensorrt:
        if any(built.weights == DENSE for built in variants):
            yield (
                f"{SPARSE} gains by its zeros and by sparse kernels: `twofour compare --engines "
                "tensorrt` tells the two apart"
            )
        if run.options.build.allow:
            types = ", ".join(allowed.name for allowed in run.options.build.allow)
            yield f"weakly typed: the builder was allowed {types} besides float32"
        yield opset_advice(chosen.version, run.opened(SPARSE).opset)
    else:
        yield f"{run.options.engine_row.title} ran dense kernels, which zeros do not make faster"
    for built in variants:
        if built.failed_tries and built.error is None:
            yield (
                f"{built.variant}: {tries_in_words(built.failed_tries)}; it was built and timed at "
                f"level {built.level}, so its times do not compare with those of another level"
            )
