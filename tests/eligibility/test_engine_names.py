from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.join_cases import MNIST, build, chain, chosen, eligible, information, layer, node
from support.report_cases import conv, matmul, report

from twofour.eligibility.build_evidence import BuildEvidence, match_rows
from twofour.eligibility.join import join_report
from twofour.eligibility.layer_nodes import EngineName, LayerNodes, find_nodes, index_nodes
from twofour.eligibility.node_names import split_name
from twofour.records.eligibility import EligibilityReport, VerdictName
from twofour.records.export import GraphNode
from twofour.records.weights import Weight


def resolved(name: str | EngineName, *nodes: GraphNode) -> LayerNodes:
    index = index_nodes(nodes, {}, [name if isinstance(name, str) else name.name])
    (found,) = find_nodes([name], index)
    return found


def named(name: str | EngineName, *nodes: GraphNode) -> list[str]:
    return [nodes[at].name for at in resolved(name, *nodes).nodes]


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("node_conv2d + node_relu", ["node_conv2d", "node_relu"]),
        ("node_conv2d || node_conv2d_1", ["node_conv2d", "node_conv2d_1"]),
        ("node_conv2d + node_relu || node_conv2d_1", ["node_conv2d", "node_relu", "node_conv2d_1"]),
        (
            "node_conv2d + PWN(PWN(node_relu), PWN(node_relu_1, node_softmax))",
            ["node_conv2d", "node_relu", "node_relu_1", "node_softmax"],
        ),
        ("node_conv2d + PWN(PWN(node_relu)", ["node_conv2d", "node_relu"]),
        ("gemm1.weight + QuantizeLinear_7 + node_linear", ["node_linear"]),
        ("gemm1.weight_clone_2 + (Unnamed Layer* 295) [Shuffle] + node_linear", ["node_linear"]),
        ("node_conv2d_1_myl3_1", ["node_conv2d_1"]),
        ("node_linear+node_relu_2_myl0_4", ["node_linear", "node_relu_2"]),
        ("__myl_MulMinMaxRounCast_myl0_1", []),
        ("node_conv2d_7", []),
        ("{ForeignNode[node_conv2d", []),
    ],
)
def test_the_parts_of_a_name_are_the_nodes_it_was_fused_from(name: str, nodes: list[str]) -> None:
    assert named(name, *MNIST) == nodes


def test_of_layers_that_may_not_be_all_a_region_surely_has_the_user_of_its_constant() -> None:
    found = resolved("{ForeignNode[gemm1.weight...ONNXTRT_castHelper_9]}", *MNIST)
    assert [MNIST[at].name for at in found.region] == ["node_linear"]
    assert len(found.perhaps) == len(MNIST) - 1


def test_of_two_regions_the_shorter_has_what_both_could() -> None:
    index = index_nodes(MNIST, {}, [])
    names = [
        "{ForeignNode[node_conv2d...node_softmax]}",
        "{ForeignNode[node_linear...node_relu_2]}",
    ]
    wide, narrow = find_nodes(names, index)
    assert narrow.region == (7, 8)
    assert not set(wide.region) & {7, 8}


@pytest.mark.parametrize(
    "name",
    [
        "Reformatting CopyNode for Input Tensor 0 to node_conv2d + node_relu",
        "reshape_before_node_linear",
    ],
)
def test_what_the_builder_puts_around_a_layer_computes_nothing(name: str) -> None:
    found = resolved(name, *MNIST)
    assert (found.held, found.inside, found.matched) == ((), (), True)


def test_what_brings_data_to_a_node_leads_to_it() -> None:
    found = index_nodes(MNIST, {}, []).find("reshape_before_node_linear")
    assert (found.nodes, found.around, found.anything) == ((), (7,), True)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("node_of_y + Relu_3", node("Conv:0", outputs=("y",), unnamed=True)),
        ("/fc/Gemm_12", node("/fc/Gemm", "Gemm")),
        ("/classifier/classifier_1/Gemm_myl9_2", node("/classifier/classifier.1/Gemm", "Gemm")),
    ],
    ids=["first output", "the parser's copy", "dots as underscores"],
)
def test_a_node_is_found_by_the_names_that_tensorrt_makes_of_it(
    name: str, given: GraphNode
) -> None:
    assert named(name, given) == [given.name]


def test_unnamed_layers_of_a_kind_are_the_nodes_of_it_in_order() -> None:
    nodes = chain(("Conv:0", "Conv"), ("Relu:1", "Relu"), ("Conv:2", "Conv"))
    names = ["(Unnamed Layer* 14) [Convolution]", "(Unnamed Layer* 3) [Convolution] + x"]
    found = find_nodes(names, index_nodes(nodes, {}, names))
    assert [r.nodes for r in found] == [(2,), (0,)]


def test_unnamed_layers_of_another_number_than_the_nodes_are_not_guessed() -> None:
    nodes = chain(("Conv:0", "Conv"), ("Conv:1", "Conv"))
    names = ["(Unnamed Layer* 14) [Convolution]"]
    (found,) = find_nodes(names, index_nodes(nodes, {}, names))
    assert not found.matched


def test_a_name_with_separators_in_it_is_taken_whole() -> None:
    awkward = "a + b, c || d"
    found = named(f"PWN({awkward}) + r", node(awkward), node("r", "Relu"))
    assert found == [awkward, "r"]


def test_of_two_nodes_of_one_name_the_number_the_builder_gave_tells_which() -> None:
    twins = (node("conv", "Conv", "x"), node("conv", "Conv", "y", outputs=("other_out",)))

    def source(name: str) -> EngineName:
        return EngineName(name=name, sources=("conv",))

    assert resolved(source("conv_1 + relu"), *twins).nodes == (1,)
    assert resolved(source("conv + relu"), *twins).nodes == (0,)


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
    assert resolved("a+b", *nodes).nodes == ()
    assert resolved("c++", *nodes).nodes == (1,)
    assert resolved("a+c", *nodes).nodes == ()


NAMES = st.lists(
    st.text(st.sampled_from("abz/._:019()[]{}* ,|+-"), min_size=1, max_size=12)
    .map(str.strip)
    .filter(bool),
    min_size=1,
    max_size=6,
    unique=True,
).filter(lambda names: all(_is_plain(name) for name in names))


def _is_plain(name: str) -> bool:
    """No separator of its own and brackets in pairs: what the grammar can tell apart."""
    return not any(mark in f" {name} " for mark in (" + ", " || ", ", ", "...")) and (
        _balanced(name)
    )


def _balanced(name: str) -> bool:
    depth = 0
    for c in name:
        depth += (c in "([{") - (c in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _fused(names: list[str], choices: list[int]) -> str:
    """The names in one engine layer, joined and nested in the way the choices say."""
    text = names[0]
    for name, choice in zip(names[1:], choices, strict=True):
        joined = [f"{text} + {name}", f"{text} || {name}", f"PWN({text}, {name})"]
        text = [*joined, f"{text} + PWN(PWN({name}))"][choice]
    return text


@given(NAMES, st.data())
@settings(max_examples=80, deadline=None)
def test_any_names_in_any_combination_resolve_back(names: list[str], data: st.DataObject) -> None:
    choices = data.draw(
        st.lists(st.integers(0, 3), min_size=len(names) - 1, max_size=len(names) - 1)
    )
    nodes = tuple(node(name) for name in names)
    assert sorted(named(_fused(names, choices), *nodes)) == sorted(names)


@given(st.text(st.sampled_from("PWN(){}[]., +|aForeignNode"), max_size=80))
@settings(max_examples=80, deadline=None)
def test_no_name_makes_the_splitter_fail(name: str) -> None:
    assert all(part.text for part in split_name(name, {"a", "a + N", "(a"}))


def test_nodes_of_one_name_go_to_their_verdicts_by_label_and_else_by_order() -> None:
    nodes = (node("fc"), node("fc", label="if.then/fc"), node("fc", label="if.else/fc"))
    weights = [conv(n, 64, 64, node="fc") for n in ("if.else/fc", "module.a", "module.b")]
    complete, found = match_rows(report(*weights).verdicts, nodes)
    assert (complete, found) == (nodes, (2, 0, 1))


def test_a_verdict_without_a_node_gets_one_of_its_own_name() -> None:
    complete, found = match_rows(report(conv("fc", 64, 64, node="other")).verdicts, (node("fc"),))
    assert found == (1,)
    assert (complete[1].name, complete[1].label) == ("other", "fc")


# --- names of Torch-TensorRT, of one network and of two that are not the same ---------------------

MODULES = (
    "conv1",
    "layer1.0.conv1",
    "layer1.0.conv2",
    "layer2.0.downsample.0",
    "features.0.0.conv",
)


def torch_name(path: str, op: str = "convolution", kind: str = "CONVOLUTION") -> str:
    return f"[{kind}]-[aten_ops.{op}.default]-[/{path.replace('.', '/')}/{op}_3]"


def fused(path: str) -> str:
    scale = torch_name(path.replace("conv", "bn"), "batch_norm", "SCALE")
    return f"{torch_name(path)} + {scale} + {torch_name('relu', 'relu', 'RELU')}"


def slashed(path: str) -> str:
    """As torch.jit's exporter writes it: `layer1.0.conv1` is `/layer1/layer1.0/conv1`."""
    found: list[str] = []
    for piece in path.split("."):
        found.append(f"{found[-1]}.{piece}" if piece.isdigit() else piece)
    return "/" + "/".join(found) + "/Conv"


def weights(form: str) -> list[Weight]:
    """One network as different exporters name its nodes and weights."""
    if form == "slashes":
        return [conv(slashed(m), 64, 64, node=slashed(m), weight="onnx::Conv_1") for m in MODULES]
    if form == "dots":
        return [conv(m, 64, 64, node=m, weight="w") for m in MODULES]
    names = [f"node_Conv_{at}" for at in range(len(MODULES))]
    return [
        conv(n, 64, 64, node=n, weight=f"{m}.weight") for n, m in zip(names, MODULES, strict=True)
    ]


def in_engine(given: list[Weight], *names: str) -> EligibilityReport:
    nodes = tuple(node(w.node or "", "Conv", "x") for w in given)
    layers = information(*(layer(name) for name in names))
    return join_report(report(*given), BuildEvidence(layers=layers, nodes=nodes))


@pytest.mark.parametrize("form", ["slashes", "dots", "weights"])
def test_one_network_is_recognised_under_its_many_names(form: str) -> None:
    in_brackets = [f"[{m.replace('.', '/')}/convolution]" for m in MODULES]
    for names in ([fused(m) for m in MODULES], in_brackets):
        found = in_engine(weights(form), *names)
        assert [v.engine_layer for v in found.verdicts] == names
        assert found.not_evidence is None


def test_the_bias_of_a_module_is_not_its_product() -> None:
    product = torch_name("fc", "linear", "MATRIX_MULTIPLY")
    bias = "[ELEMENTWISE]-[aten_ops.linear.default]-[/fc/linear_add]"
    given = [conv("fc", 64, 64, node="fc")]
    assert in_engine(given, bias, product).verdicts[0].engine_layer == product


def test_choices_on_the_lines_of_a_log_count_under_the_names_of_torch() -> None:
    given = weights("slashes")
    nodes = tuple(node(w.node or "", "Conv", "x") for w in given)
    names = [fused(m) for m in MODULES]
    log = build(eligible(*names), chosen(names[1]))
    found = join_report(report(*given), BuildEvidence(build=log, nodes=nodes))
    assert [v.verdict for v in found.verdicts][:3] == [
        *(VerdictName.ELIGIBLE, VerdictName.CHOSEN, VerdictName.ELIGIBLE)
    ]
