"""Names of Torch-TensorRT and ONNX for one network, and for two that are not the same."""

from __future__ import annotations

import pytest
from support.join_cases import build, chosen, eligible, information, layer, node
from support.report_cases import conv, report

from twofour.eligibility.build_evidence import BuildEvidence
from twofour.eligibility.join import join_report
from twofour.eligibility.node_names import module_path, paths_of_layer
from twofour.records.eligibility import EligibilityReport, VerdictName
from twofour.records.weights import Weight

MODULES = ("conv1", "layer1.0.conv1", "layer1.0.conv2", "layer2.0.downsample.0", "layer2.0.conv1")


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


def joined(given: list[Weight], *names: str) -> EligibilityReport:
    nodes = tuple(node(w.node or "", "Conv", "x") for w in given)
    layers = information(*(layer(name) for name in names))
    return join_report(report(*given), BuildEvidence(layers=layers, nodes=nodes))


@pytest.mark.parametrize("form", ["slashes", "dots", "weights"])
def test_one_network_is_recognised_under_its_many_names(form: str) -> None:
    names = [fused(m) for m in MODULES]
    found = joined(weights(form), *names)
    assert [v.engine_layer for v in found.verdicts] == names
    assert found.not_evidence is None


@pytest.mark.parametrize("form", ["slashes", "dots", "weights"])
def test_names_in_one_pair_of_brackets_lead_to_their_modules(form: str) -> None:
    names = [f"[{m.replace('.', '/')}/convolution]" for m in MODULES]
    assert [v.engine_layer for v in joined(weights(form), *names).verdicts] == names


def test_the_bias_of_a_module_is_not_its_product() -> None:
    product = torch_name("fc", "linear", "MATRIX_MULTIPLY")
    bias = "[ELEMENTWISE]-[aten_ops.linear.default]-[/fc/linear_add]"
    given = [conv("fc", 64, 64, node="fc")]
    assert joined(given, bias, product).verdicts[0].engine_layer == product


def test_choices_on_the_lines_of_a_log_count_under_the_names_of_torch() -> None:
    given = weights("slashes")
    nodes = tuple(node(w.node or "", "Conv", "x") for w in given)
    names = [fused(m) for m in MODULES]
    log = build(eligible(*names), chosen(names[1]))
    found = join_report(report(*given), BuildEvidence(build=log, nodes=nodes))
    assert [v.verdict for v in found.verdicts][:3] == [
        *(VerdictName.ELIGIBLE, VerdictName.CHOSEN, VerdictName.ELIGIBLE)
    ]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("/layer1/layer1.0/conv1", "layer1.0.conv1"),
        ("layer1/0/conv1", "layer1.0.conv1"),
        ("/features/features.0/features.0.0", "features.0.0"),
        ("/encoder/layer.0/attention/self/query", "encoder.layer.0.attention.self.query"),
        ("layer1.0.conv1", "layer1.0.conv1"),
        ("", ""),
    ],
)
def test_a_path_is_one_however_it_is_written(name: str, path: str) -> None:
    assert module_path(name) == path


def test_names_that_an_exporter_made_up_state_no_path() -> None:
    assert paths_of_layer("node_Conv_12", "onnx::Conv_193") == ()
    assert paths_of_layer("/a/a.0/Conv", "b.weight") == ("b", "a.0")
