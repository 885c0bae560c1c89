"""The version of twofour, and the packages that it uses: what for, and what installs them.

pyproject.toml, docs/install.md and CONTRIBUTING.md name the same packages; a test holds them to it.
"""

from __future__ import annotations

from twofour.errors import MissingToolError
from twofour.records import frozen

__version__ = "0.1.0"


@frozen
class Package:
    """One package that twofour uses."""

    name: str
    """Its name on PyPI."""
    needed_for: str
    module: str = ""
    """The name it is imported by, where that is another one."""
    extra: str | None = None
    """The extra of twofour that installs it; None: it comes with twofour itself."""
    parts: tuple[str, ...] = ()
    """Other packages that its version and its results depend on."""

    @property
    def install(self) -> str:
        """The command that installs it."""
        wanted = self.name if self.extra is None else f"'twofour[{self.extra}]'"
        return f"pip install {wanted}"


PACKAGES = (
    Package(name="torch", needed_for="prune and export of torch models", parts=("triton",)),
    Package(name="numpy", needed_for="the N:M rule"),
    Package(name="onnx", needed_for="reading and writing ONNX"),
    Package(name="onnx-ir", needed_for="export, and float32 files", module="onnx_ir"),
    Package(name="onnxscript", needed_for="torch.onnx.export"),
    Package(
        name="onnxruntime-gpu", needed_for="the embedded engine (CPU, CUDA)", module="onnxruntime"
    ),
    Package(name="onnxruntime", needed_for="the embedded engine (CPU), instead of the above"),
    Package(name="safetensors", needed_for="checkpoints and pruned weights"),
    Package(name="array-api-compat", needed_for="pruning", module="array_api_compat"),
    Package(name="threadpoolctl", needed_for="pruning and forecasts"),
    Package(name="psutil", needed_for="memory and processor time"),
    Package(name="pydantic", needed_for="records"),
    Package(name="jinja2", needed_for="HTML reports"),
    Package(name="typer", needed_for="the command line"),
    Package(name="rich", needed_for="the terminal"),
    Package(
        name="tensorrt",
        needed_for="TensorRT engines",
        extra="tensorrt",
        parts=("tensorrt-cu12", "tensorrt-cu13"),
    ),
    Package(name="polygraphy", needed_for="building TensorRT engines", extra="tensorrt"),
    Package(
        name="nvidia-ml-py",
        needed_for="clocks of a GPU in measurements",
        module="pynvml",
        extra="tensorrt",
    ),
    Package(name="transformers", needed_for="Hugging Face checkpoint folders", extra="hf"),
    Package(name="diffusers", needed_for="models of diffusion pipelines", extra="diffusers"),
    Package(name="timm", needed_for="timm:NAME models", extra="timm"),
    Package(
        name="pillow", needed_for="folders of images as calibration", module="PIL", extra="images"
    ),
    Package(name="ray", needed_for="measurements on a Ray cluster", extra="ray"),
)


def how_to_install(module: str) -> str:
    """The command that installs what is imported by this name."""
    for package in PACKAGES:  # onnxruntime is the module of two: the first one is advised
        if module in (package.module, package.name):
            return package.install
    return f"pip install {module.replace('_', '-')}"


def missing(error: ModuleNotFoundError) -> MissingToolError | None:
    """The error that names the package and how to install it; None where a module is our own."""
    module = (error.name or "").partition(".")[0]
    if module in ("", "twofour"):
        return None
    return MissingToolError(
        f"this needs the Python package {module}, which is not installed",
        hint=how_to_install(module),
    )


def with_parts(*names: str) -> tuple[str, ...]:
    """These packages of the list, each with what its results depend on."""
    parts = {package.name: package.parts for package in PACKAGES}
    return tuple(part for name in names for part in (name, *parts[name]))


def installed_version(package: str) -> str | None:
    """The version of another package, from its metadata alone; None: it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
