"""The stages that run the exported files: outputs and metric of each, and what pruning changed.

They follow the export of each variant; what they refuse about prune.json and --dense-reference is
refused here, before any engine is built.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from twofour.eligibility.predict import not_covered_lines
from twofour.engines.machine import available_bytes
from twofour.errors import BadInputError, BuildFailedError, PatternBrokenError
from twofour.export.agreement import agreement
from twofour.graph.opened import OpenedModel
from twofour.graph.trace import DEQUANTIZE
from twofour.inputs.fits import Arrays, is_float, run_batches, save_arrays, stored_arrays
from twofour.inputs.samples import Batch, CalibrationData
from twofour.pipeline.folder import (
    ACCURACY,
    DENSE,
    FINETUNED,
    HELD_OUT,
    INPUTS,
    SPARSE,
    STAGES,
    onnx_files,
    onnx_name,
    record_of,
)
from twofour.pipeline.stages import Run, Stage, StageOutput
from twofour.pruning.methods import DEFAULT_WITHOUT_DATA
from twofour.records.export import Accuracy, Metric, OutputAgreement, TensorShape
from twofour.records.options import Precision, RunOptions, Variant
from twofour.records.run import ExportedVariant, SizeCheck, VariantCheck
from twofour.records.weights import PruneResult, ReasonCode
from twofour.sources.source import OnnxSource
from twofour.words import count, nothing_pruned
from twofour.workers.host import RUNTIMES, CrashedError, Session, is_final, tries_of

_SESSION = 2.1
"""Memory of a session as a multiple of its file."""
_MOST_BYTES = 1 << 28
"""Size of the outputs on held-out samples at which no more are run: a language model's are 100 MB
each."""
_NO_MODULE = "the model is an ONNX file, so there is no module to compare it with"
_SAME_GRAPH = "its graph is that of dense.onnx, which is compared with the module"


def session_bytes(path: Path) -> int:
    """Memory that a session of ONNX Runtime takes for a file, about.

    Measured: 4.6 GB for a Llama of 2.2 GB in float16, whose weights it widens to float32.
    """
    size = sum((path.parent / name).stat().st_size for name in onnx_files(path))
    return int(_SESSION * size)


def why_too_large(path: Path) -> str | None:
    """Why a file is not run: its session does not fit in memory; None where it does."""
    needed, free = session_bytes(path), available_bytes()
    if needed <= free:
        return None
    return f"it needs about {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} are free"


def why_in_turn(run: Run) -> str | None:
    """Why the sessions of both files are not open together, as timing in rounds wants them.

    None where they take a quarter of the free memory at most.
    """
    needed, free = 2 * session_bytes(run.file(onnx_name(DENSE))), available_bytes()
    if 4 * needed <= free:
        return None
    return (
        f"not timed in this run: both files need about {needed / 1e9:.0f} GB of memory at once; "
        "`twofour compare` times them"
    )


def run_with_ranges(
    run: Run, opened: OpenedModel, data: CalibrationData | None = None
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Outputs of a float32 file, and its tensors whose values are beyond the run's float16.

    Values are looked at on the example inputs and on all calibration data. Raises BuildFailedError
    where it does not run here.
    """
    from twofour.export.float32 import split_ranges, write_with_ranges
    from twofour.export.ir_models import load_float32

    no_room = why_too_large(opened.path)
    if no_room is not None:
        raise BuildFailedError(no_room)
    with tempfile.TemporaryDirectory(dir=run.file(STAGES)) as folder:
        path = opened.path
        more: Iterable[Batch] = ()
        if run.options.precision is Precision.FLOAT16:
            path = Path(folder, "ranges.onnx")
            write_with_ranges(load_float32(opened), path, run.options.keep_float32)
            more = () if data is None else data.batches()
        try:
            session = run.sessions.open(path)
            outputs, beyond = split_ranges(session.outputs(run.example_inputs()))
            for batch in more:
                beyond += split_ranges(session.outputs(batch.arrays))[1]
            return outputs, tuple(dict.fromkeys(beyond))
        finally:
            run.sessions.close()


def check_variant(run: Run, exported: ExportedVariant) -> Stage[VariantCheck]:
    """Run one file: its outputs are kept and compared with the module's, the metric evaluated.

    Raises PatternBrokenError when it does not agree with the module.
    """
    path, variant = run.file(exported.onnx.file), exported.onnx.variant

    def work() -> StageOutput[VariantCheck]:
        session = None
        try:
            too_large = why_too_large(path)
            if too_large is not None:
                raise BuildFailedError(too_large)
            session = run.sessions.open(path)
            checked = _checked(run, exported, session)
        except BuildFailedError as error:  # custom operators, types without a kernel, a crash
            if session is not None and not isinstance(error, CrashedError):
                raise
            run.progress.note(f"{path.name} did not run, its accuracy is not measured: {error}")
            return VariantCheck(
                variant=variant,
                outputs=None,
                agreement=(),
                not_compared=error.message,
                metrics={},
                failed_tries=tries_of(error),
            ), ()
        return checked, () if checked.outputs is None else (checked.outputs,)

    return Stage(
        name=f"check-{variant}",
        title=f"run the {variant} model",
        kind=VariantCheck,
        work=work,
        lasting=is_final,
        depends_on=(run.options.dynamic, metric_key(run.options), run.options.build.threads),
        packages=RUNTIMES,
        reads=(
            INPUTS,
            *onnx_files(path),
            *(() if exported.reference is None else (exported.reference,)),
            *(other.file for other in exported.other_sizes),
        ),
    )


def compare_outputs(
    run: Run,
    exports: Sequence[ExportedVariant],
    checks: Sequence[VariantCheck],
    float_check: VariantCheck | None,
    no_baseline: str | None,
) -> Stage[Accuracy]:
    """accuracy.json: sparse.onnx against dense.onnx, and that against the file it is rounded from.

    Instead of a file that was converted to dense.onnx, that file as it came is compared with.

    `float_check` is that of the dense file before it was quantized.
    """
    dense, sparse = checks
    found = [c.outputs for c in checks]
    unrounded = None if float_check is None or None in found else float_check.outputs
    if isinstance(run.source, OnnxSource) and float_check is None and None not in found:
        found[0] = exports[0].reference or found[0]  # a converted file: as it came
    if None in found:  # ONNX Runtime's CPU provider runs no bfloat16, but the torch module does
        found = [e.reference for e in exports]
    compared = () if None in found else tuple(filter(None, found))
    ran = no_baseline is None and all(check.outputs for check in checks)
    held_out = held_out_inputs(run) if ran else {}

    def work() -> StageOutput[Accuracy]:
        rows = next(iter(run.example_inputs().values()), np.zeros(0)).shape
        not_run = next((c.not_compared for c in (dense, sparse) if c.outputs is None), None)
        drift: tuple[OutputAgreement, ...] = ()
        whole: tuple[OutputAgreement, ...] = ()
        if compared:
            before, after = (stored_arrays(run.file(name)) for name in compared)
            drift = _agreement(before, {name: after[name] for name in before}, None)
            if unrounded is not None:
                whole = _agreement(stored_arrays(run.file(unrounded)), after, None)
        return Accuracy(
            drift=drift,
            rounding=() if float_check is None else dense.agreement,
            pruned_and_rounded=whole,
            examples=rows[0] if rows else 1,
            metrics=_metrics(run.options, dense, sparse, float_check),
            not_compared=None if compared else not_run,
            no_baseline=no_baseline,
            inputs_are=exports[0].inputs_are,
            held_out=_compare_on(run, held_out) if held_out else (),
            by_module=not_run if compared else None,
        ), ()

    return Stage(
        name="accuracy",
        title="compare the outputs",
        record=ACCURACY,
        kind=Accuracy,
        work=work,
        depends_on=(no_baseline, exports[0].inputs_are, run.options.budget.lower_is_better),
        reads=(
            *(record_of(f"check-{DENSE}"), record_of(f"check-{SPARSE}"), *compared),
            *(() if float_check is None else (record_of(f"check-{float_check.variant}"),)),
            *filter(None, (unrounded,)),
            *([HELD_OUT] if held_out else []),
        ),
    )


def _metrics(
    options: RunOptions, dense: VariantCheck, sparse: VariantCheck, unrounded: VariantCheck | None
) -> tuple[Metric, ...]:
    """The user's figures that both files have."""
    before = {} if unrounded is None else unrounded.metrics
    return tuple(
        Metric(
            name=name,
            dense=value,
            sparse=sparse.metrics[name],
            unquantized=before.get(name),
            lower_is_better=options.budget.lower_is_better,
        )
        for name, value in dense.metrics.items()
        if name in sparse.metrics
    )


def held_out_inputs(run: Run) -> Arrays:
    """Held-out samples by batch and input; {} where training may have seen them."""
    if run.options.calibration.data is None or run.model.weights(run) == (FINETUNED,):
        return {}
    file = run.file(HELD_OUT)
    return stored_arrays(file) if file.is_file() else {}


def _compare_on(run: Run, inputs: Arrays) -> tuple[OutputAgreement, ...]:
    """The pruned file against the dense one, in their outputs of floats."""
    dense = run.file(onnx_name(run.options.dense_variant))
    sparse = run.sessions.open(run.file(onnx_name(SPARSE)))  # it is open already
    after = run_batches(sparse.outputs, inputs, _MOST_BYTES)
    before = run_batches(run.sessions.open(dense).outputs, inputs, _MOST_BYTES)
    kinds = {key.partition(":")[2]: array.dtype for key, array in before.items()}
    names = [name for name, kind in kinds.items() if is_float(kind)]
    reference = {name: _joined(before, name) for name in names}
    return _agreement(reference, {name: _joined(after, name) for name in names}, None)


def _joined(outputs: Arrays, name: str) -> np.ndarray:
    """One output of all batches, a row for each sample; shorter rows end in zeros."""
    arrays = [np.atleast_1d(a) for key, a in outputs.items() if key.partition(":")[2] == name]
    rows = [array.reshape(len(array), -1) for array in arrays]
    width = max(array.shape[1] for array in rows)
    return np.concatenate([np.pad(a, ((0, 0), (0, width - a.shape[1]))) for a in rows])


def at_other_sizes(run: Run, session: Session, exported: ExportedVariant) -> Iterator[SizeCheck]:
    """Compare the file with the module at sizes smaller and larger than the example's.

    Raises PatternBrokenError where a size that the user asked for fails; other sizes only warn.
    """
    for other in exported.other_sizes:
        arrays = stored_arrays(run.file(other.file))
        inputs, reference = (
            {n.removeprefix(k): a for n, a in arrays.items() if n.startswith(k)}
            for k in ("input:", "output:")
        )
        try:
            compared = _agreement(reference, session.outputs(inputs), _bounds(run, exported))
            checked = SizeCheck(sizes=other.sizes, agreement=compared)
        except (BuildFailedError, BadInputError) as error:
            checked = SizeCheck(sizes=other.sizes, agreement=(), error=error.message)
        if not checked.holds:
            words = ", ".join(f"{name} {size}" for name, size in other.sizes.items())
            why = checked.error or next(
                f"{_disagreement(row, 'the module')}; {row.bound:.3g} is allowed"
                for row in checked.agreement
                if not row.within
            )
            message = (
                f"{exported.onnx.file} does not compute what the module does at {words}: {why}"
            )
            if run.options.dynamic is not None:
                raise PatternBrokenError(message, hint="leave that --dynamic out")
            run.progress.note(f"WARNING: {message}; --dynamic none keeps the example's sizes")
        yield checked


def why_no_baseline(pruned: PruneResult) -> str | None:
    """What to say about weights that came in N:M; None where all of them were pruned now."""
    rows = [row for row in pruned.weights if row.pruned]
    held = sum(row.held_before for row in rows)
    if not held:
        return None
    remedy = "name the dense model with --dense-reference MODEL"
    if held == len(rows):
        said = nothing_pruned(pruned.pattern, held)
        return f"{said}; dense.onnx has the same weights and is no baseline ({remedy})"
    return (
        f"{held} of {len(rows)} weights came in {pruned.pattern} already, so dense.onnx is no "
        f"baseline ({remedy})"
    )


def lost_without_data(pruned: PruneResult) -> str | None:
    """What to say about weights that were pruned without data; None where there are none."""
    if pruned.calibration is not None:
        return None
    rows = [row for row in pruned.weights if row.pruned and not row.held_before]
    if not any(row.method in (None, DEFAULT_WITHOUT_DATA) for row in rows):
        return None
    return (
        f"{count(len(rows), 'weight')} pruned by magnitude, without calibration samples. "
        "`--calibrate DATA` usually keeps more accuracy"
    )


def refuse_nothing_pruned(result: PruneResult) -> None:
    """Raise BadInputError where no weight was pruned: what follows would be a dense model."""
    if any(row.pruned for row in result.weights):
        return
    if not result.weights:
        raise BadInputError(
            f"{result.source} has no layer that could be pruned"
            + "".join(f"; {line}" for line in not_covered_lines(result.not_covered)),
            hint="layers are Linear, Conv, ConvTranspose, MultiheadAttention and their sub-classes "
            "(in ONNX: Conv, ConvTranspose, Gemm, MatMul and Einsum with a constant weight)",
        )
    codes = Counter(row.reasons[0].code.value for row in result.weights if row.reasons)
    why = ", ".join(f"{code} {count}" for code, count in codes.most_common())
    excluded = {*codes} == {ReasonCode.EXCLUDED.value}
    raise BadInputError(
        f"none of the {len(result.weights)} weights of {result.source} is pruned: {why}",
        hint="exclude fewer layers"
        if excluded
        else "add --include GLOB or --all-layers to prune what sparse kernels cannot use",
    )


def check_reference_fits(run: Run, dense: ExportedVariant, sparse: ExportedVariant) -> None:
    """Raise BadInputError where the dense reference has other inputs or outputs."""
    if run.dense_source is run.source:
        return
    for kind, there, here in (
        ("input", dense.inputs, sparse.inputs),
        ("output", dense.outputs, sparse.outputs),
    ):
        words = [
            ", ".join(f"{t.in_words} {t.dtype}" for t in tensors) or "none"
            for tensors in (there, here)
        ]
        if len(there) != len(here) or not all(map(_fits, there, here)):
            raise BadInputError(
                f"--dense-reference {run.dense_source.text} does not fit {run.source.text}: its "
                f"{kind}s are {words[0]}, those of the model are {words[1]}",
                hint="name the dense model that this one was fine-tuned from",
            )


def metric_key(options: RunOptions) -> str | None:
    """The metric's text, the hash of its code and its seed: an edited metric is run again."""
    if options.metric is None:
        return None
    from twofour.sources.user_code import code_key, parse_reference

    return f"{options.metric} {code_key(parse_reference(options.metric))} {options.seed}"


def _checked(run: Run, exported: ExportedVariant, session: Session) -> VariantCheck:
    name = f"stages/outputs-{exported.onnx.variant}.npz"
    outputs = session.outputs(run.example_inputs())
    compared = _compared_with_reference(run, exported, outputs)
    save_arrays(run.file(name), outputs)
    metrics: dict[str, float] = {}
    if run.options.metric is not None:
        from twofour.sources.user_code import run_metric

        names = [tensor.name for tensor in session.loaded.inputs]
        metrics = run_metric(run.options.metric, names, session.outputs, seed=run.options.seed)
    sizes = tuple(at_other_sizes(run, session, exported))
    return VariantCheck(
        variant=exported.onnx.variant,
        outputs=name,
        agreement=compared,
        not_compared=None if compared else _why_not_compared(run, exported),
        metrics=metrics,
        failed_tries=session.failed_tries,
        level=session.level,
        sizes=sizes,
    )


def _why_not_compared(run: Run, exported: ExportedVariant) -> str:
    """Why a file has no outputs of a module beside its own."""
    if isinstance(run.source, OnnxSource):
        return _NO_MODULE
    if exported.onnx.variant in (DENSE, Variant.FLOAT):
        return "the module does not fit in memory"
    return _SAME_GRAPH


def _agreement(
    expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], bounds: Precision | None
) -> tuple[OutputAgreement, ...]:
    arrays = [expected[name] for name in found]
    return agreement(tuple(found), arrays, tuple(found.values()), bounds=bounds)


def is_quantized(run: Run, exported: ExportedVariant) -> bool:
    """Whether the file has Q/DQ nodes."""
    nodes = run.models.open(run.file(exported.onnx.file)).nodes
    return any(node.op in DEQUANTIZE for node in nodes)


def _bounds(run: Run, exported: ExportedVariant) -> Precision | None:
    """Float16's beside Q/DQ nodes: a value at the edge of one of their steps goes either way."""
    is_coarse = exported.precision is Precision.FLOAT32 and is_quantized(run, exported)
    return Precision.FLOAT16 if is_coarse else exported.precision


def _compared_with_reference(
    run: Run, exported: ExportedVariant, outputs: Mapping[str, np.ndarray]
) -> tuple[OutputAgreement, ...]:
    """Compare the file's outputs with those of what it was made from; () for a copy."""
    if exported.reference is None:
        return ()
    reference = stored_arrays(run.file(exported.reference))
    compared = _agreement(reference, outputs, _bounds(run, exported))
    for row in compared:
        if not row.within:
            assert exported.precision is not None, "without one there is no bound"
            raise PatternBrokenError(
                f"{exported.onnx.file}: {_disagreement(row, run.model.in_words)}; "
                f"{exported.precision.value} allows {row.bound:.3g}",
                hint=run.model.precision_hint.format(precision=exported.precision.value),
            )
    return compared


def _disagreement(row: OutputAgreement, whose: str) -> str:
    """The sentence on how far an output is from that of the module, or of another file."""
    if row.not_finite:
        many = count(row.not_finite, "NaN or infinite value")
        return f"output {row.output!r} has {many}: something overflows, or a small number became 0"
    return (
        f"output {row.output!r} differs from that of {whose} by {row.max_abs_error:.3g} "
        f"(relative error {row.relative_error:.3g}, cosine {row.cosine:.6f})"
    )


def _fits(there: TensorShape, here: TensorShape) -> bool:
    # Example: (batch, 3, 224, 224) fits (1, 3, 224, 224), because a free size fits any.
    if (there.name, there.dtype, len(there.shape)) != (here.name, here.dtype, len(here.shape)):
        return False
    dims = zip(there.shape, here.shape, strict=True)
    return all(a == b or isinstance(a, str) or isinstance(b, str) for a, b in dims)
