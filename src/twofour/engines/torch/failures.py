"""torch's exceptions as ours, in one line; and silence for its warnings."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator

from twofour.errors import BuildFailedError, MissingToolError, TwofourError

_LONGEST = 300
_MISSING = {
    "InvalidCxxCompiler": (
        "torch.compile finds no C++ compiler",
        "install g++ or clang, or name one in the environment variable CXX",
    ),
    "TritonMissing": ("torch.compile finds no working Triton", "pip install triton"),
}
"""By the name of torch._inductor.exc's class."""
_HINTS = {
    "OutOfMemory": "use a smaller batch",
    "LimitHit": "it is compiled for each set of shapes: give it fewer",
}
"""By a part of the name of torch's or dynamo's class."""
_COMPILER_ERROR = re.compile(r"^.*\berror: .*$", re.MULTILINE)
_LOGGER = "torch"


@contextlib.contextmanager
def torch_errors(what: str) -> Iterator[None]:
    """Whatever torch or the user's forward raises, SystemExit included, becomes one of ours.

    Raises MissingToolError where a compiler is missing, else BuildFailedError: "WHAT: message".
    """
    try:
        yield
    except TwofourError:
        raise
    except (Exception, SystemExit) as error:
        raise _translated(what, error) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back warnings and log lines below an error's; what is printed is the caller's."""
    logger = logging.getLogger(_LOGGER)
    level = logger.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logger.setLevel(logging.ERROR)
            yield
    finally:
        logger.setLevel(level)


def in_one_line(error: BaseException) -> str:
    """Type and first line of its message; a C++ compiler's own line where it is that."""
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    said = _COMPILER_ERROR.search(text)
    if said is not None and said[0].strip() != line:
        line = f"{line}: {said[0].strip()}"
    line = line if len(line) <= _LONGEST else line[:_LONGEST] + "..."
    name = type(error).__name__
    return line if line.startswith(name) else f"{name}: {line}"


def _translated(what: str, error: BaseException) -> TwofourError:
    for cause in _chain(error):
        missing = _MISSING.get(type(cause).__name__)
        if missing is not None:
            return MissingToolError(f"{what}: {missing[0]}", hint=missing[1])
    hints = (hint for part, hint in _HINTS.items() if part in type(error).__name__)
    return BuildFailedError(f"{what}: {in_one_line(error)}", hint=next(hints, None))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it came from; torch keeps some in `inner_exception`."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        waiting += [found.__cause__, found.__context__, getattr(found, "inner_exception", None)]
