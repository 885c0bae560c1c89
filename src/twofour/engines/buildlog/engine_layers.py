"""Layers of the finished engine, from the text a log has of them (JSON: layer_information.py)."""

from __future__ import annotations

import re

from twofour.engines.buildlog.names import is_sparse_kernel, normal_id
from twofour.records.log import EngineLayer

_LISTED = re.compile(r"Layer\(([\w.]{1,80})\): ")
_TACTIC = re.compile(r", Tactic: (0x[0-9a-fA-F]{1,16}|-?\d{1,20})(?:,|$)")
_LISTED_TENSOR = re.compile(
    r"(?:^|, ?)(?! )(.{1,400}?)(?: \(\w+\[[^\[\]]*\]\)|\[\w+\([^()]*\)\])(?=,|$)"
)
"""`relu (Half[-1,32])` of TensorRT 10, `relu[Half(1,32)]` of 8."""
_SOURCE = "[ONNX Layer: "
_SOURCES = re.compile(r"[\x1e\x1f]|(?<=\])(?=\[ONNX Layer: )")
_TENSOR = re.compile(r"\{ Name: ([^{}]{1,400}?), (?:Location|Dimensions|Format/Datatype): ")
_FORMAT = re.compile(r"Format/Datatype: ([^{}]{1,200}?) }")
_LAYER_TYPE = ", LayerType: "
_LONGEST_METADATA = 20_000


def listed_layer(line: str) -> EngineLayer | None:
    """`Layer(RUNNER): NAME, Tactic: ID, inputs -> outputs`; no kernel name is printed."""
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
        inputs=_tensors(inputs),
        outputs=_tensors(outputs),
    )


def detailed_layer(line: str) -> EngineLayer | None:
    """`Name: ..., LayerType: ..., ...` of detailed profiling verbosity."""
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
        groups=_whole(_value(rest, "Groups")),
        out_maps=_whole(_value(rest, "OutMaps")),
        weights_type=_value(f", {weights}", "Type") if weights else None,
        weights_count=_whole(_value(f", {weights}", "Count")) if weights else None,
        inputs=tuple(_TENSOR.findall(inputs[:_LONGEST_METADATA])),
        outputs=tuple(_TENSOR.findall(outputs[:_LONGEST_METADATA])),
        input_formats=tuple(_FORMAT.findall(inputs[:_LONGEST_METADATA])),
        output_formats=tuple(_FORMAT.findall(outputs[:_LONGEST_METADATA])),
        onnx_nodes=onnx_nodes(metadata),
        metadata=metadata,
    )


def _tensors(text: str) -> tuple[str, ...]:
    return tuple(_LISTED_TENSOR.findall(text.strip()[:_LONGEST_METADATA]))


def onnx_nodes(metadata: str | None) -> tuple[str, ...]:
    """Source nodes in Metadata, whatever separates them (U+001E, U+001F or nothing)."""
    text = (metadata or "")[:_LONGEST_METADATA]
    parts = (part.strip() for part in _SOURCES.split(text))
    names = (p[len(_SOURCE) : -1] for p in parts if p.startswith(_SOURCE) and p.endswith("]"))
    return tuple(dict.fromkeys(names))


def _value(text: str, key: str) -> str | None:
    """Value of a flat field (no comma in it)."""
    before, found, after = text.partition(f", {key}: ")
    if not found:
        return None
    return after.partition(",")[0].strip() if before or after else None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() and len(text) < 19 else None
