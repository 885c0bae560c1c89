"""The stages that run the exported files: outputs and metric of each, and what pruning changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from twofour.engines.onnxruntime import CannotRunError, OrtSession
from twofour.errors import BadInputError
from twofour.export.agreement import agreement
from twofour.pipeline.agreement import example_inputs
from twofour.pipeline.context import DENSE, INPUTS, SPARSE, Run, onnx_files, onnx_name
from twofour.pipeline.onnx_io import save_arrays
from twofour.pipeline.sources.metric import load_metric, run_metric
from twofour.pipeline.sources.reference import parse_reference, reference_key
from twofour.pipeline.stages import Stage, versions
from twofour.records import Accuracy, Metric, OutputAgreement, VariantCheck

_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")


def check(run: Run, variant: str) -> VariantCheck:
    """Outputs on the example inputs, and the user's metric, by ONNX Runtime."""
    path = run.file(onnx_name(variant))

    def work() -> tuple[VariantCheck, Sequence[str]]:
        try:
            session = run.sessions.open(path)
        except CannotRunError as error:
            if run.options.metric is not None:
                run.progress.note(f"no metric for {path.name}: {error.message}")
            return _not_run(variant, error.message), ()
        name = f"stages/outputs-{variant}.npz"
        save_arrays(run.file(name), session.outputs(example_inputs(run)))
        checked = VariantCheck(
            variant=variant, outputs=name, not_run=None, metrics=_metrics(run, session)
        )
        return checked, (name,)

    stage = Stage(
        name=f"check-{variant}",
        title=f"run the {variant} model",
        record=f"stages/check-{variant}.json",
        depends={
            "metric": metric_key(run.options.metric),
            "threads": run.options.build.threads,
            "versions": versions(*_RUNTIMES),
        },
        reads=(INPUTS, *onnx_files(path)),
    )
    return run.runner.run(stage, VariantCheck, work)


def accuracy(run: Run, dense: VariantCheck, sparse: VariantCheck) -> Accuracy:
    """accuracy.json: sparse.onnx against dense.onnx."""

    def work() -> tuple[Accuracy, Sequence[str]]:
        metrics = tuple(
            Metric(name=name, dense=value, sparse=sparse.metrics[name])
            for name, value in dense.metrics.items()
            if name in sparse.metrics
        )
        rows = next(iter(example_inputs(run).values()), np.zeros(0)).shape
        return Accuracy(
            drift=_drift(run, dense, sparse), examples=rows[0] if rows else 1, metrics=metrics
        ), ()

    stage = Stage(
        name="accuracy",
        title="compare the outputs",
        record="accuracy.json",
        depends={"versions": versions()},
        reads=(
            f"stages/check-{DENSE}.json",
            f"stages/check-{SPARSE}.json",
            *_outputs(dense, sparse),
        ),
    )
    return run.runner.run(stage, Accuracy, work)


def metric_key(metric: str | None) -> str | None:
    """The metric's text and the hash of its code, so that an edited metric is run again."""
    return None if metric is None else f"{metric} {reference_key(parse_reference(metric))}"


def _metrics(run: Run, session: OrtSession) -> dict[str, float]:
    if run.options.metric is None:
        return {}
    return run_metric(load_metric(run.options.metric), _predictor(session), seed=run.options.seed)


def _predictor(session: OrtSession) -> Callable[..., tuple[np.ndarray, ...]]:
    names = [tensor.name for tensor in session.inputs]

    def predict(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        if len(arrays) != len(names):
            raise BadInputError(
                f"predict was given {len(arrays)} arrays, the model takes {len(names)}: {names}"
            )
        return tuple(session.outputs(dict(zip(names, arrays, strict=True))).values())

    return predict


def _not_run(variant: str, why: str) -> VariantCheck:
    return VariantCheck(variant=variant, outputs=None, not_run=why, metrics={})


def _outputs(*checks: VariantCheck) -> tuple[str, ...]:
    return tuple(c.outputs for c in checks if c.outputs is not None)


def _drift(run: Run, dense: VariantCheck, sparse: VariantCheck) -> tuple[OutputAgreement, ...]:
    if dense.outputs is None or sparse.outputs is None:
        return ()
    with np.load(run.file(dense.outputs)) as a, np.load(run.file(sparse.outputs)) as b:
        names = tuple(a.files)
        return agreement(names, [a[n] for n in names], [b[n] for n in names], bounds=None)
