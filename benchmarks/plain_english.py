"""Words, beginnings of docstrings and names of results over which a reader stumbles.

    python benchmarks/plain_english.py

Reads src, README.md, CONTRIBUTING.md, CHANGELOG.md and docs (without docs/decisions, which is
history). Prints file, line, what was found and what to write instead; ends in 1 where it found
anything.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
INSTEAD = {
    r"\bh[au]ngs? on\b": "depends on",
    r"\bforet(ell|old)\w*": "predict",
    r"\bfor want of\b": "for lack of, because",
    r"\b(is|are|be|was|were) told\b": "reports, says",
    r"\bwhat tells\b|\bonly .{3,30} tells\b": "says, shows, decides",
    r"\b(go|goes|gone|going|went) on (with|behind|from)\b": "continue",
    r"\bin place of\b": "instead of",
    r"\blacking\b": "missing, without",
    r", say[,.)]": "such as, for example",
    r"\bnothing (is )?known against\b|\bnothing rules it out\b": "eligible",
}
"""Regular expression -> what to write."""
_SHADOWS = frozenset({"found", "said", "told"})
"""Names of results that do not say what the result is."""
_FRAGMENT = re.compile(r"(Of|As|By|With|For want)\b(?! [a-z]+ing\b)")
"""How a docstring begins that has no subject."""
_TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md")


def main() -> None:
    """Print what is to be written in other words."""
    found = [
        *(hit for path in sorted((ROOT / "src").rglob("*.py")) for hit in _code(path)),
        *(
            hit
            for pattern in ("src/**/*.py", "src/**/*.j2", "src/**/*.js", *_TEXTS)
            for path in sorted(ROOT.glob(pattern))
            if path.parent.name != "decisions"
            for hit in _words(path)
        ),
    ]
    for line in found:
        print(line)
    sys.exit(f"{len(found)} places in other words, please" if found else 0)


def _code(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Name, ast.arg)) and _named(node) in _SHADOWS:
            yield f"{_place(path, node.lineno)}: {_named(node)!r}: name it after what it is"
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        text = node.value.value
        if isinstance(text, str) and _FRAGMENT.match(text):
            begin = text.splitlines()[0]
            yield f"{_place(path, node.lineno)}: {begin!r}: begin with a subject"


def _named(node: ast.Name | ast.arg) -> str | None:
    """The name that a variable or parameter gets here."""
    if isinstance(node, ast.arg):
        return node.arg
    return node.id if isinstance(node.ctx, ast.Store) else None


def _words(path: Path) -> Iterator[str]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("from "):
            continue  # imported names, such as `say`
        for pattern, instead in INSTEAD.items():
            for hit in re.finditer(pattern, line, re.IGNORECASE):
                yield f"{_place(path, number)}: {hit[0]!r}: {instead}"


def _place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


if __name__ == "__main__":
    main()
