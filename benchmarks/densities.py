"""How densely src is written: tokens, lines, and what a reader has to unpack in his head.

    python benchmarks/densities.py [ROOM_OR_MODULE]

Prints a row per room (or per module of one room), and the functions above LONGEST tokens. A token
is a name, operator, number or string. A line of code is neither blank nor a comment. A crowded
comprehension has another one inside or a second loop, and a condition.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "twofour"
LONGEST = 250
"""Tokens of a function that fits one screen."""
_COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_FOR_TOOLS = ("# noqa", "# type:", "# pragma")


@dataclass(kw_only=True)
class Density:
    """Counts of one module, or sums over several."""

    modules: int = 0
    tokens: int = 0
    lines: int = 0
    comments: int = 0
    conditionals: int = 0
    comprehensions: int = 0
    crowded: int = 0
    tuples: int = 0

    def add(self, other: Density) -> None:
        """Add the counts of `other` to these."""
        for name in vars(other):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def tokens_per_line(self) -> float:
        """Tokens per line of code."""
        return self.tokens / self.lines

    @property
    def comments_per_100(self) -> float:
        """Comments per 100 lines of code."""
        return 100 * self.comments / self.lines

    def per_1000(self, count: int) -> float:
        """`count` per 1,000 lines of code."""
        return 1000 * count / self.lines


def of_modules(paths: list[Path]) -> Density:
    """The sums over the modules at `paths`."""
    total = Density()
    for path in paths:
        total.add(of_module(path))
    return total


def of_module(path: Path) -> Density:
    """The counts of one module."""
    tokens = _tokens(path)
    lines = [line.strip() for line in path.read_text().splitlines()]
    density = Density(
        modules=1,
        tokens=sum(token.type in _COUNTED for token in tokens),
        lines=sum(bool(line) and not line.startswith("#") for line in lines),
        comments=sum(_is_comment(token) for token in tokens),
    )
    for node in ast.walk(ast.parse(path.read_text())):
        density.conditionals += isinstance(node, ast.IfExp)
        density.tuples += _assigns_tuple(node)
        if isinstance(node, _COMPREHENSIONS):
            density.comprehensions += 1
            density.crowded += _is_crowded(node)
    return density


def longest_functions(paths: list[Path]) -> list[tuple[int, str]]:
    """Functions above LONGEST tokens, with their module, the longest first."""
    above = []
    for path in paths:
        for tokens, name in _functions(path):
            if tokens > LONGEST:
                above.append((tokens, f"{path.relative_to(SRC)} {name}"))
    return sorted(above, reverse=True)


def _functions(path: Path) -> Iterator[tuple[int, str]]:
    counted = [token for token in _tokens(path) if token.type in _COUNTED]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, _FUNCTIONS):
            end = node.end_lineno or node.lineno
            yield sum(node.lineno <= token.start[0] <= end for token in counted), node.name


def _tokens(path: Path) -> list[tokenize.TokenInfo]:
    with path.open("rb") as file:
        return list(tokenize.tokenize(file.readline))


def _is_comment(token: tokenize.TokenInfo) -> bool:
    return token.type == tokenize.COMMENT and not token.string.startswith(_FOR_TOOLS)


def _assigns_tuple(node: ast.AST) -> bool:
    """`a, b = x, y`, which saves a line and costs a thought."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return isinstance(node.targets[0], ast.Tuple)


def _is_crowded(comprehension: ast.AST) -> bool:
    inside = [node for node in ast.walk(comprehension) if isinstance(node, _COMPREHENSIONS)]
    loops = [loop for node in inside for loop in node.generators]
    return len(loops) > 1 and any(loop.ifs for loop in loops)


def main() -> None:
    """Print the table and the functions that are too long."""
    room = sys.argv[1] if sys.argv[1:] else ""
    paths = [path for path in sorted(SRC.rglob("*.py")) if _key(path, "").startswith(room)]
    rows: dict[str, Density] = defaultdict(Density)
    for path in paths:
        density = of_module(path)
        rows[_key(path, room)].add(density)
        rows["all"].add(density)
    print(f"{'':<36} modules tokens  lines a line cond. compr. crowded tuples comments")
    for name, row in sorted(rows.items(), key=lambda named: -named[1].tokens):
        print(
            f"{name:<36} {row.modules:7} {row.tokens:6} {row.lines:6} {row.tokens_per_line:6.2f} "
            f"{row.per_1000(row.conditionals):5.1f} {row.per_1000(row.comprehensions):6.1f} "
            f"{row.crowded:7} {row.per_1000(row.tuples):6.1f} {row.comments_per_100:8.2f}"
        )
    for tokens, name in longest_functions(paths):
        print(f"{tokens:5} {name}")


def _key(path: Path, room: str) -> str:
    """The module where one room is asked for, else the room."""
    module = path.relative_to(SRC)
    return str(module) if room or len(module.parts) == 1 else module.parts[0]


if __name__ == "__main__":
    main()
