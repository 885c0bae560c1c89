"""Nets and layers for the tests of engine_evidence.py, and the reports they come from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine_evidence_parts.records import Forecast, Layer, Listing, Net
from support.join_cases import DENSE, SPARSE, build, chain, chosen, eligible, tuned
from support.report_cases import check, conv, report

from twofour.eligibility.evidence import BuildEvidence
from twofour.eligibility.report import join_report
from twofour.records.eligibility import EligibilityReport
from twofour.records.log import Build

CHOSEN = build(*tuned("a", (DENSE, 0.02), (SPARSE, 0.01)), eligible("a", "b"), chosen("a"))
"""Of a, b, a broken one and a grouped one, the first two are listed and the first is chosen."""


def joined(log: Build = CHOSEN) -> EligibilityReport:
    """Layers a and b (512 x 512), broken and grouped (128 x 128), with what this log says."""
    whole = [conv(name, 512, 512, node=name) for name in "ab"]
    broken = conv("broken", 128, 128, node="broken")
    grouped = conv("grouped", 128, 128, groups=4, node="grouped")
    predicted = report(*whole, (broken, check(broken, violations=3)), grouped)
    nodes = chain(*((name, "Conv") for name in ("a", "b", "broken", "grouped")))
    return join_report(predicted, BuildEvidence(build=log, nodes=nodes))


def net(found: EligibilityReport | None = None, **changes: Any) -> Net:
    given: dict[str, Any] = {
        "folder": "tiny-float16-b8",
        "net": "tiny",
        "precision": "float16",
        "batch": 8,
        "gpu": "NVIDIA H200",
        "tensorrt": "8.6.1",
        "input_shapes": None,
        "report": joined() if found is None else found,
    }
    return Net(**{**given, **changes})


def layer(c: int | None = 512, k: int | None = 512, **changes: Any) -> Layer:
    """A listed layer that runs dense, as foretold."""
    given: dict[str, Any] = {
        "folder": "tiny-float16-b8",
        "net": "tiny",
        "precision": "float16",
        "batch": 8,
        "gpu": "NVIDIA H200",
        "tensorrt": "8.6.1",
        "input_shapes": None,
        "node": "conv",
        "op": "Conv",
        "in_channels": c,
        "out_channels": k,
        "kernel": (3, 3),
        "groups": 1,
        "dtype": "float16",
        "forecast": Forecast.ELIGIBLE,
        "listing": Listing.LISTED,
        "why_unknown": None,
        "chosen": False,
        "best_dense_ms": None,
        "best_sparse_ms": None,
        "sparse_over_dense": None,
        "codes": ("DENSE_FASTER",),
        "source": "sparse.log:7: listed",
        "rule": None,
    }
    return Layer(**{**given, **changes})


def off(found: EligibilityReport) -> EligibilityReport:
    """The same report, called no evidence."""
    return replace(found, not_evidence="another model's log")
