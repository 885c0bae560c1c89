"""ONNX Runtime sessions on the providers that were asked for, or the reason why not."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from twofour.engines.gpu import find_gpu
from twofour.engines.onnxruntime.session import CPU, CUDA, NO_MESSAGES, SessionSetup
from twofour.engines.protocol import Untyped
from twofour.errors import MissingToolError, first_line

TENSORRT = "TensorrtExecutionProvider"
HINTS = {
    CUDA: "pip install 'onnxruntime-gpu[cuda,cudnn]' in place of onnxruntime, on a machine with an "
    "NVIDIA GPU",
    TENSORRT: "onnxruntime-gpu from PyPI needs CUDA, cuDNN and TensorRT 10 (pip install "
    "'tensorrt-cu13<11'), on a machine with an NVIDIA GPU",
}
_ERRORS = 3  # ONNX Runtime's severities
_STDERR = 2
_LIBRARY = re.compile(r"with error: (.+)")
_COLOUR = re.compile(r"\x1b?\[[\d;]*m")
_PREFIX = re.compile(r"^\S+ \S+ \[[EW]:[^\]]*\] ")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSetup:
    """Providers in order of preference, each with its options, and entries of the session."""

    providers: tuple[tuple[str, dict[str, str]], ...] = ((CPU, {}),)
    config: dict[str, str] = field(default_factory=dict)

    @property
    def wanted(self) -> str:
        """The provider that must be in use."""
        return self.providers[0][0]

    @property
    def on_gpu(self) -> bool:
        """Inputs and outputs can stay in the GPU's memory."""
        return self.wanted != CPU


def open_on(setup: ProviderSetup, model: Path | bytes, session_setup: SessionSetup) -> Untyped:
    """A session in which `setup.wanted` is in use.

    Raises MissingToolError, with what ONNX Runtime says of it, where that provider was left out:
    ONNX Runtime itself would go on with the CPU.
    """
    import onnxruntime as ort

    if setup.wanted not in ort.get_available_providers():
        raise _left_out(setup.wanted, "this onnxruntime was built without it")
    options = _session_options(setup, session_setup)
    source = model if isinstance(model, bytes) else str(model)
    if not setup.on_gpu:
        return ort.InferenceSession(source, options, providers=list(setup.providers))
    _load_libraries(setup.wanted)
    with _stderr_kept() as said:
        # without enable_fallback=0 it prints the TensorRT provider's error and takes the CPU
        try:
            session = ort.InferenceSession(
                source, options, providers=list(setup.providers), enable_fallback=0
            )
        except RuntimeError as error:
            if "Please install TensorRT libraries" not in str(error):
                raise
            raise _left_out(setup.wanted, reason_in(said()) or first_line(error)) from error
        if setup.wanted not in session.get_providers():
            raise _left_out(setup.wanted, reason_in(said()) or "it could not be loaded")
    return session


def nodes_by_provider(session: Untyped) -> dict[str, int] | None:
    """Nodes of the model that each provider runs; None before ONNX Runtime 1.24.

    Only for a session with the entry session.record_ep_graph_assignment_info of 1.
    """
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return None
    counts: dict[str, int] = {}
    for part in session.get_provider_graph_assignment_info():
        counts[part.ep_name] = counts.get(part.ep_name, 0) + len(part.get_nodes())
    return counts


def _session_options(setup: ProviderSetup, session: SessionSetup) -> Untyped:
    options = session.options()
    for key, value in setup.config.items():
        options.add_session_config_entry(key, value)
    return options


def _left_out(provider: str, reason: str) -> MissingToolError:
    if find_gpu() is None:
        reason = f"no NVIDIA GPU with a driver was found ({reason})"
    return MissingToolError(
        f"ONNX Runtime cannot use {provider}: {reason}", hint=HINTS.get(provider)
    )


def reason_in(said: str) -> str | None:
    """The missing library, else the first line, of what ONNX Runtime logged."""
    text = _COLOUR.sub("", said).strip()
    library = _LIBRARY.search(text)
    if library is not None:
        return library[1].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _PREFIX.sub("", lines[0]) if lines else None


def _load_libraries(provider: str) -> None:
    """Load what the provider links to from pip's wheels, where they are installed."""
    import onnxruntime as ort

    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
        if hasattr(ort, "preload_dlls"):  # from 1.21
            ort.preload_dlls()
        if provider == TENSORRT:
            # the package loads libnvinfer, which the provider then finds by its name
            importlib.import_module("tensorrt")


@contextlib.contextmanager
def _stderr_kept() -> Iterator[Callable[[], str]]:
    """What is written to the file descriptor of stderr meanwhile, errors of ONNX Runtime included.

    Why a provider is left out stands in no exception, only in the log of the C++ library.
    """
    import onnxruntime as ort

    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        kept = os.dup(_STDERR)
        os.dup2(file.fileno(), _STDERR)
        ort.set_default_logger_severity(_ERRORS)
        try:
            yield lambda: _content(file.fileno())
        finally:
            ort.set_default_logger_severity(NO_MESSAGES)
            os.dup2(kept, _STDERR)
            os.close(kept)


def _content(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)  # reading to the end leaves the position where it was
    return os.read(descriptor, os.fstat(descriptor).st_size).decode(errors="replace")
