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
from twofour.pipeline.stages import Run, Stage, StageOutput
from twofour.pruning.verify import (
    check_onnx,
    guess_weights,
    validate_onnx,
    validate_safetensors,
)
from twofour.records.export import ExportedFile, ExportedModel, ExportResult, LayerMap, OnnxFile
from twofour.records.options import Variant
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
            if name.endswith(".onnx"):
                model, required = run.models.open(run.file(name)), pruned_names(pruned)
                checked = validate_onnx(model, pruned.pattern, required=required)
                parts.append(replace(checked, files=(name,)))
            elif not name.endswith(".data"):
                checked = validate_shard(run.file(name), pruned, pruned.pattern)
                parts.append(replace(checked, files=(name,)))
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
    variants: Sequence[ExportedVariant],
    checks: Sequence[VariantCheck],
) -> Stage[ExportResult]:
    """export.json and layers.json over the variants, the sparse one last.

    Raises PatternBrokenError when a weight that was pruned is not N:M in sparse.onnx.
    """
    sparse = variants[-1]
    path = run.file(sparse.onnx.file)

    def work() -> StageOutput[ExportResult]:
        checked = validation
        if validation.files != (path.name,):
            opened = run.models.open(path)
            checked = _exported(opened, pruned, sparse.layers, pruned.pattern)
            checked = replace(checked, files=(path.name,))
        _refuse_broken(checked, path.name)
        write_record(run.file(LAYERS), sparse.layers)
        return ExportResult(
            **shared(sparse, ExportedModel)
            | {"notes": tuple(dict.fromkeys(n for exported in variants for n in exported.notes))},
            files=tuple(
                ExportedFile(
                    **shared(exported.onnx, OnnxFile),
                    agreement=check.agreement,
                    not_compared=check.not_compared,
                )
                for exported, check in zip(variants, checks, strict=True)
            ),
            pattern=checked,
        ), (LAYERS,)

    return Stage(
        name="export",
        title="validate the exported model",
        record=EXPORT,
        kind=ExportResult,
        work=work,
        reads=(
            *(PRUNE, VALIDATE),
            *onnx_files(path),
            *(record_of(f"export-{v.onnx.variant}") for v in variants),
            *(record_of(f"check-{v.onnx.variant}") for v in variants),
        ),
    )


def validate_exported(
    run: Run, pruned: PruneResult, exported: ExportedVariant
) -> Stage[Validation]:
    """The weights of an exported file that another stage changes; refuses broken ones."""
    path = run.file(exported.onnx.file)

    def work() -> StageOutput[Validation]:
        found = _exported(run.models.open(path), pruned, exported.layers, pruned.pattern)
        _refuse_broken(found, path.name)
        return replace(found, files=(path.name,)), ()

    return Stage(
        name=f"validate-{exported.onnx.variant}",
        title=f"validate {path.name}",
        kind=Validation,
        work=work,
        reads=(PRUNE, *onnx_files(path)),
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
        files = [path / name for name in _written_by_run(path)] if is_run_folder(path) else None
        if files is None:
            files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
            _refuse_other_names(path)
        for file in files:
            yield from _validations(file, pattern)
    elif path.suffix == ".onnx":
        record, model, layers = _record_beside(path), open_onnx(path), path.parent / LAYERS
        if record is not None and layers.is_file():
            names = read_record(LayerMap, layers)
            yield _exported(model, record, names, pattern or record.pattern)
        else:
            wanted = pattern or (HARDWARE_PATTERN if record is None else record.pattern)
            required = None if record is None else pruned_names(record)
            yield validate_onnx(model, wanted, required=required)
    elif path.suffix == ".safetensors":
        yield _safetensors(path, pattern)
    elif path.suffix in _PICKLES:
        yield _pickle(path, pattern)
    else:
        raise BadInputError(f"{path} cannot be checked", hint=_HINT)


def _refuse_other_names(folder: Path) -> None:
    """Raise BadInputError where an index and the files beside it name other tensors."""
    for index in folder.glob("*.safetensors.index.json"):
        named, stem = weight_map(index), index.name.removesuffix(".safetensors.index.json")
        shards = {file.name for file in folder.glob(f"{stem}-?????-of-?????.safetensors")}
        places = {
            key: (file, stored.offset)
            for file in sorted(shards.union(named.values()))
            for key, stored in read_header(folder / file).items()
        }
        known = {places.get(key) for key in named}  # the index leaves out tied weights
        wrong = [key for key, file in named.items() if places.get(key, ("",))[0] != file]
        if wrong := wrong + [key for key, place in places.items() if place not in known]:
            raise BadInputError(
                f"{index} and the files beside it differ in where {wrong[0]} is",
                hint="copy all parts of the checkpoint into the folder, or save it again",
            )


def _written_by_run(path: Path, ending: str = ".safetensors") -> tuple[str, ...]:
    """Files with weights that finished stages left; with the ending "" all of a copied folder."""
    manifest = read_manifest(path)
    written = {name for stage in manifest.stages for name in stage.outputs}
    copied = sorted(n for n in written if n.startswith(f"{CHECKPOINT}/") and n.endswith(ending))
    made = [stage for stage in manifest.stages if onnx_name(SPARSE) in stage.outputs]
    if made:  # from pruned.onnx, unless that is of a run before
        written -= {onnx_name(Variant.PRUNED)} - made[-1].inputs.keys()
    judged = (WEIGHTS, final_weights(path), onnx_name(Variant.PRUNED), onnx_name(SPARSE))
    return (*(name for name in dict.fromkeys(judged) if name in written), *copied)


def _stale(path: Path) -> tuple[str, ...]:
    """What changed of the files that are judged, and of the records that name their weights."""
    folder = path if path.is_dir() else _folder_of(path)
    if not is_run_folder(folder):
        return ()
    judged = _written_by_run(folder, "") if path.is_dir() else (str(path.relative_to(folder)),)
    models = (n for name in judged if name.endswith(".onnx") for n in onnx_files(folder / name))
    return changed_files(folder, (PRUNE, *judged, *models), (VALIDATE, LAYERS))


def _folder_of(path: Path) -> Path:
    return path.parent.parent if path.parent.name == CHECKPOINT else path.parent


def _record_beside(path: Path) -> PruneResult | None:
    folder = _folder_of(path)
    record = folder / PRUNE
    if not is_run_folder(folder) or not record.is_file():
        return None
    return read_record(PruneResult, record)


def _exported(
    model: OpenedModel, pruned: PruneResult, layers: LayerMap, pattern: Pattern
) -> Validation:
    """Judge the pruned weights of an ONNX file; the rows have the modules' names."""
    keys, names = pruned_names(pruned), {(n.node, n.initializer): n for n in layers.layers}
    required = frozenset(name.initializer for name in layers.layers if name.parameter in keys)
    found = validate_onnx(model, pattern, required=required)

    def named(check: WeightCheck) -> WeightCheck:
        name = names.get((check.node or "", check.weight))
        if name is None:
            return check
        needed = check.required and name.parameter in keys  # else the model's own code reads it
        return replace(check, layer=name.layer or check.layer, required=needed)

    return replace(found, checks=tuple(map(named, found.checks)))


def _safetensors(path: Path, pattern: Pattern | None) -> Validation:
    record = _record_beside(path)
    if record is None or (path.name not in (WEIGHTS, FINETUNED) and path.parent.name != CHECKPOINT):
        return validate_safetensors(path, guess_weights(path), pattern or HARDWARE_PATTERN)
    return validate_shard(path, record, pattern or record.pattern)


def validate_shard(path: Path, record: PruneResult, pattern: Pattern) -> Validation:
    """Judge the weights of prune.json that are in a file; all of them, where it is the only one."""
    weights, required = [row.weight for row in record.weights], pruned_names(record)
    if path.parent.name == CHECKPOINT:
        there = read_header(path).keys()
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
        try:
            checked = _safetensors(copy, pattern)
        except BadInputError as error:
            raise BadInputError(
                error.message.replace(str(copy), str(path)), hint=error.hint
            ) from error
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
        required = matches(check, *selection.include) if selection.include else check.required
        required = required and not matches(check, *selection.exclude)
        checks.append(replace(check, required=required))
    return replace(validation, checks=tuple(checks))


def _refuse_broken(validation: Validation, file: str) -> None:
    """Raise PatternBrokenError naming the first pruned weight that is not N:M."""
    if not validation.broken:
        return
    first = validation.broken[0]
    raise PatternBrokenError(
        f"{file}: {len(validation.broken)} pruned weights are not {validation.pattern}; first: "
        f"layer {first.layer}, weight {first.weight} {list(first.shape)}, axis {first.axis}: "
        f"{first.violations} of {first.groups_checked} groups, "
        f"first at {list(first.first_violation or ())}",
        hint="something changed the weights after pruning; `twofour validate` lists them all",
    )


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
