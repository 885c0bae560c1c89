"""The stages that run the exported files: outputs and metric of each, and what pruning changed.

They follow the export of each variant; what they refuse about prune.json and --dense-reference is
refused here, before any engine is built.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from twofour.eligibility.predict import not_covered_lines
from twofour.engines.machine import available_bytes
from twofour.engines.onnxruntime.session import CannotRunError
from twofour.errors import BadInputError, BuildFailedError, PatternBrokenError
from twofour.export.agreement import agreement
from twofour.graph.opened import OpenedModel
from twofour.graph.trace import DEQUANTIZE
from twofour.inputs.examples import MADE_UP, RANDOM
from twofour.inputs.fits import Array, Arrays, is_float, run_batches, save_arrays, stored_arrays
from twofour.inputs.samples import Batch, CalibrationData
from twofour.pipeline.folder import (
    ACCURACY,
    DENSE,
    FINETUNED,
    HELD_OUT,
    INPUTS,
    PRUNE,
    SPARSE,
    STAGES,
    onnx_bytes,
    onnx_files,
    record_of,
)
from twofour.pipeline.stages import ExportedPair, Run, Stage, StageOutput
from twofour.pruning.methods import DEFAULT_WITHOUT_DATA
from twofour.records.export import Accuracy, Metric, OutputAgreement, TensorShape
from twofour.records.options import Precision, RunOptions, Variant
from twofour.records.run import ExportedVariant, SizeCheck, VariantCheck
from twofour.records.weights import PruneResult, ReasonCode
from twofour.sources.source import OnnxSource
from twofour.words import count
from twofour.workers.host import CrashedError, Session, is_final, tries_of

_SESSION = 2.1
"""Memory of a session as a multiple of its file."""
_MOST_BYTES = 1 << 28
"""Size of the outputs on held-out samples at which no more are run: a language model's are 100 MB
each."""


def session_bytes(path: Path) -> int:
    """Memory that a session of ONNX Runtime takes for a file, about.

    Measured: 4.6 GB for a Llama of 2.2 GB in float16, whose weights it widens to float32.
    """
    return int(_SESSION * onnx_bytes(path))


def refuse_too_large(path: Path) -> None:
    """Raise CannotRunError for a file whose session does not fit in memory."""
    needed = session_bytes(path)
    free = available_bytes()
    if needed > free:
        words = f"it needs about {needed / 1e9:.0f} GB of memory, {free / 1e9:.0f} are free"
        raise CannotRunError(words)


def why_in_turn(run: Run) -> str | None:
    """Why the sessions of both files are not open together, as timing in rounds wants them.

    None where they take a quarter of the free memory at most.
    """
    needed = 2 * session_bytes(run.onnx(DENSE))
    free = available_bytes()
    if 4 * needed <= free:
        return None
    return (
        f"not timed in this run: both files need about {needed / 1e9:.0f} GB of memory at once; "
        "`twofour compare` times them"
    )


def run_with_ranges(
    run: Run, opened: OpenedModel, data: CalibrationData | None = None
) -> tuple[dict[str, Array], tuple[str, ...]]:
    """Outputs of a float32 file, and its tensors whose values are beyond the run's float16.

    Values are looked at on the example inputs and on all calibration data. Raises BuildFailedError
    where it does not run here.
    """
    from twofour.export.float32 import split_ranges, write_with_ranges
    from twofour.export.ir_models import load_float32

    refuse_too_large(opened.path)
    with tempfile.TemporaryDirectory(dir=run.file(STAGES)) as folder:
        path = opened.path
        more: Iterable[Batch] = ()
        if run.options.precision is Precision.FLOAT16:  # bfloat16 reaches as far as float32
            path = Path(folder, "ranges.onnx")
            write_with_ranges(load_float32(opened), path, run.options.keep_float32)
            if data is not None:
                more = data.batches()
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
    variant = exported.onnx.variant

    def work() -> StageOutput[VariantCheck]:
        check = _check(run, exported)
        return check, () if check.outputs is None else (check.outputs,)

    reads = [INPUTS, *onnx_files(run.file(exported.onnx.file))]
    if exported.reference is not None:
        reads.append(exported.reference)
    reads += [other.file for other in exported.other_sizes]
    return Stage(
        name=f"check-{variant}",
        title=f"run the {variant} model",
        kind=VariantCheck,
        work=work,
        lasting=is_final,
        depends_on=(run.options.dynamic, metric_key(run.options), run.options.build.threads),
        reads=tuple(reads),
    )


def _check(run: Run, exported: ExportedVariant) -> VariantCheck:
    """The check of a file; where it does not run here, a record that says why."""
    path = run.file(exported.onnx.file)
    session = None
    try:
        refuse_too_large(path)
        session = run.sessions.open(path)
        return _check_in(session, run, exported)
    except BuildFailedError as error:  # custom operators, types without a kernel, a crash
        if session is not None and not isinstance(error, CrashedError):
            if exported.inputs_are == RANDOM:
                error.hint = MADE_UP
            raise
        run.progress.note(f"{path.name} did not run, its accuracy is not measured: {error}")
        return VariantCheck(
            variant=exported.onnx.variant,
            outputs=None,
            agreement=(),
            not_compared=error.message,
            metrics={},
            failed_tries=tries_of(error),
        )


def _check_in(session: Session, run: Run, exported: ExportedVariant) -> VariantCheck:
    name = f"stages/outputs-{exported.onnx.variant}.npz"
    outputs = session.outputs(run.example_inputs())
    compared = _compared_with_reference(run, exported, outputs)
    save_arrays(run.file(name), outputs)
    metrics: dict[str, float] = {}
    if run.options.metric is not None:
        from twofour.sources.user_code import run_metric

        names = [tensor.name for tensor in session.inputs]
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


def _compared_with_reference(
    run: Run, exported: ExportedVariant, outputs: Arrays
) -> tuple[OutputAgreement, ...]:
    """Compare the file's outputs with those of what it was made from; () for a copy."""
    if exported.reference is None:
        return ()
    reference = stored_arrays(run.file(exported.reference))
    compared = agreement(reference, outputs, bounds=_bounds(run, exported))
    for row in compared:
        if row.within:
            continue
        assert exported.precision is not None, "without one there is no bound"
        raise PatternBrokenError(
            f"{exported.onnx.file}: {_disagreement(row, run.model.in_words)}; "
            f"{exported.precision.value} allows {row.bound:.3g}",
            hint=run.model.precision_hint.format(precision=exported.precision.value),
        )
    return compared


def _bounds(run: Run, exported: ExportedVariant) -> Precision | None:
    """The precision whose rounding is accepted."""
    # beside Q/DQ nodes float16's: a value at the edge of one of their steps goes either way
    if exported.precision is Precision.FLOAT32 and is_quantized(run, exported):
        return Precision.FLOAT16
    return exported.precision


def is_quantized(run: Run, exported: ExportedVariant) -> bool:
    """Whether the file has Q/DQ nodes."""
    nodes = run.opened(exported.onnx.variant).nodes
    return any(node.op in DEQUANTIZE for node in nodes)


def _why_not_compared(run: Run, exported: ExportedVariant) -> str:
    """Why a file has no outputs of a module beside its own."""
    if isinstance(run.source, OnnxSource):
        return "the model is an ONNX file, so there is no module to compare it with"
    if exported.onnx.variant in (DENSE, Variant.FLOAT):
        return "the module does not fit in memory"
    return "its graph is that of dense.onnx, which is compared with the module"


def at_other_sizes(run: Run, session: Session, exported: ExportedVariant) -> Iterator[SizeCheck]:
    """Compare the file with the module at sizes smaller and larger than the example's.

    Raises PatternBrokenError where a size that the user asked for fails; other sizes only warn.
    """
    for other in exported.other_sizes:
        arrays = stored_arrays(run.file(other.file))
        reference = _part_of(arrays, "output:")
        try:
            outputs = session.outputs(_part_of(arrays, "input:"))
            compared = agreement(reference, outputs, bounds=_bounds(run, exported))
            check = SizeCheck(sizes=other.sizes, agreement=compared)
        except (BuildFailedError, BadInputError) as error:
            check = SizeCheck(sizes=other.sizes, agreement=(), error=error.message)
        if not check.holds:
            _say_size_fails(run, exported, check)
        yield check


def _part_of(arrays: Arrays, prefix: str) -> dict[str, Array]:
    """The arrays whose names begin so, without the beginning."""
    names = [name for name in arrays if name.startswith(prefix)]
    return {name.removeprefix(prefix): arrays[name] for name in names}


def _say_size_fails(run: Run, exported: ExportedVariant, check: SizeCheck) -> None:
    """Warn of a size that fails; raise PatternBrokenError where the user asked for it."""
    why = check.error
    if why is None:
        row = next(row for row in check.agreement if not row.within)
        why = f"{_disagreement(row, 'the module')}; {row.bound:.3g} is allowed"
    words = ", ".join(f"{name} {size}" for name, size in check.sizes.items())
    message = f"{exported.onnx.file} does not compute what the module does at {words}: {why}"
    if run.options.dynamic is not None:
        raise PatternBrokenError(message, hint=f"leave out a --dynamic of {', '.join(check.sizes)}")
    run.progress.note(f"WARNING: {message}; --dynamic none keeps the example's sizes")


def _disagreement(row: OutputAgreement, whose: str) -> str:
    """The sentence on how far an output is from that of the module, or of another file."""
    if row.not_finite:
        many = count(row.not_finite, "NaN or infinite value")
        return f"output {row.output!r} has {many}: something overflows, or a small number became 0"
    return (
        f"output {row.output!r} differs from that of {whose} by {row.max_abs_error:.3g} "
        f"(relative error {row.relative_error:.3g}, cosine {row.cosine:.6f})"
    )


def compare_outputs(
    run: Run, files: ExportedPair, checks: Sequence[VariantCheck], no_baseline: str | None
) -> Stage[Accuracy]:
    """accuracy.json: sparse.onnx against dense.onnx, and that against the file it is rounded from.

    Instead of a file that was converted to dense.onnx, that file as it came is compared with.
    """
    compared = _outputs_to_compare(run, files, checks)
    both_changes = _across_rounding(files, checks)
    held_out: Arrays = {}
    if no_baseline is None and all(check.outputs for check in checks):
        held_out = held_out_inputs(run)

    def work() -> StageOutput[Accuracy]:
        accuracy = replace(
            _without_outputs(run, files, checks),
            drift=_between(run, compared),
            pruned_and_rounded=_between(run, both_changes),
            held_out=_compare_on(run, held_out),
            no_baseline=no_baseline,
        )
        if compared:  # by the module, where a file did not run
            accuracy = replace(accuracy, by_module=accuracy.not_compared, not_compared=None)
        return accuracy, ()

    return Stage(
        name="accuracy",
        title="compare the outputs",
        record=ACCURACY,
        kind=Accuracy,
        work=work,
        depends_on=(no_baseline, files.dense.inputs_are, run.options.budget.lower_is_better),
        reads=(
            *(
                record_of(f"check-{check.variant}")
                for check in (*checks, files.float_check)
                if check
            ),
            *compared,
            *both_changes[:1],
            *([HELD_OUT] if held_out else []),
        ),
    )


def _across_rounding(files: ExportedPair, checks: Sequence[VariantCheck]) -> tuple[str, ...]:
    """The files with the outputs before --quantize and after pruning; () where one is missing."""
    before = files.float_check and files.float_check.outputs
    after = checks[1].outputs
    return (before, after) if before and after else ()


def _outputs_to_compare(
    run: Run, files: ExportedPair, checks: Sequence[VariantCheck]
) -> tuple[str, ...]:
    """The files with the outputs before and after pruning; () where one of them is missing."""
    before, after = (check.outputs for check in checks)
    if before is None or after is None:
        # ONNX Runtime's CPU provider runs no bfloat16, but the torch module does
        before = files.dense.reference
        after = files.sparse.reference
    elif isinstance(run.source, OnnxSource) and files.float_check is None:
        before = files.dense.reference or before  # a converted file: as it came
    return () if before is None or after is None else (before, after)


def _without_outputs(run: Run, files: ExportedPair, checks: Sequence[VariantCheck]) -> Accuracy:
    """The figures of accuracy.json that the checks have already."""
    dense, sparse = checks
    unrounded = files.float_check
    batch = next(iter(run.example_inputs().values()), np.zeros(0))
    return Accuracy(
        drift=(),
        rounding=() if unrounded is None else dense.agreement,
        examples=len(batch) if batch.ndim else 1,
        metrics=_metrics(
            run.options, dense, sparse, {} if unrounded is None else unrounded.metrics
        ),
        not_compared=next((c.not_compared for c in checks if c.outputs is None), None),
        inputs_are=files.dense.inputs_are,
    )


def _metrics(
    options: RunOptions, dense: VariantCheck, sparse: VariantCheck, unrounded: Mapping[str, float]
) -> tuple[Metric, ...]:
    """The user's figures that both files have."""
    return tuple(
        Metric(
            name=name,
            dense=value,
            sparse=sparse.metrics[name],
            unquantized=unrounded.get(name),
            lower_is_better=options.budget.lower_is_better,
        )
        for name, value in dense.metrics.items()
        if name in sparse.metrics
    )


def _between(run: Run, names: tuple[str, ...]) -> tuple[OutputAgreement, ...]:
    """The outputs in the second file against those in the first; () without files."""
    if not names:
        return ()
    before, after = (stored_arrays(run.file(name)) for name in names)
    return agreement(before, {name: after[name] for name in before}, bounds=None)


def held_out_inputs(run: Run) -> Arrays:
    """Held-out samples by batch and input; {} where training may have seen them."""
    if run.options.calibration.data is None or run.model.weights(run) == (FINETUNED,):
        return {}
    file = run.file(HELD_OUT)
    return stored_arrays(file) if file.is_file() else {}


def _compare_on(run: Run, inputs: Arrays) -> tuple[OutputAgreement, ...]:
    """The pruned file against the dense one, in their outputs of floats; () without inputs."""
    if not inputs:
        return ()
    dense = run.onnx(run.options.dense_variant)
    sparse = run.sessions.open(run.onnx(SPARSE))  # it is open already
    after = run_batches(sparse.outputs, inputs, _MOST_BYTES)
    before = run_batches(run.sessions.open(dense).outputs, inputs, _MOST_BYTES)
    # the outputs of batch 3 are "3:logits" and "3:pooled"
    names = {key.partition(":")[2]: is_float(array.dtype) for key, array in before.items()}
    dense_outputs = {}
    sparse_outputs = {}
    for name, is_judged in names.items():
        if is_judged:
            dense_outputs[name] = _all_rows(before, name)
            sparse_outputs[name] = _all_rows(after, name)
    return agreement(dense_outputs, sparse_outputs, bounds=None)


def _all_rows(outputs: Arrays, name: str) -> np.ndarray:
    """One output of all batches, a row for each sample; shorter rows end in zeros."""
    batches = []
    for key, array in outputs.items():
        if key.partition(":")[2] == name:
            rows = np.atleast_1d(array)
            batches.append(rows.reshape(len(rows), -1))
    width = max(batch.shape[1] for batch in batches)
    # batches of 7 and of 9 tokens of 2 values: [8, 14] is padded to [8, 18]
    padded = []
    for batch in batches:
        missing = width - batch.shape[1]
        padded.append(np.pad(batch, ((0, 0), (0, missing))))
    return np.concatenate(padded)


def what_came_pruned(run: Run, pruned: PruneResult) -> str | None:
    """What is said about weights that came in N:M; None where all of them were pruned now.

    A model of --dense-reference is a baseline for them.
    """
    if run.dense_source is not run.source:
        return None
    rows = [row for row in pruned.weights if row.pruned]
    held = sum(row.held_before for row in rows)
    if not held:
        return None
    what = "so dense.onnx is no baseline"
    if pruned.pruned_now:
        what = "and what these lost is in no figure here"
    came_pruned = (
        f"{held} of {len(rows)} weights came in {pruned.pattern} already, {what} (name the dense "
        "model with --dense-reference MODEL)"
    )
    run.progress.note(came_pruned)
    return came_pruned


def lost_without_data(pruned: PruneResult) -> str | None:
    """What to say about weights that were pruned without data; None where there are none."""
    if pruned.calibration is not None:
        return None
    rows = pruned.pruned_now
    if not any(row.method in (None, DEFAULT_WITHOUT_DATA) for row in rows):
        return None
    return (
        f"{count(len(rows), 'weight')} pruned by magnitude, without calibration samples. "
        "`--calibrate DATA` usually keeps more accuracy"
    )


def prune_stage(
    run: Run,
    prune: Callable[[], PruneResult],
    files: Callable[[], tuple[str, ...]],
    reads: tuple[str, ...],
    into: str = "",
) -> Stage[PruneResult]:
    """prune.json and the `files` with the pruned weights; raises BadInputError where none is."""
    options = run.options

    def work() -> StageOutput[PruneResult]:
        pruned = replace(prune(), source=run.source.text)
        refuse_nothing_pruned(pruned)
        return pruned, files()

    return Stage(
        name="prune",
        title=f"prune to {options.pattern}{into}",
        record=PRUNE,
        kind=PruneResult,
        work=work,
        depends_on=(
            *(options.pattern, options.selection, options.method, options.calibration),
            run.key_of(run.source),
            run.calibration_key(),
            options.refits_a_mask and run.key_of(run.dense_source),
            into,
        ),
        reads=reads,
    )


def refuse_nothing_pruned(pruned: PruneResult) -> None:
    """Raise BadInputError where no weight was pruned: what follows would be a dense model."""
    if any(row.pruned for row in pruned.weights):
        return
    if not pruned.weights:
        uncovered = "".join(f"; {line}" for line in not_covered_lines(pruned.not_covered))
        raise BadInputError(
            f"{pruned.source} has no layer that could be pruned{uncovered}",
            hint="layers are Linear, Conv, ConvTranspose, MultiheadAttention and their sub-classes "
            "(in ONNX: Conv, ConvTranspose, Gemm, MatMul and Einsum with a constant weight)",
        )
    codes = Counter(row.reasons[0].code.value for row in pruned.weights if row.reasons)
    why = ", ".join(f"{code} {number}" for code, number in codes.most_common())
    hint = "add --include GLOB or --all-layers to prune what sparse kernels cannot use"
    if set(codes) == {ReasonCode.EXCLUDED.value}:
        hint = "exclude fewer layers"
    raise BadInputError(f"no weight of {pruned.source} is pruned: {why}", hint=hint)


def check_reference_fits(run: Run, files: ExportedPair) -> None:
    """Raise BadInputError where the dense reference has other inputs or outputs."""
    dense = (*files.dense.inputs, *files.dense.outputs)
    sparse = (*files.sparse.inputs, *files.sparse.outputs)
    if len(dense) != len(sparse) or not all(map(_fits, dense, sparse)):
        there, here = (", ".join(f"{t.in_words} {t.dtype}" for t in of) for of in (dense, sparse))
        raise BadInputError(
            f"--dense-reference {run.dense_source.text} does not fit {run.source.text}: its "
            f"inputs and outputs are {there}, those of the model {here}",
            hint="name the dense model that this one was fine-tuned from",
        )


def _fits(there: TensorShape, here: TensorShape) -> bool:
    # Example: (batch, 3, 224, 224) fits (1, 3, 224, 224), because a free size fits any.
    if (there.name, there.dtype, len(there.shape)) != (here.name, here.dtype, len(here.shape)):
        return False
    pairs = zip(there.shape, here.shape, strict=True)
    return all(one == other or str in map(type, (one, other)) for one, other in pairs)


def metric_key(options: RunOptions) -> str | None:
    """The metric's text, the hash of its code and its seed: an edited metric is run again."""
    if options.metric is None:
        return None
    from twofour.sources.user_code import code_key, parse_reference

    return f"{options.metric} {code_key(parse_reference(options.metric))} {options.seed}"
