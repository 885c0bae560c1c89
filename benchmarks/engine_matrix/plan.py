"""Which engines are built, most telling first: a budget may end before the list does."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT16, INT8 = "float16", "int8"
MODES = {"tensorrt": "tensorrt:gpu,tensorrt:gpu-sparsity-off", "onnxruntime": "onnxruntime:cpu"}
"""What is compared, for each engine that can build."""
BATCHES = (8, 1, 64)
SWEEPS = ("conv3x3", "conv1x1", "matmul", "gemm", "conv3x3g2", "conv3x3g32")
MODELS = ("resnet50", "bert_base", "resnext50_32x4d", "mobilenet_v2", "unet", "vit_base")
NETS = (*(f"sweep_{name}" for name in SWEEPS), *MODELS)
_AT_ALL_BATCHES = ("resnet50", "bert_base", *NETS[: len(SWEEPS)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A dense and a sparse engine of one network, for one batch size."""

    net: str
    precision: str
    batch: int

    @property
    def folder(self) -> str:
        """Of the ONNX file."""
        return f"{self.net}-{self.precision}"

    @property
    def name(self) -> str:
        """Of the run folder."""
        return f"{self.folder}-b{self.batch}"


def cases() -> tuple[Case, ...]:
    """Every network at batch 8 in float16, then in INT8, then some at batch 1 and 64."""
    first, *others = BATCHES
    wanted = [(net, precision, first) for precision in (FLOAT16, INT8) for net in _mixed()]
    for precision in (FLOAT16, INT8):
        wanted += [(net, precision, batch) for batch in others for net in _AT_ALL_BATCHES]
    return tuple(Case(net=net, precision=kind, batch=batch) for net, kind, batch in wanted)


def _mixed() -> list[str]:
    """A sweep and a model in turn."""
    sweeps = [net for net in NETS if net.startswith("sweep_")]
    return [net for pair in zip(sweeps, MODELS, strict=True) for net in pair]
