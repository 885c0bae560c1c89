"""Install the bindings of three TensorRT majors, each importable as `tensorrt` over stand-ins.

CUDA's runtimes are put beside them, for their headers and for the names in their libraries.

    python tests/trt_stub/prepare.py build

writes build/trt8, build/trt10 and build/trt11, each to be put on PYTHONPATH, and build/cuda11,
build/cuda12 and build/cuda13, with a `.ready` file in each when it is whole. What is
ready for this Python already is left alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from make_stubs import make_stubs

BINDINGS = {
    "trt8": "tensorrt-bindings==8.6.1",
    "trt10": "tensorrt-cu12-bindings==10.16.1.11",
    "trt11": "tensorrt-cu13-bindings==11.4.0.106",
}
CUDA = {
    "cuda11": "nvidia-cuda-runtime-cu11==11.8.89",
    "cuda12": "nvidia-cuda-runtime-cu12==12.9.79",
    "cuda13": "nvidia-cuda-runtime==13.0.96",
}

# The wheel holds `tensorrt_bindings`; the package `tensorrt` itself comes with the libraries.
_ALIAS = '''"""The bindings under the name that they have in a full installation."""

import sys

import tensorrt_bindings

sys.modules[__name__] = tensorrt_bindings
'''


def prepare(folder: Path, requirement: str) -> None:
    """Make one major importable from `folder`, or its headers there."""
    ready = folder / ".ready"
    made_of = f"{requirement} for Python {sys.version_info.major}.{sys.version_info.minor}\n"
    if ready.is_file() and ready.read_text() == made_of:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--target", str(folder), requirement], check=True)
    if folder.name in BINDINGS:
        module = next((folder / "tensorrt_bindings").glob("tensorrt*.so"))
        make_stubs(module, folder / "tensorrt_libs")
        (folder / "tensorrt.py").write_text(_ALIAS)
    ready.write_text(made_of)


def main(target: str) -> None:
    """Make all of them importable below `target`."""
    for name, requirement in (BINDINGS | CUDA).items():
        prepare(Path(target, name), requirement)


if __name__ == "__main__":
    main(sys.argv[1])
