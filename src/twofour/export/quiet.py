"""Silence for code that prints: torch's exporter, and a user's forward while it is traced."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

_LOGGERS = ("torch", "torch.onnx", "onnxscript", "onnx_ir")


class _OtherThreads:
    """A text stream that drops what one thread writes; a progress bar in another goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._silent = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._silent else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - everything else is the stream's own
        return getattr(self._stream, name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back warnings, log lines, and what this thread prints; all is put back after."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            # torch prints the partial graph of a failed export to stderr (torch/export/_trace.py)
            contextlib.redirect_stderr(_OtherThreads(sys.stderr)),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
