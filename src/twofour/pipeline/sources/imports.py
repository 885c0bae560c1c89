"""Which of the user's own files a Python file imports, found without running any of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path


def with_local_imports(starts: Sequence[Path], folders: Sequence[Path]) -> tuple[Path, ...]:
    """The files and all they import, directly or not, from the folders; sorted.

    A file that cannot be parsed is in the answer and leads no further.
    """
    found: set[Path] = set()
    waiting = list(starts)
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting.extend(_imported(file, folders))
    return tuple(sorted(found))


def module_files(folder: Path, dotted: str) -> tuple[Path, ...]:
    """The files that importing a dotted name runs when it starts in the folder."""
    return tuple(_files(folder, dotted.split(".")))


def _imported(file: Path, folders: Sequence[Path]) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            roots = folders
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
            roots = (file.parents[node.level - 1],) if _is_relative(file, node) else folders
        else:
            continue
        for root in roots:
            for parts in names:
                yield from _files(root, parts)


def _is_relative(file: Path, node: ast.ImportFrom) -> bool:
    return 0 < node.level <= len(file.parents)


def _files(root: Path, parts: Sequence[str]) -> Iterator[Path]:
    place = root
    for part in parts:
        for candidate in (place / f"{part}.py", place / part / "__init__.py"):
            if candidate.is_file():
                yield candidate
        place = place / part
