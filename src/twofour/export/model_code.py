"""The model's own code while it runs: kept silent, and the line of it that raised an error."""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from twofour.errors import BadInputError, TwofourError

_LOGGERS = (
    *("torch", "torch.onnx", "torch._subclasses.fake_tensor"),
    *("onnxscript", "onnx_ir", "transformers", "diffusers"),
)
_LONGEST_MESSAGE = 300
_OURS = Path(__file__).parents[1]
_STANDARD = Path(sysconfig.get_path("stdlib"))
_PACKAGES = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))

Frames = Iterable[tuple[str, int]]
"""File and line of each frame, the innermost last."""


def describe_error(error: BaseException, folders: Sequence[Path] = ()) -> str:
    """Type and message of an exception, and the last line of user code it passed through.

    User code is what lies in `folders`; failing that, what belongs to no installed package.
    """
    message = " ".join(str(error).split())
    if len(message) > _LONGEST_MESSAGE:
        message = message[:_LONGEST_MESSAGE] + "..."
    text = type(error).__name__
    if message:
        text += f": {message}"
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
    place = user_line(frames, folders)
    if isinstance(error, SyntaxError) and error.filename:
        line = (error.text or "").strip()
        place = f"{Path(error.filename).name}, line {error.lineno}: {line}"
    if place:
        text += f" ({place})"
    return text


@contextlib.contextmanager
def described(
    what: str, *, hint: str | None = None, folders: Sequence[Path] = ()
) -> Iterator[None]:
    """Raise BadInputError: WHAT, then the error of user code or a library, SystemExit too.

    Our own errors stay as they are.
    """
    try:
        yield
    except TwofourError:
        raise
    except (Exception, SystemExit) as error:
        raise BadInputError(f"{what} {describe_error(error, folders)}", hint=hint) from error


def user_line(frames: Frames, folders: Sequence[Path] = ()) -> str | None:
    """File, number and text of the innermost frame in `folders`, else outside every package."""
    not_own = (_OURS, _STANDARD, *_PACKAGES)
    paths = [(Path(file), number) for file, number in frames]
    own = [(p, number) for p, number in paths if p.is_absolute() and not _inside(p, not_own)]
    frame = next(reversed([frame for frame in own if _inside(frame[0], folders)] or own), None)
    if frame is None:
        return None
    path, number = frame
    return f"{path.name}, line {number}: {linecache.getline(str(path), number).strip()}"


def _inside(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Hold back warnings, log lines, and what Python code prints; all is put back after."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            # torch prints the partial graph of a failed export to stderr (torch/export/_trace.py)
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
