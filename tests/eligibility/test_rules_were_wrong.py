"""Rows, totals, gates and every format agree on which layers the rules were wrong about."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

import pytest
from rich.console import Console
from support.join_cases import DENSE, SPARSE, build, chain, chosen, eligible, information, layer
from support.rendered import to_csv, to_html, to_markdown, to_table
from support.report_cases import check, conv, matmul, report

from twofour.eligibility.build_evidence import BuildEvidence
from twofour.eligibility.join import join_report
from twofour.eligibility.layer_gates import Gates, missed_gates
from twofour.records.eligibility import EligibilityReport, VerdictName
from twofour.records.log import Build
from twofour.reports.explain import layer_story

_BROKEN = matmul("fc", 512, 512, node="fc")
_WEIGHTS = (conv("conv", 512, 512, node="conv"), (_BROKEN, check(_BROKEN, violations=3)))
_NODES = chain(("conv", "Conv"), ("relu", "Relu"), ("fc", "MatMul"))
_ALL = information(layer("conv + relu", SPARSE), layer("fc", SPARSE))
_REGION = "{ForeignNode[ONNXTRT_castHelper_8...ONNXTRT_castHelper_9]}"
_OLD = "Compute Capability: 7.5"

_CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "sparse weights were switched off": ({"build": build(flag="Disabled")}, set()),
    "switched off, with layer information": (
        {"build": build(flag="Disabled"), "layers": information(layer("conv", DENSE))},
        set(),
    ),
    "the GPU is too old": ({"build": build(_OLD, eligible(), chosen())}, set()),
    "a log without a word about sparsity": ({"build": build()}, set()),
    "the lists are as predicted": ({"build": build(eligible("conv"), chosen("conv"))}, set()),
    "listed the other way round": ({"build": build(eligible("fc"), chosen())}, {"conv", "fc"}),
    "a broken weight runs sparse": ({"layers": _ALL}, {"fc"}),
    "in a plugin": ({"layers": information(layer("conv", layer_type="PluginV2"))}, set()),
    "in a region that may hold anything": (
        {"layers": information(layer("conv + relu"), layer(_REGION, layer_type="Myelin"))},
        set(),
    ),
    "folded away": ({"layers": information(layer("fc", DENSE))}, set()),
}


def _joined(given: dict[str, Any]) -> tuple[EligibilityReport, BuildEvidence]:
    evidence = BuildEvidence(nodes=_NODES, **given)
    return join_report(report(*_WEIGHTS), evidence), evidence


def _printed(renderable: Any) -> str:
    console = Console(width=300, file=io.StringIO(), force_terminal=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("case", _CASES)
def test_rows_totals_and_formats_name_the_same_layers(case: str) -> None:
    given, wrong = _CASES[case]
    found, evidence = _joined(given)
    assert found.totals is not None
    assert {d.layer for d in found.totals.disagreements} == wrong
    said = {v.layer for v in found.verdicts if "the rules said" in str(v.reasons)}
    assert said == wrong
    rows = {row["layer"]: row for row in csv.DictReader(io.StringIO(to_csv(found)))}
    assert {name for name, row in rows.items() if row["rules_were_wrong"] == "true"} == wrong
    told = {name for name in rows if "rules said" in _printed(layer_story(found, evidence, name))}
    assert told == wrong
    for page in (_printed(to_table(found)), to_markdown(found), to_html(found)):
        assert len(re.findall(r"\(rules\b", page)) == len(wrong)


def test_a_gate_names_what_the_rules_said_before_what_the_log_says_of_itself() -> None:
    odd: Build = build(eligible("conv", "fc"), chosen("conv", "fc", "new"))
    found, _ = _joined({"build": odd, "layers": information(layer("fc", SPARSE))})
    fc = next(v for v in found.verdicts if v.layer == "fc")
    assert fc.verdict is VerdictName.CHOSEN
    line = missed_gates(found, Gates(no_broken=True))[-1]
    assert line.startswith("fc: chosen, LOG_CONTRADICTS:")


def test_a_row_that_was_not_predicted_keeps_the_reason_of_the_rules() -> None:
    found, _ = _joined({"build": build(eligible("fc"), chosen())})
    said = {v.layer: v.refuted and v.refuted.code.value for v in found.verdicts}
    assert said == {"conv": "QUALIFIES", "fc": "PATTERN_BROKEN"}
    agreed, _ = _joined({"build": build(eligible("conv"), chosen("conv"))})
    assert [v.refuted for v in agreed.verdicts] == [None, None]
