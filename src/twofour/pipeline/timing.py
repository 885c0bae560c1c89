"""The times stage: dense and sparse engine of a run in rounds, judged as `compare` judges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from twofour.engines.inputs import at_shapes, opt_shapes
from twofour.engines.machine import describe_machine, read_clocks, usable_cores
from twofour.engines.onnxruntime.engine import mode_of
from twofour.engines.protocol import OpenOptions, OpenRequest
from twofour.engines.timing import RoundPlan
from twofour.latency.naming import variant_name
from twofour.latency.ratios import ratios_and_noise, unpaired_ratios
from twofour.pipeline.agreement import example_inputs
from twofour.pipeline.compare.prepare import batch_of, precision_words
from twofour.pipeline.engine_host import CRASH_HINT, CrashedError, Tries
from twofour.pipeline.engine_worker import EngineTimes, TimedRequest, Timing
from twofour.pipeline.stages import INPUTS, Made, Run, Stage, onnx_files
from twofour.pipeline.workers import is_out_of_memory
from twofour.records.build import VariantBuild
from twofour.records.latency import ComparedVariant, LatencyComparison
from twofour.records.options import BuildOptions, CompareOptions, Precision

TIMES = "stages/times.json"
_TIME_LIMIT_S = 3.0
"""For all rounds together: what ten rounds of three runs of 0.1 s take."""
_LEAST_ROUNDS = 5
"""Of slower runs, too few for a word."""
_ONE_BY_ONE = "timed one after the other: memory holds one engine at a time"


def time_variants(
    run: Run,
    build: BuildOptions,
    variants: Sequence[VariantBuild],
    precision: Precision | None,
) -> Stage[LatencyComparison]:
    """Time the engines in rounds, the first one twice for the noise.

    A variant that cannot run is a row that says why. `precision` is what the files were written
    in; None: their own.
    """
    engine = run.options.builder
    tries = Tries(engine=engine.row.title, levels=_levels(run, variants), note=run.host.note)

    def work() -> Made[LatencyComparison]:
        machine = describe_machine()
        asked = [_request(run, v, build.threads, precision) for v in variants]
        there = [a for a, v in zip(asked, variants, strict=True) if v.error is None]
        found = _measured(run, build, there, tries)
        failed = (_not_built(a, v) for a, v in zip(asked, variants, strict=True) if v.error)
        found = replace(found, rows=(*found.rows, *failed))
        made = _comparison(run, build, asked[0], found)
        return replace(made, machine=replace(machine, end=read_clocks())), ()

    def lasting(times: LatencyComparison) -> bool:
        errors = [v.error for v in times.variants if v.error is not None]
        return not any(t.passing for t in tries.failed) and not any(map(is_out_of_memory, errors))

    return Stage(
        name="times",
        title=f"time {' and '.join(v.variant for v in variants)}",
        record=TIMES,
        kind=LatencyComparison,
        work=work,
        lasting=lasting,
        options=("seed",),
        facts={"engine": engine.status.in_words, "build": build},
        packages=engine.row.packages,
        reads=(
            INPUTS,
            *(f"stages/build-{v.variant}.json" for v in variants),
            *(v.plan for v in variants if v.plan is not None),
            *(name for v in variants if v.plan is None for name in onnx_files(run.file(v.onnx))),
        ),
    )


def _measured(
    run: Run, build: BuildOptions, asked: Sequence[TimedRequest], tries: Tries
) -> EngineTimes:
    """Rows of what was built; a crash that no level avoids is in each of them."""
    inputs = at_shapes(example_inputs(run), opt_shapes(build.shapes))
    plan = RoundPlan(
        rounds=build.iterations,
        time_limit_s=_TIME_LIMIT_S,
        seed=run.options.seed,
        least=_LEAST_ROUNDS,
    )
    how = Timing(inputs=inputs, plan=plan, warmup=build.warmup, batch=batch_of(inputs))

    def at(level: str) -> EngineTimes:
        wanted = [_at_level(one, level) for one in (*asked, *map(_twin, asked[:1]))]
        times: EngineTimes = run.host.call("time", wanted, how, report=run.progress.step)
        return times

    if not asked:
        return EngineTimes(rows=())
    try:
        return tries.until_alive(at, lambda: "timing the engines")
    except CrashedError as error:
        rows = (ComparedVariant(name=a.name, error=error.message, hint=error.hint) for a in asked)
        return EngineTimes(rows=tuple(rows))
    finally:
        run.sessions.close()


def _comparison(
    run: Run, build: BuildOptions, first: TimedRequest, found: EngineTimes
) -> LatencyComparison:
    rows, seed = found.rows, run.options.seed
    baseline = next((row.name for row in rows if row.samples_ms), rows[0].name)
    ratios, noise = (
        ratios_and_noise(rows, baseline, seed, found.loads)
        if found.in_rounds
        else (unpaired_ratios(rows, baseline, seed), ())
    )
    return LatencyComparison(
        source=str(run.shown),
        baseline=baseline,
        machine=None,
        options=CompareOptions(
            engines=(f"{first.engine.name}:{first.opening.mode}",),
            rounds=build.iterations,
            warmup=build.warmup,
            time_limit_s=_TIME_LIMIT_S,
            threads=first.opening.options.threads,
            seed=seed,
        ),
        variants=rows,
        ratios=ratios,
        noise=noise,
        loads=found.loads,
        notes=() if found.in_rounds else (_ONE_BY_ONE,),
    )


def _request(
    run: Run, built: VariantBuild, threads: int | None, precision: Precision | None
) -> TimedRequest:
    """As `compare` would open it, in the mode that the run has it in."""
    row = run.options.builder.row
    modes = {mode.name: mode for mode in row.engine().modes}
    mode = mode_of(built.providers) if row.is_reference else next(iter(modes))
    onnx = run.file(built.onnx)
    opening = OpenRequest(
        mode=mode,
        options=OpenOptions(weights=built.variant, threads=threads or usable_cores()),
        model=str(onnx),
        precision=precision_words(modes[mode], precision.value if precision else "unknown"),
        file=onnx if built.plan is None else run.file(built.plan),
        sparse_kernels=None if built.plan is None else built.sparse_weights,
    )
    return TimedRequest(
        name=variant_name(built.variant, row.name, mode), engine=row, opening=opening
    )


def _twin(one: TimedRequest) -> TimedRequest:
    weights, mode = one.opening.options.weights, one.opening.mode
    return replace(one, name=variant_name(weights, one.engine.name, mode, again=True), again=True)


def _at_level(one: TimedRequest, level: str) -> TimedRequest:
    """A plan has its level already."""
    known = level if level in one.engine.engine().open_levels else None
    options = replace(one.opening.options, level=known)
    return replace(one, opening=replace(one.opening, options=options))


def _levels(run: Run, variants: Sequence[VariantBuild]) -> tuple[str, ...]:
    """From the lowest on that a variant needs, as levels do not compare."""
    lowered = [v.level for v in variants if v.level is not None]
    levels = run.options.builder.row.engine().open_levels
    if not levels:
        return (lowered[0] if lowered else "of the build",)
    return levels[max((levels.index(level) for level in lowered if level in levels), default=0) :]


def _not_built(asked: TimedRequest, built: VariantBuild) -> ComparedVariant:
    hint = CRASH_HINT if built.failed_tries else None
    return ComparedVariant(name=asked.name, error=built.error, hint=hint)
