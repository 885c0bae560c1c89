"""What is installed here, which engines can run, and whether the GPU has sparse tensor cores."""

from __future__ import annotations

import platform

from twofour.pipeline.stages import versions
from twofour.records.build import Diagnosis, InstalledPackage
from twofour.version import __version__

_PACKAGES = (
    ("torch", "prune and export of torch models", "pip install torch"),
    ("numpy", "the N:M rule", "pip install numpy"),
    ("onnx", "reading and writing ONNX", "pip install onnx"),
    ("onnxscript", "torch.onnx.export", "pip install onnxscript"),
    ("onnxruntime-gpu", "the embedded engine (CPU, CUDA)", "pip install onnxruntime-gpu"),
    ("onnxruntime", "the embedded engine (CPU), instead of the above", "pip install onnxruntime"),
    ("polygraphy", "building TensorRT engines", "pip install polygraphy"),
    ("tensorrt", "TensorRT engines", "pip install 'twofour[tensorrt]'"),
    ("transformers", "Hugging Face checkpoint folders", "pip install 'twofour[hf]'"),
    ("timm", "timm:NAME models", "pip install 'twofour[timm]'"),
)


def how_to_install(package: str) -> str:
    """What brings a package that cannot be imported, by the name it is imported under."""
    known = {name: install for name, _, install in _PACKAGES}
    return known.get(package, f"pip install {package.replace('_', '-')}")


def diagnose() -> Diagnosis:
    """Look at this machine; nothing is guessed from version numbers where it can be tried."""
    from twofour.engines.machine import find_gpu
    from twofour.engines.registry import builders
    from twofour.pipeline.engine_host import EngineHost

    found = versions(*(name for name, _, _ in _PACKAGES))
    with EngineHost() as host:
        engines = tuple(map(host.status, builders()))
    return Diagnosis(
        twofour_version=__version__,
        python_version=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        packages=tuple(
            InstalledPackage(name=name, version=found[name], needed_for=use, install=install)
            for name, use, install in _PACKAGES
        ),
        engines=engines,
        gpu=find_gpu(),
    )
