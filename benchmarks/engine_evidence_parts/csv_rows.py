"""The listed layers as CSV: one row each, empty where something is not known."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from engine_evidence_parts.records import Layer
from twofour.words import printable, times

COLUMNS = (
    *("folder", "net", "precision", "node", "op", "C", "K", "kernel", "groups", "batch", "dtype"),
    *("best_dense_ms", "best_sparse_ms", "sparse_over_dense", "chosen", "reason_codes"),
    *("source", "input_shapes", "gpu", "tensorrt"),
)


def to_csv(layers: Iterable[Layer]) -> str:
    """RFC 4180 with a header; control characters in names as escapes, so that a row is a line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_row(layer) for layer in layers)
    return text.getvalue()


def _row(layer: Layer) -> tuple[str, ...]:
    cells = (
        *(layer.folder, layer.net, layer.precision, layer.node, layer.op),
        *(layer.in_channels, layer.out_channels, times(layer.kernel) if layer.kernel else None),
        *(layer.groups, layer.batch, layer.dtype),
        *(layer.best_dense_ms, layer.best_sparse_ms, layer.sparse_over_dense),
        {True: "true", False: "false", None: None}[layer.chosen],
        *(" ".join(layer.codes), layer.source, layer.input_shapes, layer.gpu, layer.tensorrt),
    )
    return tuple("" if cell is None else printable(str(cell)) for cell in cells)
