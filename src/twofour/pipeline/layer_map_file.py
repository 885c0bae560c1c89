"""Layer maps from files: our own layers.json, or the user's table of engine names and layers."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from twofour.errors import BadInputError, naming
from twofour.logs.prefix import loads
from twofour.records.export import LayerMap
from twofour.store import from_json

_LARGEST_BYTES = 1 << 26
_ENGINE = ("engine_layer", "engine", "name")
_LAYER = ("layer", "layers", "node", "nodes")
_HINT = (
    'write {"engine name": "layer or ONNX node", ...}, or lines of CSV: engine name, layer; '
    "or give the layers.json of a run folder"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """What one file says of names."""

    modules: LayerMap | None = None
    """Ours: module and parameter of each node."""
    engine: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The user's: a name of engine or log, and the layers or ONNX nodes that it holds."""


def read_layer_names(path: Path) -> LayerNames:
    """Read a layer map of either kind; raises BadInputError for any other file."""
    text = _text(path)
    if text.lstrip()[:1] not in ("{", "["):
        return LayerNames(engine=tuple(_of_csv(text, path)))
    try:
        value = loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path} is no JSON: {error}", hint=_HINT) from error
    if isinstance(value, dict) and isinstance(value.get("layers"), list):
        with naming(path):
            return LayerNames(modules=from_json(LayerMap, text.encode()))
    return LayerNames(engine=tuple(_of_json(value, path)))


def map_beside(onnx: Path) -> Path | None:
    """The layers.json that was written beside an ONNX file; None for a file of another kind.

    TensorRT's layer information is often called so, too.
    """
    path = onnx.parent / "layers.json"
    try:
        return path if path.is_file() and read_layer_names(path).modules is not None else None
    except BadInputError:
        return None


def _of_json(value: object, path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    pairs: Iterable[tuple[object, object]]
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = [(_first(row, _ENGINE), _first(row, _LAYER)) for row in value]
    else:
        pairs = [(None, None)]
    for engine, layers in pairs:
        names = (layers,) if isinstance(layers, str) else layers
        if not isinstance(engine, str) or not isinstance(names, (tuple, list)) or not names:
            raise _unreadable(path, f"{engine!r}: {layers!r}")
        if not all(isinstance(name, str) for name in names):
            raise _unreadable(path, f"{engine!r}: {layers!r}")
        yield engine, tuple(names)


def _first(row: object, keys: Iterable[str]) -> object:
    return next((row[key] for key in keys if key in row), None) if isinstance(row, dict) else None


def _of_csv(text: str, path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Two columns or more: an engine name, then its layers; a line of headings may come first."""
    delimiter = "\t" if "\t" in text.partition("\n")[0] else ","
    try:
        rows = list(csv.reader(text.splitlines(), delimiter=delimiter, skipinitialspace=True))
    except csv.Error as error:
        raise _unreadable(path, str(error)) from error
    rows = [[cell.strip() for cell in row] for row in rows if any(cell.strip() for cell in row)]
    if rows and rows[0][0].lower() in _ENGINE and rows[0][-1].lower() in _LAYER:
        del rows[0]
    if not rows:
        raise _unreadable(path, "no line")
    for row in rows:
        names = tuple(cell for cell in row[1:] if cell)
        if not row[0] or not names:
            raise _unreadable(path, delimiter.join(row))
        yield row[0], names


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror or error}") from error
    if len(data) > _LARGEST_BYTES:
        raise BadInputError(f"{path} is too large for a layer map", hint=_HINT)
    return data.decode("utf-8-sig", "replace")


def _unreadable(path: Path, found: str) -> BadInputError:
    return BadInputError(f"{path} is no layer map: {found[:200]}", hint=_HINT)
