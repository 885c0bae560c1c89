"""Real logs, where a folder of them is there, and known facts about them."""

from __future__ import annotations

from dataclasses import replace

from support.join_cases import MNIST, node, report_from_log
from support.real_logs import real_log
from support.report_cases import codes, conv, matmul, report

from twofour.eligibility.build_evidence import BuildEvidence
from twofour.eligibility.join import join_report, report_from_engine
from twofour.logs.layer_info import read_layer_information
from twofour.logs.read import read_build_log
from twofour.records.eligibility import Evidence, VerdictName

ORIN = "trtexec_trt10.3.0_orin-nano-yolov5s-sparse24-opt1_1.log"
MNIST_LOG = "pythonlogger_trt10.16.2_cookbook-mnist-sparse_1.log"
MNIST_WEIGHTS = (
    conv("conv1", 1, 32, (5, 5), node="node_conv2d", math_dtype="float32"),
    conv("conv2", 32, 64, (5, 5), node="node_conv2d_1", math_dtype="float32"),
    matmul("gemm1", 3136, 1024, node="node_linear", op="Gemm", math_dtype="float32"),
    matmul("gemm2", 1024, 10, node="node_linear_1", op="Gemm", math_dtype="float32"),
)


def test_the_names_on_the_chosen_line_of_tensorrt_10_3_count_although_it_prints_0() -> None:
    (build,) = read_build_log(real_log(ORIN)).builds
    layers = [
        *(f"/model.{i}/cv{j}/conv/Conv" for i in (2, 4, 6, 8, 13, 17, 20, 23) for j in (1, 2, 3)),
        "/model.2/m/m.0/cv2/conv/Conv",
    ]
    weights = [conv(name, 64, 64, (1, 1), node=name) for name in layers[:-1]]
    weights.append(conv(layers[-1], 64, 64, node=layers[-1]))
    listed = [c.split(" + ")[0] for line in build.sparsity_lines for c in line.constituents or ()]
    others = [name for name in dict.fromkeys(listed) if name not in layers]
    weights += [conv(name, 64, 64, (1, 1), node=name) for name in others]
    found = join_report(report(*weights), BuildEvidence(build=build))
    by_name = {v.layer: v for v in found.verdicts}
    chosen = [v.layer for v in found.verdicts if v.verdict is VerdictName.CHOSEN]
    assert len(chosen) == 16
    assert all("/cv3/" not in name for name in chosen)
    assert by_name["/model.23/cv3/conv/Conv"].verdict is VerdictName.ELIGIBLE
    assert by_name[layers[-1]].verdict is VerdictName.NOT_ELIGIBLE
    first = by_name[layers[0]]
    assert first.engine_layer == "/model.2/cv1/conv/Conv || /model.2/cv2/conv/Conv"
    assert codes(first) == ["QUALIFIES", "LOG_CONTRADICTS", "FUSED_SIBLINGS"]
    assert "with /model.2/cv2/conv/Conv:" in first.reasons[-1].message
    source = first.reasons[0].source or ""
    assert ":7: (Sparsity) Chose 0" in source
    assert ":, /model.2/cv1/conv/Conv || " in source


def test_the_log_of_tensorrt_10_3_alone_gives_39_layers_with_16_chosen() -> None:
    (build,) = read_build_log(real_log(ORIN)).builds
    found = report_from_log(build)
    assert (found.summary.layers, found.summary.chosen, found.summary.eligible) == (39, 16, 23)
    assert found.unmatched_engine_layers == ()


def test_the_mnist_log_of_tensorrt_10_16_joins_with_its_model() -> None:
    (build,) = read_build_log(real_log(MNIST_LOG)).builds
    found = join_report(report(*MNIST_WEIGHTS), BuildEvidence(build=build, nodes=MNIST))
    verdicts = {v.layer: v for v in found.verdicts}
    assert [v.verdict.value for v in found.verdicts] == [*["eligible"] * 3, "not-eligible"]
    assert all(v.evidence is Evidence.MEASURED for v in found.verdicts)
    assert verdicts["conv1"].engine_layer == "node_conv2d + node_relu"
    assert codes(verdicts["conv1"])[:2] == ["NO_SPARSE_TACTIC", "AXIS_NOT_MULTIPLE"]
    region = "{ForeignNode[gemm1.weight...ONNXTRT_castHelper_9]}"
    assert verdicts["gemm1"].engine_layer == region
    assert verdicts["gemm1"].dense_ms == 0.0070496
    assert found.unmatched_engine_layers == ()


def test_layer_information_of_mnist_leads_to_the_nodes_by_metadata() -> None:
    path = real_log("trtexec-layerinfo_trt10.16.1_cookbook-mnist_1.json")
    layers = read_layer_information(path)
    found = join_report(report(*MNIST_WEIGHTS), BuildEvidence(layers=layers, nodes=MNIST))
    assert found.unmatched_engine_layers == ("__myl_CastReshCast_myl4_4",)
    held = [v.engine_layer for v in found.verdicts]
    assert held[:2] == ["node_conv2d + node_relu", "node_conv2d_1 + node_relu_1"]
    assert all(v.evidence is Evidence.PREDICTED for v in found.verdicts)


def test_unnamed_convolutions_of_tensorrt_8_4_are_told_by_their_order() -> None:
    builds = read_build_log(
        real_log("pythonlogger_trt8.4.1_cookbook-conv-stack-sparse_1.log")
    ).builds
    names = [f"Conv:{i}" for i in range(20)]
    nodes = tuple(node(name, unnamed=True) for name in names)
    predicted = report(*(conv(name, 256, 256, (5, 5), node=name) for name in names))
    found = join_report(predicted, BuildEvidence(build=builds[-1], nodes=nodes))
    assert [v.verdict for v in found.verdicts] == [VerdictName.ELIGIBLE] * 20
    assert [v.engine_layer for v in found.verdicts][19] == "(Unnamed Layer* 19) [Convolution]"


def test_torch_tensorrt_layers_lead_to_their_modules() -> None:
    path = real_log("torchtrt-layerinfo_trt10.1.0_resnet18-fp16_1.json")
    weights = [
        replace(conv(name, 64, 64), node=f"node_conv2d_{i}")
        for i, name in enumerate(("conv1", "layer1.0.conv1", "layer2.0.downsample.0"))
    ]
    found = join_report(report(*weights), BuildEvidence(layers=read_layer_information(path)))
    held = [(v.engine_layer or "").split(" + ")[0].rpartition("[")[2] for v in found.verdicts]
    assert held == [
        "/conv1/convolution]",
        "/layer1/0/conv1/convolution_1]",
        "/layer2/0/downsample/0/convolution_7]",
    ]


def test_a_build_without_sparsity_rules_its_21_convolutions_out() -> None:
    builds = read_build_log(real_log("trtexec_trt8.5.10_qat-resnet18_1.log")).builds
    found = report_from_engine(BuildEvidence(build=builds[0]))
    assert found.summary.not_eligible == 21
    assert {codes(v)[0] for v in found.verdicts} == {"SPARSITY_OFF"}
    assert all(v.profile_ms is not None for v in found.verdicts)
