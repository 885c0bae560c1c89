"""The shape of the house: modules, lines, importers, and what the main job passes through.

    python benchmarks/house.py

Counts of src/twofour, and of one run on an ONNX file of three layers: `prune-export-build` in this
process, its worker processes not counted. An edge is a call from a function of one module to a
function of another.
"""

from __future__ import annotations

import ast
import contextlib
import io
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SRC = Path(__file__).parents[1] / "src"
_SMALL = 60


def main() -> None:
    """Print the counts."""
    modules = {_name(path): path for path in sorted((SRC / "twofour").rglob("*.py"))}
    lines = {name: len(path.read_text().splitlines()) for name, path in modules.items()}
    importers: dict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        for imported in _imports(path, modules):
            importers[imported].add(name)
    single = [name for name in modules if len(importers[name]) == 1]
    rooms = {name for name, path in modules.items() if path.name == "__init__.py"}
    total = sum(lines.values())
    print(f"modules {len(modules) - len(rooms)}, packages {len(rooms)}, lines {total}")
    print(f"one importer {len(single)} ({sum(lines[name] for name in single)} lines)")
    print(f"under {_SMALL} lines {sum(n < _SMALL for m, n in lines.items() if m not in rooms)}")
    edges, passed, reads = _main_job(set(modules))
    print(f"main job: modules {len(passed)}, edges {len(edges)}")
    for file, count in sorted(reads.items()):
        print(f"  opened for reading {file}: {count}")


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


def _main_job(modules: set[str]) -> tuple[set[tuple[str, str]], set[str], Counter[str]]:
    from twofour.cli import main as command

    edges: set[tuple[str, str]] = set()
    passed: set[str] = set()
    reads: Counter[str] = Counter()

    def parsed(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and str(args[0]).endswith(".onnx") and str(args[1]).startswith("r"):
            reads[Path(str(args[0])).name] += 1

    def call(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_code.co_name == "<module>":
            return
        here = frame.f_globals.get("__name__", "")
        if here not in modules:
            return
        passed.add(here)
        back = frame.f_back
        there = back.f_globals.get("__name__", "") if back is not None else ""
        if there in modules and there != here:
            edges.add((there, here))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "three.onnx"
        onnx.save(_three_layers(), path)
        sys.argv = ["twofour", "prune-export-build", str(path), "--out", f"{folder}/run"]
        sys.addaudithook(parsed)
        sys.setprofile(call)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            command()
        sys.setprofile(None)
    return edges, passed, reads


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
    main()
