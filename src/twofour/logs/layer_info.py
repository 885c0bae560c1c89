"""Layer information and profiles that trtexec, Polygraphy and TensorRT's bindings write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from twofour.errors import BadInputError, system_errors
from twofour.logs.tactics import is_sparse_kernel, normal_id
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
_FLAT_FIELDS = (
    "ParameterType",
    "Groups",
    "OutMaps",
    "HasSparseWeights",
    "ConvHasSparseWeights",
    "TacticName",
    "TacticValue",
)
"""Fields of a detailed line whose values have no comma."""
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
    # Name: conv1, LayerType: CaskConvolution, Inputs: [ { Name: x, Location: Device, ...}],
    # Outputs: [ { Name: y, ...}], ..., Groups: 1, Weights: {Type: Half, Count: 800}, ...,
    # TacticName: sm80_xmma_fprop_..., TacticValue: 0x5b8bf1b8028629d9, StreamId: 0, Metadata: ...
    name, has_type, rest = line.partition(", LayerType: ")
    if not has_type or not name.startswith(_NAMED):
        return None
    inputs, _, after = rest.partition(", Outputs: [")
    outputs = after.partition("}], ")[0] + "}"
    fields: dict[str, object] = {key: _value(rest, key) for key in _FLAT_FIELDS}
    fields["Name"] = name.removeprefix(_NAMED)
    fields["LayerType"] = rest.partition(",")[0]
    fields["Inputs"] = _named(_TENSOR.findall(inputs[:_LONGEST_METADATA]))
    fields["Outputs"] = _named(_TENSOR.findall(outputs[:_LONGEST_METADATA]))
    weights = rest.partition(", Weights: {")[2].partition("}")[0]
    fields["Weights"] = {"Type": _value(f", {weights}", "Type")}
    _, has_metadata, metadata = rest.rpartition("Metadata: ")
    if has_metadata:
        fields["Metadata"] = metadata.strip()
    return _layer(fields)


def _value(text: str, key: str) -> str | None:
    _, is_there, after = text.partition(f", {key}: ")
    if not is_there:
        return None
    return after.partition(",")[0].strip()


def _named(names: list[str]) -> list[dict[str, str]]:
    return [{"Name": name} for name in names]


def onnx_nodes(metadata: str | None) -> tuple[str, ...]:
    """ONNX nodes named in Metadata, whatever separates them (U+001E, U+001F or nothing)."""
    names: dict[str, None] = {}
    for part in _SOURCES.split((metadata or "")[:_LONGEST_METADATA]):
        source = part.strip()
        if source.startswith(_SOURCE) and source.endswith("]"):
            names[source[len(_SOURCE) : -1]] = None
    return tuple(names)


# --- files ----------------------------------------------------------------------------------------

_DOCUMENT_START = re.compile(r"^[ \t]*[{\[](?=\s*(?:[\"{\[\]}]|$))", re.MULTILINE)
_MOST_DAMAGED = 8
_LARGEST_FILE = 1 << 30
_START_BYTES = 4096
_BEFORE_JSON = b"\xef\xbb\xbf \t\r\n"


def read_layer_information(path: Path) -> LayerInformation:
    """Layers of an engine from JSON.

    Raises BadInputError for a file that cannot be read or contains no layer.
    """
    layers: list[EngineLayer | None] = []
    for row in _objects(_text(path)):
        layers += map(_layer, _listed(row))
    engine_layers = tuple(filter(None, layers))
    if not engine_layers:
        raise BadInputError(
            f"{path} contains no layer information",
            hint="make it with: trtexec --exportLayerInfo=FILE --profilingVerbosity=detailed",
        )
    is_detailed = any(layer.layer_type is not None for layer in engine_layers)
    return LayerInformation(file=str(path), layers=engine_layers, detailed=is_detailed)


def read_profile(path: Path) -> Profile:
    """Time per layer, from a file of trtexec's --exportProfile; raises BadInputError."""
    iterations: int | None = None
    rows: list[LayerProfile] = []
    for item in _objects(_text(path)):
        iterations = _integer(item, "count") or iterations
        row = _profile_row(item)
        if row is not None:
            rows.append(row)
    if not rows:
        raise BadInputError(
            f"{path} contains no profile", hint="make it with: trtexec --exportProfile=FILE"
        )
    return Profile(iterations=iterations, layers=tuple(rows))


def _profile_row(item: dict[str, object]) -> LayerProfile | None:
    row = LayerProfile(
        name=_string(item, "name") or "",
        total_ms=_milliseconds(item, "timeMs"),
        average_ms=_milliseconds(item, "averageMs"),
        median_ms=_milliseconds(item, "medianMs"),
    )
    if not row.name or (row.total_ms is None and row.average_ms is None):
        return None
    return row


def _milliseconds(item: dict[str, object], key: str) -> float | None:
    value = item.get(key)
    if isinstance(value, (int, float)):
        return float(value)
    return None


def nothing_in(source: Path | str) -> str:
    """The note about a file without a TensorRT message, which often is one of the JSON files."""
    path = Path(source)
    with suppress(BadInputError, OSError):
        with path.open("rb") as file:
            start = file.read(_START_BYTES).lstrip(_BEFORE_JSON)
        if start.startswith((b"{", b"[")):
            return _kind_of_json(path)
    return "no TensorRT message in this file"


def _kind_of_json(path: Path) -> str:
    with suppress(BadInputError):
        read_profile(path)
        return "this is a profile: give it to `twofour report --profile`"
    read_layer_information(path)
    return "this is layer information: give it to `twofour report --layers`"


def _text(path: Path) -> str:
    with system_errors(f"cannot read {path}"), path.open("rb") as file:
        return file.read(_LARGEST_FILE).decode("utf-8-sig", "replace")


def documents(text: str) -> Iterator[object]:
    """Every JSON object or array that begins a line, in order; damaged ones are passed over.

    They end at the bracket that closes the first one: text may stand before, between and behind.
    """
    place = 0
    damaged = 0
    while damaged < _MOST_DAMAGED:
        start = _DOCUMENT_START.search(text, place)
        if start is None:
            return
        try:
            document, place = json.JSONDecoder().raw_decode(text, start.end() - 1)
        except (ValueError, RecursionError):
            place = start.end()
            damaged += 1
        else:
            yield document


def _objects(text: str) -> Iterator[dict[str, object]]:
    """The objects in the text, and those in its arrays."""
    for document in documents(text):
        items = document if isinstance(document, list) else [document]
        for item in items:
            if isinstance(item, dict):
                yield item


def _listed(item: dict[str, object]) -> list[object]:
    """The layers in `{"Layers": [...]}`, or the one layer the object is."""
    layers = item.get("Layers")
    if isinstance(layers, list):
        return layers
    return [item] if "LayerType" in item else []


def _layer(item: object) -> EngineLayer | None:
    """The layer in an object of layer information, or in a bare name."""
    if isinstance(item, str):
        return EngineLayer(name=item)
    if not isinstance(item, dict):
        return None
    name = _string(item, "Name")
    if name is None:
        return None
    kernel = _string(item, "TacticName") or None
    metadata = _string(item, "Metadata")
    return EngineLayer(
        name=name,
        layer_type=_string(item, "LayerType"),
        tactic_id=normal_id(_string(item, "TacticValue")),
        kernel=kernel,
        sparse=is_sparse_kernel(kernel),
        has_sparse_weights=_has_sparse_weights(item),
        parameter_type=_string(item, "ParameterType"),
        groups=_integer(item, "Groups"),
        out_maps=_integer(item, "OutMaps"),
        kernel_shape=_kernel_shape(item),
        weights_type=_weights_type(item),
        inputs=_tensor_names(item, "Inputs"),
        outputs=_tensor_names(item, "Outputs"),
        onnx_nodes=onnx_nodes(metadata),
        metadata=metadata,
    )


def _string(item: dict[str, object], key: str) -> str | None:
    value = item.get(key)
    return value if isinstance(value, str) else None


def _integer(item: dict[str, object], key: str) -> int | None:
    """The number, which a detailed line of a log has as text."""
    value = item.get(key)
    if isinstance(value, str) and value.isdecimal() and len(value) < 19:
        return int(value)
    if isinstance(value, int):
        return value
    return None


def _has_sparse_weights(item: dict[str, object]) -> bool | None:
    for key in ("HasSparseWeights", "ConvHasSparseWeights"):
        number = _integer(item, key)
        if number is not None:
            return bool(number)
    return None


def _kernel_shape(item: dict[str, object]) -> tuple[int, ...] | None:
    shape = item.get("Kernel")
    if not isinstance(shape, list):
        return None
    return tuple(size for size in shape if isinstance(size, int))


def _weights_type(item: dict[str, object]) -> str | None:
    weights = item.get("Weights")
    if not isinstance(weights, dict):
        return None
    return _string(weights, "Type")


def _tensor_names(item: dict[str, object], key: str) -> tuple[str, ...] | None:
    tensors = item.get(key)
    if not isinstance(tensors, list):
        return None
    names = [tensor.get("Name") for tensor in tensors if isinstance(tensor, dict)]
    return tuple(name for name in names if isinstance(name, str))
