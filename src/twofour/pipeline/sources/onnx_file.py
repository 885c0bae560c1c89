"""The source `file.onnx`: used as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # has no types

from twofour.pipeline.sources.source import (
    SourceKind,
    SourceOptions,
    key_of,
    options_key,
    safe_name,
)
from twofour.store import sha256_file

_LOCATION = "location"
"""Key of a tensor's external_data entry that names the file (onnx.proto3, TensorProto)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxSource:
    """An ONNX file; whether it is a sound one is found when the graph is read."""

    text: str
    path: Path
    options: SourceOptions

    @property
    def name(self) -> str:
        """The file's stem."""
        return safe_name(self.path.stem)

    @property
    def kind(self) -> SourceKind:
        """Always ONNX."""
        return SourceKind.ONNX

    def key(self) -> str:
        """sha256 over the file, its external data and the options.

        Raises BadInputError when a file cannot be read.
        """
        files = (self.path, *external_data_files(self.path))
        parts = (part for file in files for part in (file.name, sha256_file(file)))
        return key_of(*parts, options_key(self.options))


def external_data_files(path: Path) -> tuple[Path, ...]:
    """Files beside an ONNX file that hold its weights, sorted; () where the file is damaged.

    Only regular files inside the folder: what is missing or points outside is for the reader of
    the graph to complain about, and must not be opened here (it could be a device).
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, OSError, ValueError):
        return ()
    folder = path.parent.resolve()
    locations = (text for text in _locations(model) if isinstance(text, str) and "\0" not in text)
    named = ((path.parent / location).resolve() for location in locations)
    return tuple(sorted({f for f in named if f.is_relative_to(folder) and f.is_file()}))


def _locations(model: onnx.ModelProto) -> Iterator[str | bytes]:
    """File names of external tensors anywhere: initializers, attributes, subgraphs, functions.

    protobuf gives text that is not UTF-8 as bytes.
    """
    graphs = [model.graph]
    nodes = [node for function in model.functions for node in function.node]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            nodes.extend(graph.node)
            tensors = [*graph.initializer]
            tensors += [t for s in graph.sparse_initializer for t in (s.values, s.indices)]
        else:
            attributes = nodes.pop().attribute
            graphs.extend(a.g for a in attributes if a.HasField("g"))
            graphs.extend(g for a in attributes for g in a.graphs)
            tensors = [a.t for a in attributes if a.HasField("t")]
            tensors += [t for a in attributes for t in a.tensors]
        for tensor in tensors:
            yield from (e.value for e in tensor.external_data if e.key == _LOCATION)
