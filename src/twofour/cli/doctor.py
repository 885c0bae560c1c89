"""`twofour doctor`: what is installed, which engines can run here and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twofour.cli.console import show, show_record
from twofour.cli.guard import guarded
from twofour.cli.options import AsJson

if TYPE_CHECKING:
    from rich.console import RenderableType

    from twofour.records.build import Diagnosis, EngineStatus, Gpu


@guarded
def doctor(*, json: AsJson = False) -> None:
    """Say what is installed, which engines can run here and why not, and what the GPU can do.

    Example: twofour doctor
    """
    from twofour.pipeline.doctor import diagnose

    diagnosis = diagnose()
    if json:
        show_record(diagnosis)
    else:
        show(_view(diagnosis))


def _view(diagnosis: Diagnosis) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    packages = Table(box=None, pad_edge=False)
    for heading in ("package", "version", "needed for", "install with"):
        packages.add_column(heading, overflow="fold")
    for package in diagnosis.packages:
        install = "" if package.version else package.install
        packages.add_row(
            package.name,
            package.version or "-",
            package.needed_for,
            Text(install),
            end_section=True,
        )
    head = (
        f"twofour {diagnosis.twofour_version}, Python {diagnosis.python_version}, "
        f"{diagnosis.platform}"
    )
    engines = [Text(_engine_line(status)) for status in diagnosis.engines]
    return Group(Text(head), Text(), packages, Text(), *engines, Text(_gpu_line(diagnosis.gpu)))


def _engine_line(status: EngineStatus) -> str:
    name = f"engine {status.engine}"
    version = f" {status.version}" if status.version else ""
    if status.can_run:
        return f"{name}{version}: can run here on {status.device}"
    hint = f" ({status.hint})" if status.hint else ""
    return f"{name}{version}: cannot run here: {status.why_not}{hint}"


def _gpu_line(gpu: Gpu | None) -> str:
    if gpu is None:
        return "GPU: no NVIDIA GPU with a working driver found"
    major, minor = gpu.compute_capability
    cores = "has" if gpu.has_sparse_tensor_cores else "has no"
    return f"GPU: {gpu.name}, compute capability {major}.{minor}: {cores} sparse tensor cores"
