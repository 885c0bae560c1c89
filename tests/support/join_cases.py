"""Graphs, logs and layer information for the join: lines written by hand, in real wording."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.log_lines import parse_lines
from twofour.eligibility.build_evidence import BuildEvidence
from twofour.eligibility.join import join_report, report_from_engine
from twofour.records.eligibility import EligibilityReport
from twofour.records.export import GraphNode
from twofour.records.log import Build, EngineLayer, LayerInformation, LayerProfile, Profile


def node(name: str, op: str = "Conv", *inputs: str, **changes: Any) -> GraphNode:
    given: dict[str, Any] = {
        "name": name,
        "label": name,
        "op": op,
        "domain": "",
        "inputs": inputs,
        "outputs": (f"{name}_out",),
    }
    return GraphNode(**{**given, **changes})


def chain(*named: tuple[str, str]) -> tuple[GraphNode, ...]:
    """Nodes (name, op), each the user of the one before it."""
    before = "x"
    nodes = []
    for name, op in named:
        nodes.append(node(name, op, before))
        before = f"{name}_out"
    return tuple(nodes)


MNIST = (
    *chain(
        ("node_conv2d", "Conv"),
        ("node_relu", "Relu"),
        ("node_max_pool2d", "MaxPool"),
        ("node_conv2d_1", "Conv"),
        ("node_relu_1", "Relu"),
        ("node_max_pool2d_1", "MaxPool"),
        ("node_view", "Reshape"),
    ),
    node("node_linear", "Gemm", "node_view_out", "gemm1.weight", constants=("gemm1.weight",)),
    node("node_relu_2", "Relu", "node_linear_out"),
    node("node_linear_1", "Gemm", "node_relu_2_out", "gemm2.weight", constants=("gemm2.weight",)),
    node("node_softmax", "Softmax", "node_linear_1_out"),
    node("node_argmax", "ArgMax", "node_softmax_out"),
)
"""The network of NVIDIA's cookbook, of which there are real logs."""


def build(
    *messages: str,
    flag: str = "Enabled",
    version: str = "v101601",
    options: str = "--verbose",
    ends: str = "PASSED",
) -> Build:
    """The build of a trtexec log with these messages of the library, numbered from line 3."""
    command = f"trtexec --onnx=m.onnx {options}"
    (found,) = parse_lines(
        [
            f"&&&& RUNNING TensorRT.trtexec [TensorRT {version}] # {command}",
            f"[07/07/2026-02:11:09] [I] Sparsity: {flag}",
            *(
                text if text.startswith("Layer(") else f"[07/07/2026-02:11:09] [V] [TRT] {text}"
                for text in messages
            ),
            f"&&&& {ends} TensorRT.trtexec [TensorRT {version}] # {command}",
        ],
        name="build.log",
    )
    return found


def eligible(*names: str, count: int | None = None, foreign: bool = False) -> str:
    return _counted("Found {} layer(s) eligible to use", names, count, foreign=foreign)


def chosen(*names: str, count: int | None = None, foreign: bool = False) -> str:
    return _counted("Chose {} layer(s) using", names, count, foreign=foreign)


def _counted(words: str, names: Sequence[str], count: int | None, *, foreign: bool) -> str:
    tag = " (foreignNode) " if foreign else ""
    found = words.format(len(names) if count is None else count)
    return f"{tag}(Sparsity) {found} sparse tactics: {', '.join(names)}"


def tuned(name: str, *times: tuple[str, float]) -> tuple[str, ...]:
    """Autotuning of one layer: kernels and their milliseconds."""
    return (
        f"=============== Computing costs for {name}",
        "*************** Autotuning format combination: Half(1,1) -> Half(1,1) ***************",
        f"--------------- Timing Runner: {name} (CaskConvolution[0x80000009])",
        *(
            f"Tactic Name: {kernel} Tactic: 0x{at + 1:016x} Time: {ms}"
            for at, (kernel, ms) in enumerate(times)
        ),
        f"{name} (CaskConvolution[0x80000009]) profiling completed in 0.1 seconds. "
        f"Fastest Tactic: 0x0000000000000001 Time: {times[0][1]}",
        ">>>>>>>>>>>>>>> Chose Runner Type: CaskConvolution Tactic: 0x0000000000000001",
    )


def layer(name: str, kernel: str | None = None, **changes: Any) -> EngineLayer:
    sparse = None if kernel is None else "sparse" in kernel
    given: dict[str, Any] = {"name": name, "layer_type": "CaskConvolution", "kernel": kernel}
    return EngineLayer(**{**given, "sparse": sparse, **changes})


def information(*layers: EngineLayer) -> LayerInformation:
    return LayerInformation(file="layers.json", layers=tuple(layers))


def profile(**times: float) -> Profile:
    rows = (
        LayerProfile(name=name, total_ms=None, average_ms=ms, median_ms=None)
        for name, ms in times.items()
    )
    return Profile(iterations=10, layers=tuple(rows))


SPARSE = "sm80_xmma_fprop_sparse_conv_f16f16_f16f16_f16_nhwc_sptensor"
DENSE = "sm80_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwc"


def joined(predicted: EligibilityReport, **evidence: Any) -> EligibilityReport:
    """What the rules said, joined with this evidence."""
    return join_report(predicted, BuildEvidence(**evidence))


def report_from_log(made: Build) -> EligibilityReport:
    """What a log alone says of the engine's own layers."""
    return report_from_engine(BuildEvidence(build=made))
