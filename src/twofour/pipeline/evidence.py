"""Files of anyone about one engine -> the evidence that a report is joined with."""

from __future__ import annotations

from pathlib import Path

from twofour.engines.buildlog.layer_information import read_layer_information, read_profile
from twofour.engines.buildlog.read import read_build_log
from twofour.errors import BadInputError
from twofour.graph import load_model
from twofour.graph_nodes import graph_nodes
from twofour.log_records import Build, BuildOutcome, SparsityFlag
from twofour.records import LayerMap
from twofour.reports.join.evidence import BuildEvidence

_ALLOWED = (SparsityFlag.ENABLED, SparsityFlag.FORCED)


def read_evidence(  # noqa: PLR0913 - one keyword for each file
    *,
    onnx: Path | None = None,
    log: Path | None = None,
    layers: Path | None = None,
    profile: Path | None = None,
    dense_log: Path | None = None,
    dense_profile: Path | None = None,
    layer_map: LayerMap | None = None,
) -> BuildEvidence:
    """Read what is there; of a log with several builds the last that speaks of sparsity.

    Raises BadInputError for a file that cannot be read, and for a log without a build.
    """
    return BuildEvidence(
        build=None if log is None else sparse_build(log),
        layers=None if layers is None else read_layer_information(layers),
        profile=None if profile is None else read_profile(profile),
        dense_build=None if dense_log is None else _builds(dense_log)[-1],
        dense_profile=None if dense_profile is None else read_profile(dense_profile),
        nodes=() if onnx is None else graph_nodes(load_model(onnx, weights=False)),
        layer_map=layer_map,
    )


def sparse_build(log: Path) -> Build:
    """The last build with (Sparsity) lines, else with sparse weights allowed, else the last."""
    return max(enumerate(_builds(log)), key=lambda item: (*_says(item[1]), item[0]))[1]


def _says(build: Build) -> tuple[bool, bool, bool]:
    built = build.outcome is not BuildOutcome.LOADED
    return bool(build.sparsity_lines), build.sparsity in _ALLOWED, built


def _builds(log: Path) -> tuple[Build, ...]:
    found = read_build_log(log).builds
    if not found:
        raise BadInputError(
            f"{log} holds no build", hint="give the log of trtexec or of the builder's logger"
        )
    return found
