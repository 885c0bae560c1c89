"""Saved weights are read back and judged: those of a path that the user names, and of a run.

In a run it follows pruning (validate.json), and the checks of both files (export.json).
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from twofour.eligibility.rules import holds_trivially
from twofour.errors import BadInputError, PatternBrokenError, naming
from twofour.graph.opened import OpenedModel, open_onnx
from twofour.graph.stored import read_header
from twofour.pipeline.folder import (
    CHECKPOINT,
    EXPORT,
    FINETUNED,
    LAYERS,
    PRUNE,
    SPARSE,
    VALIDATE,
    WEIGHTS,
    changed_files,
    final_weights,
    is_run_folder,
    onnx_files,
    onnx_name,
    read_manifest,
    record_of,
)
from twofour.pipeline.stages import ExportedPair, Run, Stage, StageOutput
from twofour.pruning.verify import check_onnx, guess_weights, validate_onnx, validate_safetensors
from twofour.records.export import ExportedFile, ExportedModel, ExportResult, LayerMap, OnnxFile
from twofour.records.run import ExportedVariant, VariantCheck
from twofour.records.weights import (
    HARDWARE_PATTERN,
    Pattern,
    PruneResult,
    Selection,
    Validation,
    WeightCheck,
    shared,
)
from twofour.sources.checkpoint import weight_map
from twofour.store import read_record, write_record

_HINT = "give an .onnx, .safetensors, .pt, .pth or .bin file, a checkpoint folder, or a run folder"
_PICKLES = (".bin", ".pt", ".pth")


def validate_path(path: Path, pattern: Pattern | None, selection: Selection) -> Validation:
    """Judge the saved weights behind a path; `pattern` None: the run's own, else 2:4.

    In a run folder the weights that prune.json calls pruned must be in the pattern; elsewhere all
    that sparse kernels could use. `selection` narrows that. Raises BadInputError.
    """
    if not path.exists():
        raise BadInputError(f"{path} does not exist", hint=_HINT)
    parts = list(_validations(path, pattern))
    if not parts:
        raise BadInputError(f"{path} contains nothing to check", hint=_HINT)
    return replace(_selected(merged(parts), selection), stale=_stale(path))


def validate_weights(run: Run, pruned: PruneResult, names: Sequence[str]) -> Stage[Validation]:
    """validate.json: the pruned weights as they were saved, read back from these files."""

    def work() -> StageOutput[Validation]:
        parts = []
        for name in names:
            if name.endswith(".data"):
                continue  # read with the .onnx file that it belongs to
            if name.endswith(".onnx"):
                model = run.models.open(run.file(name))
                part = validate_onnx(model, pruned.pattern, required=pruned_names(pruned))
            else:
                part = validate_shard(run.file(name), pruned, pruned.pattern)
            parts.append(replace(part, files=(name,)))
        return merged(parts), ()

    return Stage(
        name="validate",
        title="validate the saved weights",
        record=VALIDATE,
        kind=Validation,
        work=work,
        reads=(PRUNE, *names),
    )


def combine_exports(
    run: Run,
    pruned: PruneResult,
    validation: Validation,
    files: ExportedPair,
    checks: Sequence[VariantCheck],
) -> Stage[ExportResult]:
    """export.json and layers.json over the variants, the sparse one last.

    Raises PatternBrokenError when a weight that was pruned is not N:M in sparse.onnx.
    """
    sparse = files.sparse
    variants = (files.dense, sparse)

    def work() -> StageOutput[ExportResult]:
        judged = validation
        if validation.files == (sparse.onnx.file,):  # an ONNX file is pruned in sparse.onnx itself
            _refuse_broken(validation)
        else:
            judged = _judge_exported(run, pruned, sparse)
        write_record(run.file(LAYERS), sparse.layers)
        notes = [note for exported in variants for note in exported.notes]
        common = shared(sparse, ExportedModel) | {"notes": tuple(dict.fromkeys(notes))}
        exported_files = map(_exported_file, variants, checks)
        return ExportResult(**common, files=tuple(exported_files), pattern=judged), (LAYERS,)

    reads = [PRUNE, VALIDATE, *onnx_files(run.file(sparse.onnx.file))]
    for stage in ("export", "check"):
        reads += [record_of(f"{stage}-{exported.onnx.variant}") for exported in variants]
    return Stage(
        name="export",
        title="validate the exported model",
        record=EXPORT,
        kind=ExportResult,
        work=work,
        reads=tuple(reads),
    )


def _exported_file(exported: ExportedVariant, check: VariantCheck) -> ExportedFile:
    return ExportedFile(
        **shared(exported.onnx, OnnxFile),
        agreement=check.agreement,
        not_compared=check.not_compared,
    )


def validate_exported(
    run: Run, pruned: PruneResult, exported: ExportedVariant
) -> Stage[Validation]:
    """The weights of an exported file that another stage changes; refuses broken ones."""
    file = exported.onnx.file
    return Stage(
        name=f"validate-{exported.onnx.variant}",
        title=f"validate {file}",
        kind=Validation,
        work=lambda: (_judge_exported(run, pruned, exported), ()),
        reads=(PRUNE, *onnx_files(run.file(file))),
    )


def _judge_exported(run: Run, pruned: PruneResult, exported: ExportedVariant) -> Validation:
    """Read an exported file back; raises PatternBrokenError for a pruned weight that is not N:M."""
    path = run.file(exported.onnx.file)
    judged = _exported(run.models.open(path), pruned, exported.layers, pruned.pattern)
    judged = replace(judged, files=(path.name,))
    _refuse_broken(judged)
    return judged


def _refuse_broken(validation: Validation) -> None:
    """Raise PatternBrokenError naming the first pruned weight that is not N:M."""
    broken = validation.broken
    if not broken:
        return
    first = broken[0]
    raise PatternBrokenError(
        f"{validation.files[0]}: {len(broken)} pruned weights are not {validation.pattern}; first: "
        f"layer {first.layer}, weight {first.weight} {list(first.shape)}, axis {first.axis}: "
        f"{first.violations} of {first.groups_checked} groups, "
        f"first at {list(first.first_violation or ())}",
        hint="something changed the weights after pruning; `twofour validate` lists them all",
    )


def pruned_names(pruned: PruneResult) -> frozenset[str]:
    """state_dict keys, or initializers, of the weights that were pruned."""
    names = (row.weight.weight for row in pruned.weights if row.pruned)
    return frozenset(name for name in names if name is not None)


def merged(parts: Sequence[Validation]) -> Validation:
    """One validation over several files, each row with its file."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        files=tuple(file for part in parts for file in part.files),
        checks=tuple(replace(c, file=part.files[0]) for part in parts for c in part.checks),
        skipped=tuple(weight for part in parts for weight in part.skipped),
        not_covered=tuple(group for part in parts for group in part.not_covered),
    )


def _validations(path: Path, pattern: Pattern | None) -> Iterator[Validation]:
    if path.is_dir():
        for file in _files_in(path):
            yield from _validations(file, pattern)
    elif path.suffix == ".onnx":
        yield _onnx(path, pattern)
    elif path.suffix == ".safetensors":
        yield _safetensors(path, pattern)
    elif path.suffix in _PICKLES:
        yield _pickle(path, pattern)
    else:
        raise BadInputError(f"{path} cannot be checked", hint=_HINT)


def _files_in(folder: Path) -> list[Path]:
    """The files with weights that a run left in its folder, or those of a checkpoint."""
    if is_run_folder(folder):
        return [folder / name for name in _written_by_run(folder)]
    for index in folder.glob("*.safetensors.index.json"):
        weight_map(index)  # which refuses one of files that are not there
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


def _written_by_run(path: Path, ending: str = ".safetensors") -> tuple[str, ...]:
    """Files with weights that finished stages left; with the ending "" all of a copied folder."""
    written = {name for stage in read_manifest(path).stages for name in stage.outputs}
    # fine-tuning leaves weights.safetensors as it was, beside finetuned.safetensors
    judged = dict.fromkeys((WEIGHTS, final_weights(path), onnx_name(SPARSE)))
    shards = [name for name in written if name.startswith(f"{CHECKPOINT}/")]
    copied = sorted(name for name in shards if name.endswith(ending))
    return (*(name for name in judged if name in written), *copied)


def _stale(path: Path) -> tuple[str, ...]:
    """What changed of the files that are judged, and of the records that name their weights."""
    folder = path if path.is_dir() else _folder_of(path)
    if not is_run_folder(folder):
        return ()
    judged: tuple[str, ...] = (str(path.relative_to(folder)),)
    if path.is_dir():
        judged = _written_by_run(folder, "")
    files = [PRUNE, *judged]
    for name in judged:
        if name.endswith(".onnx"):
            files += onnx_files(folder / name)
    return changed_files(folder, files, (VALIDATE, LAYERS))


def _folder_of(path: Path) -> Path:
    # runs/llama/checkpoint/model-00001-of-00002.safetensors is in runs/llama
    folder = path.parent
    return folder.parent if folder.name == CHECKPOINT else folder


def _record_beside(path: Path) -> PruneResult | None:
    folder = _folder_of(path)
    record = folder / PRUNE
    if not is_run_folder(folder) or not record.is_file():
        return None
    return read_record(PruneResult, record)


def _onnx(path: Path, pattern: Pattern | None) -> Validation:
    record = _record_beside(path)
    model = open_onnx(path)
    if record is None:
        return validate_onnx(model, pattern or HARDWARE_PATTERN)
    pattern = pattern or record.pattern
    layers = path.parent / LAYERS
    if layers.is_file():
        return _exported(model, record, read_record(LayerMap, layers), pattern)
    return validate_onnx(model, pattern, required=pruned_names(record))


def _exported(
    model: OpenedModel, pruned: PruneResult, layers: LayerMap, pattern: Pattern
) -> Validation:
    """Judge the pruned weights of an ONNX file; the rows have the modules' names."""
    keys = pruned_names(pruned)
    names = {(name.node, name.initializer): name for name in layers.layers}
    required = frozenset(name.initializer for name in layers.layers if name.parameter in keys)

    def named(check: WeightCheck) -> WeightCheck:
        name = names.get((check.node or "", check.weight))
        if name is None:
            return check
        needed = check.required and name.parameter in keys  # else the model's own code reads it
        return replace(check, layer=name.layer or check.layer, required=needed)

    judged = validate_onnx(model, pattern, required=required)
    return replace(judged, checks=tuple(map(named, judged.checks)))


def _safetensors(path: Path, pattern: Pattern | None) -> Validation:
    record = _record_beside(path)
    is_of_run = path.name in (WEIGHTS, FINETUNED) or path.parent.name == CHECKPOINT
    if record is None or not is_of_run:
        return validate_safetensors(path, guess_weights(path), pattern or HARDWARE_PATTERN)
    return validate_shard(path, record, pattern or record.pattern)


def validate_shard(path: Path, record: PruneResult, pattern: Pattern) -> Validation:
    """Judge the weights of prune.json that are in a file; all of them, where it is the only one."""
    weights = [row.weight for row in record.weights]
    required = pruned_names(record)
    if path.parent.name == CHECKPOINT:
        there = read_header(path).keys()  # a shard has a part of them
        weights = [w for w in weights if w.weight in there]
        required &= there
        if not weights:
            return Validation(files=(str(path),), pattern=pattern, checks=())
    return validate_safetensors(path, weights, pattern, required=required)


def _pickle(path: Path, pattern: Pattern | None) -> Validation:
    """A torch checkpoint, read without running its code, judged by way of a safetensors copy."""
    from twofour.pipeline.torch.weight_files import save_tensors
    from twofour.sources.checkpoint import read_state_dict

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / WEIGHTS
        with naming(path):
            save_tensors(read_state_dict(path), copy)
        try:  # an error is about the file that the user named, not about the copy
            checked = _safetensors(copy, pattern)
        except BadInputError as error:
            error.message = error.message.replace(str(copy), str(path))
            raise
    return replace(checked, files=(str(path),))


def _selected(validation: Validation, selection: Selection) -> Validation:
    """Narrow what is required to the layers that the globs leave."""

    def matches(check: WeightCheck, *globs: str) -> bool:
        return any(fnmatchcase(n, glob) for glob in globs for n in (check.layer, check.weight))

    for glob in (*selection.include, *selection.exclude):
        if not any(matches(check, glob) for check in validation.checks):
            raise BadInputError(
                f"no checked layer matches {glob!r}",
                hint="the first column of the table has the names",
            )
    checks = []
    for check in validation.checks:
        required = check.required
        if selection.include:
            required = matches(check, *selection.include)
        if matches(check, *selection.exclude):
            required = False
        checks.append(replace(check, required=required))
    return replace(validation, checks=tuple(checks))


def refuse_other_files(onnx: Path) -> None:
    """Raise BadInputError for a file to build that has another ending."""
    if onnx.suffix != ".onnx":
        raise BadInputError(f"{onnx} is not an .onnx file", hint="name one, like RUN/sparse.onnx")


def why_not_sparse(model: OpenedModel, named: str) -> str | None:
    """What to say of a file to build in which no weight is 2:4; None where any is."""
    checks = check_onnx(model, HARDWARE_PATTERN).checks
    breakable = [c for c in checks if not holds_trivially(c.shape, c.axis, HARDWARE_PATTERN)]
    if not all(check.violations for check in breakable):
        return None
    return (
        f"{named} is dense: no weight in it is {HARDWARE_PATTERN}, so no sparse kernel can run. "
        f"Prune it first: twofour prune {shlex.quote(named)}"
    )
