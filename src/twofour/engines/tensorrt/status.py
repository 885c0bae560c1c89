"""Whether TensorRT can build here, established by creating a builder."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

from twofour.engines.gpu import find_gpu
from twofour.engines.tensorrt.log import build_log, trt_logger
from twofour.errors import first_line
from twofour.records.build import EngineStatus

ENGINE = "tensorrt"
INSTALL = "pip install 'twofour[tensorrt]', on a machine with an NVIDIA GPU"
OLDEST = (8, 6)
_LIBRARY = re.compile(r"(\S+\.(?:so[.\d]*|dll)): cannot open shared object file")


def tensorrt_status() -> EngineStatus:
    """Never raises: what stands in the way is `why_not`, in TensorRT's own words where it can."""
    try:
        trt = importlib.import_module("tensorrt")
    except ModuleNotFoundError as error:
        missing = error.name or "tensorrt"
        return _cannot(None, f"the Python package {missing} is not installed", INSTALL)
    except Exception as error:  # noqa: BLE001  # whatever a broken installation raises on import
        return _cannot(None, _import_reason(error), INSTALL)
    version = getattr(trt, "__version__", None)
    if not isinstance(version, str) or not hasattr(trt, "Builder"):
        return _cannot(None, f"{_place(trt)} is not NVIDIA's TensorRT package", INSTALL)
    if _numbers(version) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        return _cannot(version, f"version {version} is older than {needed}", INSTALL)
    return _try_builder(trt, version)


def _try_builder(trt: ModuleType, version: str) -> EngineStatus:
    try:
        with build_log(trt, None) as log:
            builder = trt.Builder(trt_logger(trt))
            reason = None if builder else log.why("no builder could be created")
    except Exception as error:  # noqa: BLE001  # doctor reports whatever keeps it from running
        reason = log.why(f"no builder could be created: {first_line(error)}")
    gpu = find_gpu()
    if reason is None:
        device = gpu.name if gpu else "GPU"
        return EngineStatus(
            engine=ENGINE, version=version, can_run=True, why_not=None, device=device
        )
    if gpu is None:
        reason = f"no NVIDIA GPU with a driver was found ({reason})"
    hint = "TensorRT builds on the GPU that is to run the engine: see `nvidia-smi`"
    return _cannot(version, reason, hint)


def _import_reason(error: Exception) -> str:
    library = _LIBRARY.search(str(error))
    if library is not None:
        return f"its library {library[1]} is missing"
    return f"the Python package tensorrt cannot be imported: {first_line(error)}"


def _place(module: ModuleType) -> str:
    paths = [module.__file__] if module.__file__ else list(getattr(module, "__path__", []))
    return str(Path(paths[0])) if paths else "the module named tensorrt"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _cannot(version: str | None, why_not: str, hint: str) -> EngineStatus:
    return EngineStatus(engine=ENGINE, version=version, can_run=False, why_not=why_not, hint=hint)
