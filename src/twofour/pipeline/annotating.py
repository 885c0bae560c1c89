"""A copy of the model with the verdicts in the metadata of its nodes, where Netron shows them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from twofour.errors import BadInputError
from twofour.graph.opened import open_onnx
from twofour.graph.weights import find_weights
from twofour.pipeline.reporting import Judged
from twofour.records.eligibility import EligibilityReport
from twofour.store import atomic_file


def annotate(judged: Judged, target: Path) -> None:
    """Write the model with verdict, reason codes and forecast gain in the metadata of its nodes.

    Both files refer to the same external data. Raises BadInputError without a model, and for a
    target in another folder than the data.
    """
    from onnx import helper

    if judged.onnx is None:
        raise BadInputError("--annotate: no model is given", hint="add --onnx FILE")
    opened = open_onnx(judged.onnx)
    if target.resolve() == opened.path.resolve():
        raise BadInputError(f"--annotate {target} is the model itself", hint="name another file")
    if opened.data_files and target.parent.resolve() != opened.path.parent.resolve():
        raise BadInputError(
            f"{target} is not beside the data of {opened.path}",
            hint=f"--annotate {opened.path.parent / target.name}",
        )
    model = opened.whole()
    entries = dict(_entries(judged.report))
    for layer in find_weights(model, path=opened.path).layers:
        node = layer.node.proto
        there = {entry.key: entry.value for entry in node.metadata_props}
        own = entries.get((layer.weight.node, layer.weight.weight), {})
        helper.set_metadata_props(node, there | own)
    with atomic_file(target) as temporary:
        temporary.write_bytes(model.SerializeToString())


def _entries(report: EligibilityReport) -> Iterator[tuple[object, dict[str, str]]]:
    """Metadata for the node of each layer."""
    gains = report.forecast_gains
    place = report.forecast.name if report.forecast else ""
    for row in report.verdicts:
        entry = {"twofour.verdict": row.verdict.value}
        if row.evidence is not None:
            entry["twofour.evidence"] = row.evidence.value
        entry["twofour.reasons"] = " ".join(reason.code.value for reason in row.reasons)
        if row.layer in gains:
            entry["twofour.forecast_gain"] = f"{gains[row.layer]:.2f}x on {place}"
        yield (row.node, row.weight), entry
