"""TensorRT as it is installed: whether it can build here, what it logs, what its errors mean."""

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
from typing import TextIO

from twofour.engines.machine import find_gpu
from twofour.engines.protocol import Untyped
from twofour.errors import BadInputError, BuildFailedError, first_line
from twofour.packages import __version__
from twofour.records.export import EngineStatus

# The letters of trt.Logger's own output
_LETTERS = {"INTERNAL_ERROR": "F", "ERROR": "E", "WARNING": "W", "INFO": "I", "VERBOSE": "V"}
_ERRORS_SHOWN = 3
_NO_CUDA = "CUDA initialization failure"
"""What keeps a builder from being created; 8.6 says it as a warning, 10 and 11 as an error."""
# How pybind11 words a factory that returned null, as trt.Builder does without a GPU. trt.Runtime of
# 8.6.0 ends the process there, so a builder is tried first (`tensorrt_status`)
NULL_FACTORY = "factory function returned nullptr"
ENGINE = "tensorrt"
INSTALL = "pip install 'twofour[tensorrt]', on a machine with an NVIDIA GPU"
OLDEST = (8, 6)
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
        distinct = list(dict.fromkeys(self.errors))[:_ERRORS_SHOWN]
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
    with contextlib.ExitStack() as stack:
        file = None if path is None else stack.enter_context(_open(path))
        log = MessageLog(file)
        log.headline(f"twofour {__version__} with TensorRT {trt.__version__}")
        for text in headlines:
            log.headline(text)
        stack.enter_context(_receiving(trt, log))
        try:
            yield log
        finally:
            if log.interrupted:
                raise KeyboardInterrupt
    if log.write_error is not None:
        raise _cannot_write(path, log.write_error)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    try:
        if path.is_symlink():  # it may lead out of the folder
            path.unlink()
        # line-buffered, so that the log of a build that dies is whole up to its last line
        file = path.open("w", encoding="utf-8", errors="replace", buffering=1)
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):
            file.close()


def _cannot_write(path: Path | None, error: OSError) -> BadInputError:
    return BadInputError(
        f"cannot write {path}: {error.strerror or error}", hint="free some space, or choose --out"
    )


@contextlib.contextmanager
def _receiving(trt: ModuleType, log: MessageLog) -> Iterator[None]:
    from polygraphy.backend.trt import util as polygraphy_trt
    from polygraphy.logger import G_LOGGER

    logger = trt_logger(trt)
    polygraphy_trt.TRT_LOGGER = logger
    # critical() prints and raises: one severity above it, it only raises
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
        logger.log_to = log
        try:
            yield
        finally:
            logger.log_to = None


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
    """Never raises: what stands in the way is `why_not`, in TensorRT's own words where it can."""
    try:
        trt = importlib.import_module("tensorrt")
        importlib.import_module("polygraphy")
    except ModuleNotFoundError as error:
        missing = error.name or "tensorrt"
        hint = f"pip install {missing}" if missing == "polygraphy" else INSTALL
        return _cannot(None, f"the Python package {missing} is not installed", hint)
    except Exception as error:  # noqa: BLE001  # whatever a broken installation raises on import
        library = _LIBRARY.search(str(error))
        why = f"the Python package tensorrt cannot be imported: {first_line(error)}"
        return _cannot(None, f"its library {library[1]} is missing" if library else why, INSTALL)
    version = getattr(trt, "__version__", None)
    if not isinstance(version, str) or not hasattr(trt, "Builder"):
        place = trt.__file__ or next(iter(getattr(trt, "__path__", ())), "the module tensorrt")
        return _cannot(None, f"{place} is not NVIDIA's TensorRT package", INSTALL)
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
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


def _cannot(version: str | None, why_not: str, hint: str) -> EngineStatus:
    return EngineStatus(engine=ENGINE, version=version, can_run=False, why_not=why_not, hint=hint)
