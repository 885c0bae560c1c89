"""What the stages of one run share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.pipeline.engine_host import EngineHost
from twofour.pipeline.sessions import Sessions
from twofour.pipeline.settings import Settings
from twofour.pipeline.stages import Progress, Runner

if TYPE_CHECKING:
    from twofour.pipeline.sources.source import Source
    from twofour.pipeline.torch_model import TorchModel

DENSE = "dense"
SPARSE = "sparse"
TUNED = "tuned"
"""The model as it came, where another one is the dense reference."""
INPUTS = "inputs.npz"
WEIGHTS = "weights.safetensors"
LAYERS = "layers.json"


def onnx_name(variant: str) -> str:
    """File of a variant in the run folder."""
    return f"{variant}.onnx"


def reference_name(variant: str) -> str:
    """File with the torch module's outputs on the example inputs."""
    return f"stages/reference-{variant}.npz"


def onnx_files(path: Path) -> tuple[str, ...]:
    """Names of an ONNX file and of its external data files, `<name>.data` or `<name>.0.data`."""
    data = [*path.parent.glob(f"{path.name}.data"), *path.parent.glob(f"{path.name}.*.data")]
    return (path.name, *sorted(file.name for file in data))


def onnx_size_bytes(path: Path) -> int:
    """Bytes of an ONNX file and its external data files together."""
    return sum((path.parent / name).stat().st_size for name in onnx_files(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: where, of what, how, and the models and sessions that stages hand on."""

    path: Path
    """Absolute: user code may change the working directory."""
    shown: Path
    """The same as the user named it."""
    runner: Runner
    source: Source
    options: Settings
    progress: Progress
    host: EngineHost
    sessions: Sessions
    model: TorchModel | None
    """None for an ONNX file."""
    reference: Source | None = None
    """Where dense.onnx comes from, if not from `source`."""
    reference_model: TorchModel | None = None

    @property
    def dense_source(self) -> Source:
        """What dense.onnx is made from."""
        return self.reference or self.source

    def file(self, name: str) -> Path:
        """Path of a file of the run folder."""
        return self.path / name
