"""A file that says which layers stay dense: written by `sensitivity`, taken by `--layers`.

A glob over layer names on each line stays dense, one behind a plus is pruned too; a # at the start
of a line or behind a blank begins a comment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from twofour.errors import BadInputError
from twofour.records.options import Selection
from twofour.words import printable

LAYER_LIST = "layers.txt"
_LARGEST_BYTES = 1 << 24
_MOST_GLOBS = 100_000
"""Each is tried on every layer where it has wildcards; no model has as many layers."""
_COMMENT = re.compile(r"(^|\s)#.*$")
_HINT = "a glob over layer names on each line stays dense, +GLOB is pruned too, # begins a comment"


def read_layers(path: Path, selection: Selection) -> Selection:
    """The selection with what the file adds to it, and where each glob of it stands.

    One of comments alone adds nothing. Raises BadInputError for a file that cannot be read, is no
    text, or is empty.
    """
    include, exclude = dict.fromkeys(selection.include), dict.fromkeys(selection.exclude)
    said_by = dict(selection.said_by)
    for number, line in enumerate(_lines(path), 1):
        glob = _COMMENT.sub("", line).strip()
        if not glob:
            continue
        wanted = glob.startswith("+")
        glob = glob.removeprefix("+").strip()
        where = f"{path} line {number}"
        if not glob:
            raise BadInputError(f"{where}: + without a name", hint=_HINT)
        if glob in (exclude if wanted else include):
            raise BadInputError(
                f"{where}: {glob} is both to be pruned and to stay dense", hint=_HINT
            )
        (include if wanted else exclude)[glob] = None
        said_by.setdefault(glob, where)
        if len(said_by) > _MOST_GLOBS:
            raise BadInputError(f"{where}: more than {_MOST_GLOBS:,} globs", hint=_HINT)
    return replace(selection, include=tuple(include), exclude=tuple(exclude), said_by=said_by)


def layer_list(head: Iterable[str], rows: Iterable[tuple[str, str]]) -> str:
    """The text of such a file: comments on top, then a glob with its comment on each line."""
    lines = [f"# {printable(line)}".rstrip() for line in head]
    found = list(rows)
    width = min(48, max((len(glob) for glob, _ in found), default=0))
    lines += [f"{glob:<{width}}  # {printable(why)}" if why else glob for glob, why in found]
    return "\n".join(lines) + "\n"


def glob_of(name: str) -> str:
    """A glob that matches this name alone, on one line of a file.

    What cannot stand there (a line break) matches any one character.
    """
    text = re.sub(r"[*?\[]", lambda found: f"[{found[0]}]", name)
    text = re.sub(r"[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]", "?", text)
    text = re.sub(r"^\+|^\s|\s$", lambda found: f"[{found[0]}]", text)
    return re.sub(r"(^|\s)#", r"\1[#]", text)


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror or error}") from error
    if len(data) > _LARGEST_BYTES:
        raise BadInputError(f"{path} is too large for a list of layers", hint=_HINT)
    if not data.strip():
        raise BadInputError(f"{path} is empty", hint=_HINT)
    try:
        return data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path} is no UTF-8 text: {error.reason}", hint=_HINT) from error
