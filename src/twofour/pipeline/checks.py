"""The stages that run the exported files: outputs and metric of each, and what pruning changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from twofour.errors import BuildFailedError
from twofour.export.agreement import agreement
from twofour.pipeline.agreement import (
    at_other_sizes,
    compare_with_reference,
    example_inputs,
    load_arrays,
    predictor,
)
from twofour.pipeline.engine_host import RUNTIMES, CrashedError, Session, lasts, tries_of
from twofour.pipeline.onnx_inputs import save_arrays
from twofour.pipeline.sources.user_code import files_read, parse_reference, reference_key
from twofour.pipeline.stages import (
    DENSE,
    INPUTS,
    SPARSE,
    Made,
    Run,
    Stage,
    onnx_files,
    reference_name,
)
from twofour.records.export import Accuracy, Metric, OutputAgreement
from twofour.records.options import RunOptions, Variant
from twofour.records.run import ExportedVariant, VariantCheck

_NO_MODULE = "the model came as ONNX: there is no module to compare it with"


def check(run: Run, exported: ExportedVariant) -> Stage[VariantCheck]:
    """Run one file: against the module, its outputs kept, and the user's metric.

    Raises PatternBrokenError when it does not agree with the module.
    """
    path, variant = run.file(exported.onnx.file), exported.onnx.variant
    metric_files: list[Path] = []

    def work() -> Made[VariantCheck]:
        session = None
        try:
            session = run.sessions.open(path)
            checked = _checked(run, exported, session, metric_files)
        except BuildFailedError as error:  # custom operators, types without a kernel, a crash
            if session is not None and not isinstance(error, CrashedError):
                raise
            run.progress.note(f"{path.name} was not compared with the module: {error}")
            return _not_run(variant, error), ()
        return checked, (outputs_name(variant),)

    return Stage(
        name=f"check-{variant}",
        title=f"run the {variant} model",
        record=f"stages/check-{variant}.json",
        kind=VariantCheck,
        work=work,
        watched=lambda: metric_files,
        lasting=lasts,
        options=("dynamic", "metric"),
        facts={"metric": metric_key(run.options), "threads": run.options.build.threads},
        packages=RUNTIMES,
        reads=(
            INPUTS,
            *onnx_files(path),
            *(() if exported.reference is None else (exported.reference,)),
            *(other.file for other in exported.other_sizes),
        ),
    )


def accuracy(
    run: Run, dense: VariantCheck, sparse: VariantCheck, no_baseline: str | None
) -> Stage[Accuracy]:
    """accuracy.json: sparse.onnx against dense.onnx."""

    def work() -> Made[Accuracy]:
        metrics = tuple(
            Metric(name=name, dense=value, sparse=sparse.metrics[name])
            for name, value in dense.metrics.items()
            if name in sparse.metrics
        )
        rows = next(iter(example_inputs(run).values()), np.zeros(0)).shape
        not_run = next((c.not_compared for c in (dense, sparse) if c.outputs is None), None)
        return Accuracy(
            drift=_drift(run, compared),
            examples=rows[0] if rows else 1,
            metrics=metrics,
            not_compared=None if compared else not_run,
            no_baseline=no_baseline,
            by_module=not_run if compared else None,
        ), ()

    compared = _compared(run, dense, sparse)

    return Stage(
        name="accuracy",
        title="compare the outputs",
        record="accuracy.json",
        kind=Accuracy,
        work=work,
        facts={"no_baseline": no_baseline},
        reads=(
            f"stages/check-{DENSE}.json",
            f"stages/check-{SPARSE}.json",
            *compared,
        ),
    )


def outputs_name(variant: Variant) -> str:
    """File with the outputs of a variant on the example inputs."""
    return f"stages/outputs-{variant}.npz"


def metric_key(options: RunOptions) -> str | None:
    """The metric's text, the hash of its code and its seed: an edited metric is run again."""
    if options.metric is None:
        return None
    return f"{options.metric} {reference_key(parse_reference(options.metric))} {options.seed}"


def _metrics(run: Run, session: Session, files: list[Path]) -> dict[str, float]:
    if run.options.metric is None:
        return {}
    from twofour.pipeline.sources.metric import load_metric, run_metric

    with files_read() as read:
        predict = predictor([tensor.name for tensor in session.inputs], session.outputs)
        metrics = run_metric(load_metric(run.options.metric), predict, seed=run.options.seed)
    files.extend(read)
    return metrics


def _checked(
    run: Run, exported: ExportedVariant, session: Session, metric_files: list[Path]
) -> VariantCheck:
    name = outputs_name(exported.onnx.variant)
    outputs = session.outputs(example_inputs(run))
    compared = compare_with_reference(run, exported, outputs)
    save_arrays(run.file(name), outputs)
    metrics = _metrics(run, session, metric_files)
    sizes = tuple(at_other_sizes(run, session, exported))
    return VariantCheck(
        variant=exported.onnx.variant,
        outputs=name,
        agreement=compared,
        not_compared=None if compared else _NO_MODULE,
        metrics=metrics,
        failed_tries=session.failed_tries,
        level=session.level,
        sizes=sizes,
    )


def _not_run(variant: Variant, error: BuildFailedError) -> VariantCheck:
    return VariantCheck(
        variant=variant,
        outputs=None,
        agreement=(),
        not_compared=error.message,
        metrics={},
        failed_tries=tries_of(error),
    )


def _compared(run: Run, *checks: VariantCheck) -> tuple[str, ...]:
    """Files with the outputs of dense and sparse: of the ONNX files, else of the torch module.

    ONNX Runtime's CPU provider runs no bfloat16; the module's own outputs are there all the same.
    """
    names = tuple(c.outputs for c in checks if c.outputs is not None)
    if len(names) == len(checks):
        return names
    names = tuple(reference_name(c.variant) for c in checks)
    there = run.model is not None and all(run.file(name).is_file() for name in names)
    return names if there else ()


def _drift(run: Run, names: Sequence[str]) -> tuple[OutputAgreement, ...]:
    if not names:
        return ()
    before, after = (load_arrays(run.file(name)) for name in names)
    return agreement(tuple(before), tuple(before.values()), [after[n] for n in before], bounds=None)
