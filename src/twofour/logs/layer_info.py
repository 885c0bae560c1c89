"""Layer information and profiles that trtexec, Polygraphy and TensorRT's bindings write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from twofour.errors import BadInputError, system_errors
from twofour.logs.kernels import is_sparse_kernel, normal_id
from twofour.records.log import EngineLayer, LayerInformation, LayerProfile, Profile

_LISTED = re.compile(r"Layer\(([\w.]{1,80})\): ")
_TACTIC = re.compile(r", Tactic: (0x[0-9a-fA-F]{1,16}|-?\d{1,20})(?:,|$)")
_LISTED_TENSOR = re.compile(
    r"(?:^|, ?)(?! )(.{1,400}?)(?: \(\w+\[[^\[\]]*\]\)|\[\w+\([^()]*\)\])(?=,|$)"
)
"""A tensor in a list: `relu (Half[-1,32])` in TensorRT 10, `relu[Half(1,32)]` in 8."""
_SOURCE = "[ONNX Layer: "
_SOURCES = re.compile(r"[\x1e\x1f]|(?<=\])(?=\[ONNX Layer: )")
_TENSOR = re.compile(r"\{ Name: ([^{}]{1,400}?), (?:Location|Dimensions|Format/Datatype): ")
_NAMED = "Name: "
_LAYER_TYPE = ", LayerType: "
_LONGEST_METADATA = 20_000


def listed_layer(line: str) -> EngineLayer | None:
    """The layer in `Layer(RUNNER): NAME, Tactic: ID, inputs -> outputs`, without its kernel."""
    match = _LISTED.match(line)
    if match is None:
        return None
    tactic = _TACTIC.search(line, match.end())
    if tactic is None:
        return None
    inputs, _, outputs = line[tactic.end() :].partition(" -> ")
    return EngineLayer(
        name=line[match.end() : tactic.start()],
        layer_type=match[1],
        tactic_id=normal_id(tactic[1]),
        inputs=tuple(_LISTED_TENSOR.findall(inputs.strip()[:_LONGEST_METADATA])),
        outputs=tuple(_LISTED_TENSOR.findall(outputs.strip()[:_LONGEST_METADATA])),
    )


def detailed_layer(line: str) -> EngineLayer | None:
    """The layer in `Name: ..., LayerType: ..., ...`, which detailed profiling verbosity prints."""
    if not line.startswith("Name: ") or _LAYER_TYPE not in line:
        return None
    name, _, rest = line[6:].partition(_LAYER_TYPE)
    kernel = _value(rest, "TacticName") or None
    inputs, _, after = rest.partition(", Outputs: [")
    outputs = after.partition("}], ")[0] + "}"
    sparse = _value(rest, "HasSparseWeights") or _value(rest, "ConvHasSparseWeights")
    weights = rest.partition("Weights: {")[2].partition("}")[0]
    metadata = rest.rpartition("Metadata: ")[2].strip() if "Metadata: " in rest else None
    return EngineLayer(
        name=name,
        layer_type=rest.partition(",")[0],
        tactic_id=normal_id(_value(rest, "TacticValue")),
        kernel=kernel,
        sparse=is_sparse_kernel(kernel),
        has_sparse_weights=None if sparse is None else sparse == "1",
        parameter_type=_value(rest, "ParameterType"),
        groups=_digits(_value(rest, "Groups")),
        out_maps=_digits(_value(rest, "OutMaps")),
        weights_type=_value(f", {weights}", "Type") if weights else None,
        inputs=tuple(_TENSOR.findall(inputs[:_LONGEST_METADATA])),
        outputs=tuple(_TENSOR.findall(outputs[:_LONGEST_METADATA])),
        onnx_nodes=onnx_nodes(metadata),
        metadata=metadata,
    )


def onnx_nodes(metadata: str | None) -> tuple[str, ...]:
    """ONNX nodes named in Metadata, whatever separates them (U+001E, U+001F or nothing)."""
    text = (metadata or "")[:_LONGEST_METADATA]
    parts = (part.strip() for part in _SOURCES.split(text))
    names = (p[len(_SOURCE) : -1] for p in parts if p.startswith(_SOURCE) and p.endswith("]"))
    return tuple(dict.fromkeys(names))


def _value(text: str, key: str) -> str | None:
    """Value of a flat field (no comma in it)."""
    _, found, after = text.partition(f", {key}: ")
    return after.partition(",")[0].strip() if found else None


def _digits(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and len(text) < 19 else None


_DOCUMENT_START = re.compile(r"^[ \t]*[{\[](?=\s*(?:[\"{\[\]}]|$))", re.MULTILINE)
_MOST_DAMAGED = 8
_LARGEST_FILE = 1 << 30
_START_BYTES = 4096
_NOTHING = "no TensorRT message in this file"


def read_layer_information(path: Path) -> LayerInformation:
    """Layers of an engine from JSON, or from text with `Name: ..., LayerType: ...` lines.

    Raises BadInputError for a file that cannot be read or contains no layer.
    """
    text = _text(path)
    layers = _layers_in(text)
    if not layers:
        raise BadInputError(
            f"{path} contains no layer information",
            hint="make it with: trtexec --exportLayerInfo=FILE --profilingVerbosity=detailed",
        )
    return LayerInformation(
        file=str(path),
        layers=tuple(layers),
        detailed=any(layer.layer_type is not None for layer in layers),
    )


def _layers_in(text: str) -> list[EngineLayer]:
    layers = [layer for document in documents(text) for layer in _layers(document)]
    if not layers:
        lines = (line[line.find(_NAMED) :].strip() for line in text.splitlines() if _NAMED in line)
        layers = [layer for line in lines if (layer := detailed_layer(line)) is not None]
    return layers


def read_profile(path: Path) -> Profile:
    """Time per layer, from a file of trtexec's --exportProfile; raises BadInputError."""
    iterations: int | None = None
    rows: list[LayerProfile] = []
    text = _text(path)
    for document in documents(text):
        for item in document if isinstance(document, list) else [document]:
            if isinstance(item, dict) and isinstance(item.get("count"), int):
                iterations = item["count"]
            elif isinstance(item, dict) and isinstance(item.get("name"), str):
                rows.append(_profile_row(item))
    if not rows:
        raise BadInputError(
            f"{path} contains no profile", hint="make it with: trtexec --exportProfile=FILE"
        )
    return Profile(iterations=iterations, layers=tuple(rows))


def nothing_in(source: Path | str) -> str:
    """The note about a file without a TensorRT message, which often is one of the JSON files."""
    path = Path(source)
    if str(source) == "-" or path.suffix == ".ipynb":
        return _NOTHING
    with suppress(BadInputError, OSError, RecursionError):
        with path.open("rb") as file:
            start = file.read(_START_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")
        if start[:1] not in {b"{", b"["}:
            return _NOTHING
        with suppress(BadInputError, RecursionError):
            rows = read_profile(path).layers
            if any(row.total_ms is not None or row.average_ms is not None for row in rows):
                return "this is a profile: give it to `twofour report --profile`"
        read_layer_information(path)
        return "this is layer information: give it to `twofour report --layers`"
    return _NOTHING


def documents(text: str) -> Iterator[object]:
    """Every JSON object or array that begins a line, in order; damaged ones are passed over.

    They end at the bracket that closes the first one: text may stand before, between and behind.
    """
    place, damaged = 0, 0
    while damaged < _MOST_DAMAGED and (start := _DOCUMENT_START.search(text, place)) is not None:
        try:
            document, place = json.JSONDecoder().raw_decode(text, start.end() - 1)
        except (ValueError, RecursionError):
            place = start.end()
            damaged += 1
        else:
            yield document


def _text(path: Path) -> str:
    with system_errors(f"cannot read {path}"), path.open("rb") as file:
        return file.read(_LARGEST_FILE).decode("utf-8-sig", "replace")


def _layers(document: object) -> list[EngineLayer]:
    """Layers of `{"Layers": [...]}`, of a bare array, or the one layer the document is."""
    found, waiting = list[EngineLayer](), [document]
    while waiting:  # arrays may be nested as deep as JSON allows
        item = waiting.pop()
        if isinstance(item, list):
            waiting += reversed(item)
        elif isinstance(item, dict):
            listed = item.get("Layers", item.get("layers"))
            single = [item] if "LayerType" in item else []
            every = map(_layer, listed if isinstance(listed, list) else single)
            found += [layer for layer in every if layer is not None]
    return found


def _layer(item: object) -> EngineLayer | None:
    if isinstance(item, str):
        return EngineLayer(name=item)
    if not isinstance(item, dict) or not isinstance(item.get("Name"), str):
        return None
    kernel = _string(item, "TacticName") or None
    weights = item.get("Weights")
    weights = weights if isinstance(weights, dict) else {}
    metadata = _string(item, "Metadata")
    sparse = item.get("HasSparseWeights", item.get("ConvHasSparseWeights"))
    shape = item.get("Kernel")
    return EngineLayer(
        name=item["Name"],
        layer_type=_string(item, "LayerType"),
        tactic_id=normal_id(_string(item, "TacticValue")),
        kernel=kernel,
        sparse=is_sparse_kernel(kernel),
        has_sparse_weights=None if sparse is None else bool(sparse),
        parameter_type=_string(item, "ParameterType"),
        groups=_integer(item, "Groups"),
        out_maps=_integer(item, "OutMaps"),
        kernel_shape=None
        if not isinstance(shape, list)
        else tuple(n for n in shape if isinstance(n, int)),
        weights_type=_string(weights, "Type"),
        inputs=_tensor_names(item.get("Inputs")),
        outputs=_tensor_names(item.get("Outputs")),
        onnx_nodes=onnx_nodes(metadata),
        metadata=metadata,
    )


def _string(item: dict[str, object], key: str) -> str | None:
    value = item.get(key)
    return value if isinstance(value, str) else None


def _integer(item: dict[str, object], key: str) -> int | None:
    value = item.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _tensor_names(tensors: object) -> tuple[str, ...] | None:
    if not isinstance(tensors, list):
        return None
    found = (t.get("Name") for t in tensors if isinstance(t, dict))
    return tuple(name for name in found if isinstance(name, str))


def _profile_row(item: dict[str, object]) -> LayerProfile:
    def figure(*keys: str) -> float | None:
        values = (item.get(key) for key in keys)
        value = next((v for v in values if isinstance(v, (int, float))), None)
        return None if value is None else float(value)

    return LayerProfile(
        name=str(item["name"]),
        total_ms=figure("timeMs", "time_ms"),
        average_ms=figure("averageMs", "average_ms"),
        median_ms=figure("medianMs", "median_ms"),
    )
