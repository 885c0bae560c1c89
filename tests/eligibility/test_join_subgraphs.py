"""Names of layers inside If and Loop, and names that Myelin joined: which node they mean."""

from __future__ import annotations

from support.join_cases import (
    DENSE,
    SPARSE,
    build,
    chain,
    chosen,
    eligible,
    information,
    layer,
    node,
)
from support.report_cases import conv, matmul, report

from twofour.eligibility.evidence import BuildEvidence
from twofour.eligibility.report import join_report
from twofour.eligibility.resolve import NameInUse, index_nodes, resolve
from twofour.records.eligibility import VerdictName
from twofour.records.export import GraphNode

BRANCHES = (
    node("front", "Conv", "x"),
    node("if0", "If", "c"),
    node("conv", "Conv", "front_out", label="if0.then_branch/conv"),
    node("conv", "Conv", "front_out", label="if0.else_branch/conv", outputs=("other_out",)),
    node("deep", "Conv", "x", label="if0.then_branch/inner.else_branch/deep"),
)
IN_THEN = "$$myelin$$(Unnamed IfConditional* 0)^$$myelin$$then^conv_myl0_4"


def indices(use: str | NameInUse, nodes: tuple[GraphNode, ...]) -> tuple[int, ...]:
    name = use if isinstance(use, str) else use.name
    return resolve([use], index_nodes(nodes, {}, [name]))[0].nodes


def source(text: str, name: str = "__myl_Fc_myl0_3") -> NameInUse:
    return NameInUse(name=name, sources=(f"[ONNX Layer: {text}]",))


def test_metadata_states_the_way_through_the_subgraphs_behind_the_node() -> None:
    assert indices(source("conv | then (then_branch) | if0 (If)"), BRANCHES) == (2,)
    assert indices(source("conv | else (else_branch) | if0 (If)"), BRANCHES) == (3,)
    nested = "deep | g2 (else_branch) | inner (If) | g1 (then_branch) | if0 (If)"
    assert indices(source(nested), BRANCHES) == (4,)


def test_a_way_that_no_label_has_leads_to_the_one_node_of_that_name() -> None:
    assert indices(source("deep | main (body) | outer (Loop)"), BRANCHES) == (4,)
    assert indices(source("conv | main (body) | outer (Loop)"), BRANCHES) == ()


def test_a_name_with_a_bar_in_it_is_still_taken_whole() -> None:
    odd = (*BRANCHES, node("conv | b (c) | d (If)", "Conv", "x"))
    assert indices(source("conv | b (c) | d (If)"), odd) == (5,)


def test_metadata_settles_which_of_two_branches_a_name_is_in() -> None:
    there = source("conv | else (else_branch) | if0 (If)", IN_THEN.replace("then", "else"))
    assert indices(there, BRANCHES) == (3,)


def test_of_two_nodes_of_one_name_the_number_the_builder_gave_tells_which() -> None:
    twins = (node("conv", "Conv", "x"), node("conv", "Conv", "y", outputs=("other_out",)))
    assert indices(source("conv", "conv_1 + relu"), twins) == (1,)
    assert indices(source("conv", "conv + relu"), twins) == (0,)


def test_the_last_piece_of_a_myelin_way_is_the_layer() -> None:
    nodes = chain(("front", "Conv"), ("conv", "Conv"))
    assert indices(IN_THEN, nodes) == (1,)
    assert indices("$$myelin$$(Unnamed Loop* 0)^mul_myl0_4", nodes) == ()


def test_a_sparse_kernel_in_a_branch_is_a_measured_choice() -> None:
    weights = [
        conv("front", 512, 512, node="front"),
        conv("if0.then_branch/conv", 512, 512, node="conv"),
        conv("if0.else_branch/conv", 512, 512, node="conv", weight="e"),
    ]
    sources = [f"[ONNX Layer: conv | {b} ({b}_branch) | if0 (If)]" for b in ("then", "else")]
    layers = information(
        layer("front_myl0_1", DENSE),
        layer(IN_THEN, SPARSE, onnx_nodes=("[ONNX Layer: if0]", sources[0])),
        layer(IN_THEN.replace("then", "else"), DENSE, onnx_nodes=(sources[1],)),
    )
    evidence = BuildEvidence(layers=layers, nodes=BRANCHES)
    found = join_report(report(*weights), evidence)
    assert found.unmatched_engine_layers == ()
    assert [v.verdict.value for v in found.verdicts] == ["eligible", "chosen", "eligible"]
    assert [v.engine_layer for v in found.verdicts][1:] == [
        *(IN_THEN, IN_THEN.replace("then", "else"))
    ]


def test_products_joined_by_a_plus_without_blanks_are_named_on_the_lines() -> None:
    names = ("/q/MatMul", "/k/MatMul", "/v/MatMul", "/o/MatMul")
    log = build(
        eligible("/v/MatMul+/q/MatMul+/k/MatMul", "/o/MatMul", count=4, foreign=True),
        chosen("/v/MatMul+/q/MatMul+/k/MatMul", count=3, foreign=True),
    )
    nodes = chain(*((name, "MatMul") for name in names))
    weights = [matmul(name, 512, 512, node=name) for name in names]
    found = join_report(report(*weights), BuildEvidence(build=log, nodes=nodes))
    assert [v.verdict for v in found.verdicts] == [VerdictName.CHOSEN] * 3 + [VerdictName.ELIGIBLE]
    assert found.unmatched_engine_layers == ()
    # the counts agree with the layers of the model, so nothing contradicts anything
    assert not any("prints" in note for note in found.notes)
    assert not any(r.code.value == "LOG_CONTRADICTS" for v in found.verdicts for r in v.reasons)


def test_a_plus_is_no_separator_where_a_piece_is_no_node() -> None:
    nodes = chain(("a", "Conv"), ("c++", "Conv"))
    assert indices("a+b", nodes) == ()
    assert indices("c++", nodes) == (1,)
    assert indices("a+c", nodes) == ()
