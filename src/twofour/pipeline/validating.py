"""`twofour validate`: which rule applies to the path that was named, and the rows of every file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from twofour.errors import BadInputError
from twofour.graph.opened import open_onnx
from twofour.pipeline.exporting import initializers_of_pruned, pruned_names, with_layer_names
from twofour.pipeline.folder import MANIFEST, is_run_folder
from twofour.pipeline.stages import LAYERS, SPARSE, WEIGHTS, onnx_name
from twofour.pruning.verify import guess_weights, validate_onnx, validate_safetensors
from twofour.records.export import LayerMap
from twofour.records.options import Selection
from twofour.records.pruning import PruneResult, Validation, WeightCheck
from twofour.records.run import RunManifest
from twofour.records.weights import HARDWARE_PATTERN, Pattern
from twofour.store import read_record

_HINT = "give an .onnx, .safetensors, .pt, .pth or .bin file, a checkpoint folder, or a run folder"
_PRUNE = "prune.json"
_PICKLES = (".bin", ".pt", ".pth")


def validate_path(path: Path, pattern: Pattern | None, selection: Selection) -> Validation:
    """Judge the saved weights behind a path; `pattern` None: the run's own, else 2:4.

    A run folder, and the files in it, are held to what prune.json says was pruned; other files to
    all that sparse math could use. `selection.include` narrows that, `exclude` takes away from it.
    Raises BadInputError for a path that is none of these, and where nothing can be checked.
    """
    if not path.exists():
        raise BadInputError(f"{path} does not exist", hint=_HINT)
    parts = [judge(pattern) for judge in _judges(path)]
    if not parts:
        raise BadInputError(f"{path} holds nothing to check", hint=_HINT)
    return _selected(merged(parts), selection)


def merged(parts: Sequence[Validation]) -> Validation:
    """One validation over several files, every row with its file."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        files=tuple(file for part in parts for file in part.files),
        checks=tuple(replace(c, file=part.files[0]) for part in parts for c in part.checks),
        skipped=tuple(weight for part in parts for weight in part.skipped),
        not_covered=tuple(group for part in parts for group in part.not_covered),
    )


_Judge = Callable[[Pattern | None], Validation]


def _judges(path: Path) -> Iterator[_Judge]:
    if path.is_dir():
        yield from _of_folder(path)
    elif path.suffix == ".onnx":
        yield lambda pattern: _onnx(path, pattern)
    elif path.suffix == ".safetensors":
        yield lambda pattern: _safetensors(path, pattern)
    elif path.suffix in _PICKLES:
        yield lambda pattern: _pickle(path, pattern)
    else:
        raise BadInputError(f"{path} cannot be checked", hint=_HINT)


def _of_folder(path: Path) -> Iterator[_Judge]:
    if is_run_folder(path):
        files = [path / name for name in _written_by_run(path)]
    else:
        files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
    for file in files:
        yield from _judges(file)


def _written_by_run(path: Path) -> tuple[str, ...]:
    """Files with weights that finished stages of a run left; one that is gone is an error."""
    manifest = read_record(RunManifest, path / MANIFEST)
    written = {name for stage in manifest.stages for name in stage.outputs}
    names = tuple(name for name in (WEIGHTS, onnx_name(SPARSE)) if name in written)
    for name in names:
        if not (path / name).is_file():
            raise BadInputError(
                f"{path / name} is gone, and run.json says that the run wrote it",
                hint="the command that made the folder makes it again",
            )
    return names


def _record_beside(path: Path) -> PruneResult | None:
    record = path.parent / _PRUNE
    if not is_run_folder(path.parent) or not record.is_file():
        return None
    return read_record(PruneResult, record)


def _onnx(path: Path, pattern: Pattern | None) -> Validation:
    record, model = _record_beside(path), open_onnx(path)
    layers = path.parent / LAYERS
    if record is None:
        return validate_onnx(model, pattern or HARDWARE_PATTERN)
    if not layers.is_file():
        return validate_onnx(model, pattern or record.pattern, required=pruned_names(record))
    names = read_record(LayerMap, layers)
    required = initializers_of_pruned(record, names)
    checked = validate_onnx(model, pattern or record.pattern, required=required)
    return with_layer_names(checked, names)


def _safetensors(path: Path, pattern: Pattern | None) -> Validation:
    record = _record_beside(path)
    if record is None or path.name != WEIGHTS:
        return validate_safetensors(path, guess_weights(path), pattern or HARDWARE_PATTERN)
    weights = tuple(row.weight for row in record.weights)
    return validate_safetensors(
        path, weights, pattern or record.pattern, required=pruned_names(record)
    )


def _pickle(path: Path, pattern: Pattern | None) -> Validation:
    """A torch checkpoint, read without running its code, judged by way of a safetensors copy."""
    from twofour.pipeline.weights_file import read_checkpoint, save_tensors

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / WEIGHTS
        save_tensors(read_checkpoint(path), copy)
        try:
            checked = _safetensors(copy, pattern)
        except BadInputError as error:
            raise BadInputError(
                error.message.replace(str(copy), str(path)), hint=error.hint
            ) from error
    return replace(checked, files=(str(path),))


def _selected(validation: Validation, selection: Selection) -> Validation:
    """Narrow what is required to the layers that the globs leave."""
    for glob in (*selection.include, *selection.exclude):
        if not any(_matches(check, glob) for check in validation.checks):
            raise BadInputError(
                f"no checked layer matches {glob!r}",
                hint="the first column of the table has the names",
            )
    checks = tuple(replace(c, required=_required(c, selection)) for c in validation.checks)
    return replace(validation, checks=checks)


def _required(check: WeightCheck, selection: Selection) -> bool:
    if any(_matches(check, glob) for glob in selection.exclude):
        return False
    if selection.include:
        return any(_matches(check, glob) for glob in selection.include)
    return check.required


def _matches(check: WeightCheck, glob: str) -> bool:
    return fnmatchcase(check.layer, glob) or fnmatchcase(check.weight, glob)
