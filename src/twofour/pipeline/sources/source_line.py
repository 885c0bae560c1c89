"""Which line of the user's code an exception comes from."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

_LONGEST_MESSAGE = 300
_NOT_THE_USERS = (
    Path(__file__).parents[2],
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
)


def describe(error: BaseException, folders: Sequence[Path] = ()) -> str:
    """Type and message of an exception, and the last line of user code it passed through.

    User code is what lies in `folders`; failing that, what belongs to no installed package.
    """
    message = " ".join(str(error).split())
    if len(message) > _LONGEST_MESSAGE:
        message = message[:_LONGEST_MESSAGE] + "..."
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    place = _place(error, folders)
    return f"{text} ({place})" if place else text


def _place(error: BaseException, folders: Sequence[Path]) -> str | None:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}, line {error.lineno}: {(error.text or '').strip()}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(Path(f.filename))]
    inside = [f for f in frames if any(Path(f.filename).is_relative_to(d) for d in folders)]
    if not (inside or frames):
        return None
    last = (inside or frames)[-1]
    return f"{Path(last.filename).name}, line {last.lineno}: {last.line}"


def _is_users(path: Path) -> bool:
    return path.is_absolute() and not any(path.is_relative_to(place) for place in _NOT_THE_USERS)
