"""TensorRT's and Polygraphy's failures as ours, with the reason from TensorRT's own messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from twofour.engines.tensorrt.logger import MessageLog
from twofour.errors import BuildFailedError, first_line

# How pybind11 words a factory that returned null, as trt.Builder does without a GPU. trt.Runtime of
# 8.6.0 ends the process there, so a builder is tried first (status.py)
NULL_FACTORY = "factory function returned nullptr"


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
