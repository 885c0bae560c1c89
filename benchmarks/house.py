"""The shape of the house: modules, tokens, densities, and what the main job passes through.

    python benchmarks/house.py [--limit | --picture]

Counts of src/twofour and tests, and of one run on an ONNX file of three layers:
`prune-export-build` in a process of its own, whose worker processes are not counted. An edge is a
call from a function of one module to a function of another. Size is counted in tokens, so that
nobody packs two thoughts into one line, and so are the densities of `densities.py`, which shows
them by room. `--limit` ends in 1 where a count is above LIMITS, or comments are below
LEAST_COMMENTS, and names it: what adds tokens takes others away. Limits leave 2 % of room; lower
one when the count falls.
`--picture` prints the rooms from the top down, as docs/architecture.md has them.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType

import densities
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
LIMITS: dict[str, float] = {
    "tokens of src": 329_000,
    "modules of src": 190,
    "modules of the main job": 75,
    "lines of tests": 40_700,
    "functions above 250 tokens": 0,
    "crowded comprehensions": 0,
    "tokens a line": 7.5,
    "conditional expressions per 1,000 lines": 20.0,
    "comprehensions per 1,000 lines": 35.0,
    "tuple assignments per 1,000 lines": 3.0,
}
LEAST_COMMENTS = 2.5
"""Comments per 100 lines."""
_SMALL = 60


def main() -> None:
    """Print the counts; with `--limit`, refuse those that are too high."""
    modules = {_name(path): path for path in sorted((SRC / "twofour").rglob("*.py"))}
    lines = {name: len(path.read_text().splitlines()) for name, path in modules.items()}
    tests = sum(len(p.read_text().splitlines()) for p in (ROOT / "tests").rglob("*.py"))
    importers: dict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        for imported in _imports(path, modules):
            importers[imported].add(name)
    single = [name for name in modules if len(importers[name]) == 1]
    rooms = {name for name, path in modules.items() if path.name == "__init__.py"}
    print(f"rooms {len(rooms)}; one importer {len(single)} ({sum(lines[n] for n in single)} lines)")
    print(f"under {_SMALL} lines {sum(n < _SMALL for m, n in lines.items() if m not in rooms)}")
    edges, passed, reads = _main_job()
    print(f"edges of the main job {len(edges)}")
    for file, times in sorted(reads.items()):
        print(f"  opened for reading {file}: {times}")
    paths = list(modules.values())
    density = densities.of_modules(paths)
    counts: dict[str, float] = {
        "tokens of src": density.tokens,
        "modules of src": density.modules,
        "modules of the main job": len(passed),
        "lines of tests": tests,
        "functions above 250 tokens": len(densities.longest_functions(paths)),
        "crowded comprehensions": density.crowded,
        "tokens a line": round(density.tokens_per_line, 2),
        "conditional expressions per 1,000 lines": round(density.per_1000(density.conditionals), 1),
        "comprehensions per 1,000 lines": round(density.per_1000(density.comprehensions), 1),
        "tuple assignments per 1,000 lines": round(density.per_1000(density.tuples), 1),
    }
    for name, count in counts.items():
        print(f"{name} {count} (limit {LIMITS[name]})")
    print(f"comments per 100 lines {density.comments_per_100:.2f} (least {LEAST_COMMENTS})")
    wrong = [name for name, count in counts.items() if count > LIMITS[name]]
    if density.comments_per_100 < LEAST_COMMENTS:
        wrong.append("too few comments")
    if wrong and "--limit" in sys.argv:
        sys.exit(f"above the limit: {', '.join(wrong)}")


def picture() -> str:
    """The layers of the import contract, each room with the first sentence of its docstring."""
    contract = (ROOT / "pyproject.toml").read_text().split("layers = [", 1)[1].split("]", 1)[0]
    floors = [re.findall(r"twofour\.(\w+)", line) for line in contract.splitlines()]
    return ("-" * 12 + "\n").join("".join(map(_room, floor)) for floor in floors if floor)


def _room(name: str) -> str:
    path = SRC / "twofour" / name
    module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    said = (ast.get_docstring(ast.parse(module.read_text())) or "").splitlines()[0]
    return f"{name:<12} {said}\n"


def _name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, modules: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(modules)


def _main_job() -> tuple[set[tuple[str, str]], set[str], dict[str, int]]:
    """Edges, modules and files read of one run, which `_traced` writes down in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(_three_layers(), f"{folder}/three.onnx")
        subprocess.run(
            [sys.executable, __file__, "--traced", folder], check=True, capture_output=True
        )
        found = json.loads(Path(folder, "found.json").read_text())
    return {(a, b) for a, b in found["edges"]}, set(found["passed"]), found["reads"]


def _traced(folder: str) -> None:
    from twofour.cli import main as command

    edges: set[tuple[str, str]] = set()
    passed: set[str] = set()
    reads: Counter[str] = Counter()

    def parsed(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and str(args[0]).endswith(".onnx") and str(args[1]).startswith("r"):
            reads[Path(str(args[0])).name] += 1

    def call(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return  # modules and the bodies of classes run when they are imported
        here = str(frame.f_globals.get("__name__", ""))
        if not here.startswith("twofour") or (here not in passed and _is_imported(frame)):
            return
        passed.add(here)
        back = frame.f_back
        there = str(back.f_globals.get("__name__", "")) if back is not None else ""
        if there.startswith("twofour") and there != here:
            edges.add((there, here))

    model = f"{folder}/three.onnx"
    sys.argv = ["twofour", "prune-export-build", model, "--out", f"{folder}/run"]
    sys.addaudithook(parsed)
    sys.setprofile(call)
    try:
        command()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
    found = {"edges": sorted(edges), "passed": sorted(passed), "reads": reads}
    Path(folder, "found.json").write_text(json.dumps(found))


def _is_imported(frame: FrameType | None) -> bool:
    """Whether the call is part of an import, such as a dataclass that makes its methods."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _three_layers() -> onnx.ModelProto:
    """x[1, 64] -> three Gemm of 64 by 64."""
    rng = np.random.default_rng(1)
    weights = [rng.standard_normal((64, 64)).astype(np.float32) for _ in range(3)]
    tensors = [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)]
    nodes = [
        helper.make_node("Gemm", [f"y{i}" if i else "x", f"w{i}"], [f"y{i + 1}"], name=f"gemm{i}")
        for i in range(3)
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "three",
        [value("x", TensorProto.FLOAT, [1, 64])],
        [value("y3", TensorProto.FLOAT, [1, 64])],
        tensors,
    )
    opset = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--traced"]:
        _traced(sys.argv[2])
    elif sys.argv[1:] == ["--picture"]:
        print(picture(), end="")
    else:
        main()
