"""What a Myelin region holds: transformer blocks cut into layers and regions, as builders do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
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
    tuned,
)
from support.report_cases import codes, conv, matmul, report

from twofour.eligibility.build_evidence import BuildEvidence
from twofour.eligibility.join import join_report
from twofour.eligibility.layer_nodes import EngineName, LayerNodes, find_nodes, index_nodes
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict, VerdictName
from twofour.records.export import GraphNode
from twofour.records.log import BuildOutcome
from twofour.reports.explain import layer_story
from twofour.reports.terminal import plain_text


def attention(at: int, x: str, *, gemm: bool) -> list[GraphNode]:
    """A block of attention and MLP; `gemm`: products with their bias, else MatMul and Add."""
    nodes: list[GraphNode] = []

    def add(name: str, op: str, *inputs: str) -> str:
        constants = tuple(name for name in inputs if not name.endswith("_out") and name != "x")
        nodes.append(node(f"/b{at}/{name}", op, *inputs, constants=constants))
        return f"/b{at}/{name}_out"

    def linear(name: str, given: str) -> str:
        weight, bias = f"b{at}.{name}.weight", f"b{at}.{name}.bias"
        if gemm:
            return add(f"{name}/Gemm", "Gemm", given, weight, bias)
        return add(f"{name}/Add", "Add", bias, add(f"{name}/MatMul", "MatMul", given, weight))

    normal = add("ln1", "LayerNormalization", x, f"b{at}.ln1.weight", f"b{at}.ln1.bias")
    q, k, v = (add(f"{n}/Reshape", "Reshape", linear(n, normal), "shape") for n in "qkv")
    scores = add("softmax", "Softmax", add("scale", "Div", add("qk", "MatMul", q, k), "sqrt"))
    after = add("res1", "Add", linear("o", add("av", "MatMul", scores, v)), x)
    hidden = add("gelu", "Gelu", linear("fc1", add("ln2", "LayerNormalization", after, "ln2")))
    add("res2", "Add", linear("fc2", hidden), after)
    return nodes


def encoder(blocks: int) -> tuple[GraphNode, ...]:
    """A convolution, blocks of both forms, and a head."""
    nodes = [node("/stem/Conv", "Conv", "x", "stem.weight", constants=("stem.weight",))]
    for at in range(blocks):
        nodes += attention(at, nodes[-1].outputs[0], gemm=at % 2 == 0)
    head = ("head.weight", "head.bias")
    return (*nodes, node("/head/Gemm", "Gemm", nodes[-1].outputs[0], *head, constants=head))


def is_product(given: GraphNode) -> bool:
    return given.op in ("Conv", "Gemm") or (given.op == "MatMul" and bool(given.constants))


@pytest.mark.parametrize(
    "first",
    [
        "b0.q.weight",
        "b0.fc2.bias + ONNXTRT_Broadcast_4",
        "b0.fc2.bias_17 + ONNXTRT_Broadcast_4",
        "b0.fc1.weight_clone_2",
        "ONNXTRT_castHelper_3",
        "shape",
        "/b0/ln1",
    ],
)
@pytest.mark.parametrize("last", ["/b0/res2", "ONNXTRT_castHelper_9", "b0.o.bias", "ln2"])
def test_a_region_reaches_to_its_neighbours_whatever_it_is_named_after(
    first: str, last: str
) -> None:
    nodes = encoder(1)
    names = ["/stem/Conv", f"{{ForeignNode[{first}...{last}]}}", "/head/Gemm"]
    found = find_nodes(names, index_nodes(nodes, {}, names), whole=True)[1]
    inside = {nodes[at].name for at in (*found.region, *found.perhaps)}
    assert inside == {n.name for n in nodes} - {"/stem/Conv", "/head/Gemm"}
    anchored = "Helper" not in first + last and first != "shape"
    assert bool(found.region) or not anchored


def test_what_lies_between_two_regions_without_a_border_is_in_one_of_them() -> None:
    nodes = encoder(2)
    names = ["/stem/Conv", "/head/Gemm"]
    names += [f"{{ForeignNode[b{i}.q.weight...ONNXTRT_castHelper_{i}]}}" for i in (0, 1)]
    one, other = find_nodes(names, index_nodes(nodes, {}, names), whole=True)[2:]
    of = {nodes[at].name: kind for kind in ("region", "shared") for at in getattr(one, kind)}
    assert (of["/b0/q/Gemm"], of["/b0/ln1"], of["/b0/fc2/Gemm"]) == ("region", "region", "shared")
    assert one.shared == other.shared
    assert nodes[other.region[-1]].name == "/b1/res2"


def test_weights_that_are_turned_before_use_lead_to_the_product_behind() -> None:
    nodes = (
        node("conv", "Conv", "x"),
        node("turn", "Transpose", "w", constants=("w",)),
        node("mm", "MatMul", "conv_out", "turn_out"),
        node("out", "Conv", "mm_out"),
    )
    names = ["conv", "{ForeignNode[w + turn...ONNXTRT_castHelper_1]}", "out"]
    found = find_nodes(names, index_nodes(nodes, {}, names), whole=True)[1]
    assert [nodes[at].name for at in (*found.nodes, *found.region)] == ["mm"]


def cut(nodes: Sequence[GraphNode], rng: random.Random) -> list[list[int]]:
    """The graph in pieces that can run one after another, in an order that keeps to its edges."""
    makers = {name: at for at, n in enumerate(nodes) for name in n.outputs}
    order: list[int] = []
    left = set(range(len(nodes)))
    while left:
        done = set(order)
        given = ({makers[x] for x in nodes[at].inputs if x in makers} for at in sorted(left))
        ready = [at for at, needs in zip(sorted(left), given, strict=True) if needs <= done]
        order.append(ready[0] if rng.random() < 0.6 else rng.choice(ready))
        left.remove(order[-1])
    cuts = [0, *sorted(rng.sample(range(1, len(order)), 5)), len(order)]
    return [order[a:b] for a, b in itertools.pairwise(cuts)]


def engine_of(
    pieces: Sequence[Sequence[int]], nodes: Sequence[GraphNode], rng: random.Random
) -> tuple[list[EngineName], dict[int, int]]:
    """Layers of an engine, and which of them holds each product: a region, or one by one."""
    uses: list[EngineName] = []
    holder: dict[int, int] = {}
    for piece in pieces:
        constants = [c for at in piece for c in nodes[at].constants]
        if len(piece) > 1 and constants and rng.random() < 0.6:
            first, last = (
                rng.choice([nodes[end].name, rng.choice(constants), "ONNXTRT_castHelper_5"])
                for end in (piece[0], piece[-1])
            )
            holder.update(dict.fromkeys(piece, len(uses)))
            uses.append(EngineName(name=f"{{ForeignNode[{first}...{last}]}}"))
            continue
        for at in piece:
            if is_product(nodes[at]) or rng.random() < 0.7:
                holder[at] = len(uses)
                uses.append(EngineName(name=nodes[at].name))
    return uses, holder


@pytest.mark.parametrize("seed", range(20))
def test_no_product_of_any_cut_is_lost_from_the_engine(seed: int) -> None:
    rng = random.Random(seed)
    nodes = encoder(2)
    uses, holder = engine_of(cut(nodes, rng), nodes, rng)
    found = find_nodes(uses, index_nodes(nodes, {}, [u.name for u in uses]), whole=True)
    for at, given in enumerate(nodes):
        if is_product(given):
            assert given.name in {nodes[i].name for f in found for i in _may_hold(f)}
            own = found[holder[at]]
            assert at in _may_hold(own) or any(at in f.region for f in found)


def _may_hold(found: LayerNodes) -> set[int]:
    return {*found.nodes, *found.region, *found.shared, *found.perhaps}


# --- verdicts -------------------------------------------------------------------------------------

MNIST = (
    *chain(("conv1", "Conv"), ("relu", "Relu")),
    node("fc1", "Gemm", "relu_out", "fc1.weight", "fc1.bias", constants=("fc1.weight", "fc1.bias")),
    node("relu2", "Relu", "fc1_out"),
    node(
        "fc2", "Gemm", "relu2_out", "fc2.weight", "fc2.bias", constants=("fc2.weight", "fc2.bias")
    ),
    node("softmax", "Softmax", "fc2_out"),
)
WEIGHTS = (
    conv("conv1", 512, 512, node="conv1"),
    matmul("fc1", 3136, 1024, node="fc1", op="Gemm"),
    matmul("fc2", 1024, 512, node="fc2", op="Gemm"),
)
REGION = "{ForeignNode[fc2.bias + ONNXTRT_Broadcast_4...ONNXTRT_castHelper_9]}"
LAYERS = information(layer("conv1 + relu"), layer(REGION, layer_type="Myelin"))


def joined(evidence: BuildEvidence) -> dict[str, Verdict]:
    return {v.layer: v for v in join_report(report(*WEIGHTS), evidence).verdicts}


def test_the_list_of_the_region_speaks_of_the_product_before_its_constant() -> None:
    log = build(
        eligible("fc1", foreign=True),
        chosen("fc1", foreign=True),
        eligible("conv1 + relu"),
        chosen(),
    )
    found = joined(BuildEvidence(build=log, layers=LAYERS, nodes=MNIST))
    assert [v.verdict.value for v in found.values()] == ["eligible", "chosen", "not-eligible"]
    assert all(v.evidence is Evidence.MEASURED for v in found.values())


def test_a_region_that_could_hold_anything_leaves_the_layer_unknown_and_says_so() -> None:
    region = "{ForeignNode[ONNXTRT_castHelper_8...ONNXTRT_castHelper_9]}"
    layers = information(layer("conv1 + relu"), layer(region, layer_type="Myelin"))
    found = joined(BuildEvidence(layers=layers, nodes=MNIST))["fc1"]
    assert (found.verdict, found.evidence) == (VerdictName.UNKNOWN, None)
    assert codes(found)[0] == "LOG_SILENT"
    assert region in found.reasons[0].message
    assert "layer information" in (found.remedy or "")


def test_a_region_that_is_listed_as_eligible_and_holds_one_product_means_that_product() -> None:
    region = "{ForeignNode[fc1.bias...ONNXTRT_castHelper_9]}"
    layers = information(layer("conv1 + relu"), layer(region), layer("fc2"), layer("softmax"))
    log = build(eligible(region, "conv1 + relu"), chosen(region))
    found = joined(BuildEvidence(build=log, layers=layers, nodes=MNIST))
    assert [v.verdict.value for v in found.values()] == ["eligible", "chosen", "not-eligible"]


def test_a_region_that_is_listed_and_holds_several_products_names_none_of_them() -> None:
    log = build(eligible(REGION), chosen(REGION))
    for evidence in (
        BuildEvidence(build=log, layers=LAYERS, nodes=MNIST),
        BuildEvidence(build=log, nodes=MNIST),
    ):
        found = joined(evidence)
        assert [v.evidence for v in found.values()] == [Evidence.PREDICTED] * 3


def test_the_nodes_that_the_log_states_of_a_region_stand_above_its_name() -> None:
    log = build(
        f"ForeignNode {REGION} metadata: [ONNX Layer: fc1][ONNX Layer: relu2][ONNX Layer: fc2]",
        listed("CaskConvolution", "conv1", "x", "y"),
        listed("Myelin", REGION, "relu_out", "z"),
    )
    found = joined(BuildEvidence(build=log, nodes=MNIST))
    assert [v.engine_layer for v in found.values()] == ["conv1", REGION, REGION]


# --- layers under new names -----------------------------------------------------------------------

RENAMED = (
    "Registering layer: fc for ONNX node: fc",
    "Registering layer: fc_1 for ONNX node: fc",
    "Registering layer: fc_1_2 for ONNX node: fc_1",
    "Registering layer: fc_1_5 for ONNX node: fc_1",
)
TWINS = chain(("fc", "Gemm"), ("relu", "Relu"), ("fc_1", "Gemm"))


def of_twins(evidence: BuildEvidence) -> EligibilityReport:
    weights = [matmul(name, 512, 512, node=name, op="Gemm") for name in ("fc", "fc_1")]
    return join_report(report(*weights), evidence)


def listed(kind: str, name: str, given: str, made: str) -> str:
    """A line of `Engine Layer Information:`."""
    return f"Layer({kind}): {name}, Tactic: 0x{1:016x}, {given} (Half[1]) -> {made} (Half[1])"


def test_tactics_and_engine_layers_follow_the_name_that_the_parser_gave() -> None:
    log = build(
        *RENAMED,
        *tuned("fc", ("kernel_of_fc", 0.5)),
        *tuned("fc_1 + relu", ("kernel_of_the_bias_of_fc", 0.1)),
        *tuned("fc_1_2", ("kernel_of_fc_1", 0.25)),
        *tuned("fc_1_5", ("kernel_of_the_bias_of_fc_1", 0.01)),
        listed("Gemm", "fc", "x", "a"),
        listed("PointWise", "PWN(fc_1 + relu)", "a", "b"),
        listed("Gemm", "fc_1_2", "b", "c"),
        listed("PointWise", "PWN(fc_1_5)", "c", "d"),
    )
    found = of_twins(BuildEvidence(build=log, nodes=TWINS))
    assert [v.engine_layer for v in found.verdicts] == ["fc", "fc_1_2"]
    assert [v.dense_ms for v in found.verdicts] == [0.5, 0.25]


def test_explain_finds_a_layer_by_the_name_that_the_parser_gave() -> None:
    log = build(
        *RENAMED,
        *tuned("fc_1_2", ("kernel_of_fc_1", 0.25)),
        listed("Myelin", "{ForeignNode[fc_1_2]}", "b", "c"),
    )
    evidence = BuildEvidence(build=log, nodes=TWINS)
    found = of_twins(evidence)
    for name in ("fc_1", "fc_1_2", "{ForeignNode[fc_1_2]}"):
        text = plain_text(layer_story(found, evidence, name))
        assert text.startswith("fc_1 (Gemm)")
        assert "tactics of fc_1_2" in text
        assert "kernel_of_fc_1" in text


def test_a_renamed_layer_on_the_chosen_line_is_the_node_it_was_made_of() -> None:
    log = build(*RENAMED, eligible("fc", "fc_1_2"), chosen("fc_1_2"))
    found = of_twins(BuildEvidence(build=log, nodes=TWINS))
    assert [v.verdict.value for v in found.verdicts] == ["eligible", "chosen"]


def test_a_layer_of_a_further_optimization_profile_is_the_layer() -> None:
    log = build(
        eligible("fc", "fc_1 [profile 1]"),
        chosen("fc_1 [profile 1]"),
        listed("Gemm", "fc", "x", "a"),
        listed("Gemm", "fc [profile 1]", "x", "a"),
    )
    found = of_twins(BuildEvidence(build=log, nodes=TWINS))
    assert [v.verdict.value for v in found.verdicts] == ["eligible", "chosen"]
    assert found.verdicts[0].engine_layer == "fc"
    assert found.unmatched_engine_layers == ()


# --- an engine that was loaded --------------------------------------------------------------------


# what trtexec up to 8.6 prints of an engine it loads: defaults of a build there was not
LOADED = build(
    "Precision: FP32",
    "Engine loaded in 0.01 sec.",
    flag="Disabled",
    version="v8401",
    options="--loadEngine=model.plan --verbose",
)


def test_the_log_of_a_loaded_engine_proves_nothing_of_what_was_built() -> None:
    found = joined(BuildEvidence(build=LOADED, nodes=MNIST))
    for verdict in found.values():
        assert verdict.evidence is Evidence.PREDICTED
        assert "SPARSITY_OFF" not in codes(verdict)
        assert "a loaded engine" in verdict.reasons[-1].message


def test_the_layer_information_of_a_loaded_engine_is_evidence() -> None:
    layers = information(layer("conv1 + relu", SPARSE), layer("fc1", DENSE), layer("fc2"))
    for log in (LOADED, replace(LOADED, outcome=BuildOutcome.FAILED)):
        found = joined(BuildEvidence(build=log, layers=layers, nodes=MNIST))
        assert found["conv1"].verdict is VerdictName.CHOSEN
        assert found["conv1"].evidence is Evidence.MEASURED
        assert found["fc1"].evidence is Evidence.PREDICTED
