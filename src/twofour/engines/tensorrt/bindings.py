"""What TensorRT reads by its version; whether it can build here, its messages and its errors."""

from __future__ import annotations

import contextlib
import importlib
import re
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TextIO

from twofour.engines.machine import find_gpu
from twofour.engines.protocol import Untyped
from twofour.errors import BuildFailedError, first_line, system_errors
from twofour.packages import __version__
from twofour.records import frozen
from twofour.records.export import EngineStatus

if TYPE_CHECKING:
    import onnx

# The letters of trt.Logger's own output
_LETTERS = {"INTERNAL_ERROR": "F", "ERROR": "E", "WARNING": "W", "INFO": "I", "VERBOSE": "V"}
ERRORS_SHOWN = 3
_NO_CUDA = "CUDA initialization failure"
"""Begins the message of a machine that cannot build; a warning in 8.6, an error in 10 and 11."""
# How pybind11 words a factory that returned null, as trt.Builder does without a GPU. trt.Runtime of
# 8.6.0 ends the process there, so a builder is tried first (`tensorrt_status`)
NULL_FACTORY = "factory function returned nullptr"
ENGINE = "tensorrt"
INSTALL = "pip install 'twofour[tensorrt]', on a machine with an NVIDIA GPU"
OLDEST = (8, 6)
_QUANTIZERS = {"QuantizeLinear", "DequantizeLinear"}
_MAJOR = re.compile(r"\d+")
_NEWEST_OF_8 = 17
"""operators.md of onnx-tensorrt: release/8.5-GA and 8.6-GA say 17, 8.5 without LayerNormalization.
8.4 is taken for an 8.5: what it says was not found. Nothing is built with older ones."""
_WRITTEN = 17
"""The oldest opset that torch models are exported in (export/ir_models.py)."""
_LIBRARY = re.compile(r"(\S+\.(?:so[.\d]*|dll)): cannot open shared object file")


class MessageLog:
    """Where the messages of one build go, as `[MM/DD/YYYY-HH:MM:SS] [TRT] [V] message`."""

    def __init__(self, file: TextIO | None) -> None:
        self.errors: list[str] = []
        self.interrupted = False
        """Ctrl-C came while TensorRT was calling us, where it cannot be raised."""
        self.write_error: OSError | None = None
        self._file = file
        self._lock = threading.Lock()

    def message(self, severity: str, text: str) -> None:
        """One message of TensorRT, by the name of its severity; never raises for a full disk."""
        letter = _LETTERS.get(severity, "V")
        if letter in "FE" or text.startswith(_NO_CUDA):
            self.errors.append(text.strip())
        self._write(f"[TRT] [{letter}] {text}", flush=letter in "FE")

    def headline(self, text: str) -> None:
        """A line of our own, which carries no [TRT], as trtexec's own lines do not."""
        self._write(f"[I] {text}", flush=False)

    def why(self, otherwise: str) -> str:
        """The first errors TensorRT reported, or `otherwise` where it reported none."""
        distinct = list(dict.fromkeys(self.errors))[:ERRORS_SHOWN]
        return "; ".join(distinct) or otherwise

    def _write(self, line: str, *, flush: bool) -> None:
        if self._file is None:
            return
        with self._lock:
            try:
                self._file.write(f"[{time.strftime('%m/%d/%Y-%H:%M:%S')}] {line}\n")
                if flush:
                    self._file.flush()
            except OSError as error:
                self.write_error = self.write_error or error


@contextlib.contextmanager
def build_log(
    trt: ModuleType, path: Path | None, headlines: tuple[str, ...] = ()
) -> Iterator[MessageLog]:
    """Send everything TensorRT says to `path`, and keep Polygraphy quiet meanwhile.

    Raises BadInputError where the file cannot be written, and KeyboardInterrupt at the end when
    Ctrl-C came while TensorRT was calling us.
    """
    from polygraphy.backend.trt import util as polygraphy_trt
    from polygraphy.logger import G_LOGGER

    file = None if path is None else _opened_anew(path)
    log = MessageLog(file)
    for text in (f"twofour {__version__} with TensorRT {trt.__version__}", *headlines):
        log.headline(text)
    polygraphy_trt.TRT_LOGGER = logger = trt_logger(trt)
    # critical() prints and raises: one severity above it, it only raises
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
        logger.log_to = log
        try:
            yield log
        finally:
            logger.log_to = None
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
            if log.interrupted:
                raise KeyboardInterrupt
    if log.write_error is not None:
        with _writing(path):
            raise log.write_error


def _opened_anew(path: Path) -> TextIO:
    with _writing(path):
        if path.is_symlink():  # it may lead out of the folder
            path.unlink()
        # line-buffered, so that the log of a build that dies is whole up to its last line
        return path.open("w", encoding="utf-8", errors="replace", buffering=1)


def _writing(path: Path | None) -> contextlib.AbstractContextManager[None]:
    return system_errors(f"cannot write {path}", "free some space, or choose --out")


@cache
def trt_logger(trt: ModuleType) -> Untyped:
    """The one trt.ILogger of this process; its `log_to` says where messages go now.

    TensorRT keeps the first logger it is given for as long as any builder or runtime lives, so
    a logger for each build would lose messages.
    """

    class Forwarder(trt.ILogger):  # type: ignore[misc, name-defined]  # bindings have no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.log_to: MessageLog | None = None

        def log(self, severity: Untyped, message: str) -> None:
            sink = self.log_to
            if sink is None:
                return
            try:
                sink.message(severity.name, message)
            except KeyboardInterrupt:
                sink.interrupted = True
            except Exception as error:  # noqa: BLE001  # C++ calls this: nothing may escape
                sink.write_error = sink.write_error or OSError(str(error))

    return Forwarder()


def build_failed(what: str, log: MessageLog, otherwise: str) -> BuildFailedError:
    """The error to raise: what was tried, and why TensorRT says it failed."""
    return BuildFailedError(f"{what}: {log.why(otherwise)}")


@contextlib.contextmanager
def failures_named(what: str, log: MessageLog) -> Iterator[None]:
    """Raise BuildFailedError for what Polygraphy, the bindings and the CUDA library raise."""
    from polygraphy.exception import PolygraphyException

    try:
        yield
    except (PolygraphyException, RuntimeError, OSError) as error:
        raise build_failed(what, log, first_line(error)) from error
    except TypeError as error:
        if NULL_FACTORY not in str(error):
            raise
        raise build_failed(what, log, NULL_FACTORY) from error


def tensorrt_status() -> EngineStatus:
    """Whether TensorRT can build here; `why_not` has its own words where it says why. No raise."""
    try:
        trt = importlib.import_module("tensorrt")
        importlib.import_module("polygraphy")
    except ModuleNotFoundError as error:
        missing = error.name or "tensorrt"
        hint = "pip install polygraphy" if missing == "polygraphy" else INSTALL
        return _cannot(None, f"the Python package {missing} is not installed", hint)
    except Exception as error:  # noqa: BLE001  # whatever a broken installation raises on import
        why = f"the Python package tensorrt cannot be imported: {first_line(error)}"
        library = _LIBRARY.search(str(error))
        if library is not None:
            why = f"its library {library[1]} is missing"
        return _cannot(None, why, INSTALL)
    version = getattr(trt, "__version__", None)
    if not isinstance(version, str) or not hasattr(trt, "Builder"):
        place = trt.__file__ or next(iter(getattr(trt, "__path__", ())), "the module tensorrt")
        return _cannot(None, f"{place} is not NVIDIA's TensorRT package", INSTALL)
    # "10.13.3.9" -> (10, 13)
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
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
        return EngineStatus(
            engine=ENGINE,
            version=version,
            can_run=True,
            why_not=None,
            device=gpu.name if gpu else "GPU",
        )
    if gpu is None:
        reason = f"no NVIDIA GPU with a driver was found ({reason})"
    hint = "TensorRT builds on the GPU that is to run the engine: see `nvidia-smi`"
    return _cannot(version, reason, hint)


def _cannot(version: str | None, why_not: str, hint: str) -> EngineStatus:
    return EngineStatus(engine=ENGINE, version=version, can_run=False, why_not=why_not, hint=hint)


def opset_for(version: str | None) -> int | None:
    """The opset to export in for that version of TensorRT; None: any that torch writes will do."""
    return None if opset_advice(version, _WRITTEN + 1) is None else _WRITTEN


def opset_advice(version: str | None, opset: int) -> str | None:
    """What to do about an opset newer than that version of TensorRT reads; None: nothing.

    Its parser takes the file all the same and reads operators by their older definition: the axes
    that ReduceMean has as an input since 18 are ignored (NVIDIA/TensorRT issue 3467).
    """
    major = _MAJOR.match(version or "")
    if major is None or int(major[0]) >= 10 or opset <= _NEWEST_OF_8:
        return None
    return (
        f"TensorRT {version} reads opset {_NEWEST_OF_8} and older and can be silently wrong about "
        f"later ones; this file has {opset}: export the torch model with --opset {_WRITTEN}"
    )


@frozen
class Precisions:
    """Types in a file that a weakly typed TensorRT (8.x, 9.x) must be allowed; float32 need not."""

    float16: bool
    bfloat16: bool
    int8: bool
    """The graph has QuantizeLinear or DequantizeLinear nodes."""

    @property
    def in_words(self) -> str:
        """int8, float16 and bfloat16, joined with "+"; float32 where the graph has none of them."""
        used = {"int8": self.int8, "float16": self.float16, "bfloat16": self.bfloat16}
        return "+".join(word for word, is_used in used.items() if is_used) or "float32"


def precisions_of(model: onnx.ModelProto) -> Precisions:
    """The types of its main graph's tensors; no value is looked at."""
    import onnx

    graph = model.graph
    types = {initializer.data_type for initializer in graph.initializer}
    values = (*graph.input, *graph.output, *graph.value_info)
    types |= {value.type.tensor_type.elem_type for value in values}
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        if attribute.name == "to":  # of Cast
            types.add(attribute.i)
        elif attribute.name == "value":
            types.add(attribute.t.data_type)
    return Precisions(
        float16=onnx.TensorProto.FLOAT16 in types,
        bfloat16=onnx.TensorProto.BFLOAT16 in types,
        int8=any(node.op_type in _QUANTIZERS for node in graph.node),
    )
