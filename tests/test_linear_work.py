"""Four times the input is about four times the work, whatever the input: none of a few KB burns."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from support import onnx_models as om

from twofour.errors import TwofourError
from twofour.graph.opened import open_onnx
from twofour.graph.weights import find_weights
from twofour.logs.read import read_build_log
from twofour.pipeline.evidence_files import EvidenceFiles
from twofour.pipeline.reporting import report_files
from twofour.pipeline.validating import validate_path
from twofour.pruning.onnx import prune_onnx
from twofour.pruning.selection import choose, read_layers
from twofour.records.weights import Pattern, Selection
from twofour.store import to_json

SCALE = int(os.environ.get("LINEAR_SCALE", "1"))
"""Times the sizes of the table: `make fuzz` looks for what only large inputs show."""
_TIMES = 4
_MOST = 9.0
"""Work of four times the input, in that of the input: 4 is linear, 16 is quadratic."""
_TRIES = 4

Work = Callable[[], object]
Attack = Callable[[int, Path], Work]


def _layers(*names: str) -> str:
    layers = [{"Name": name, "LayerType": "MatrixMultiply"} for name in names]
    return json.dumps({"Layers": layers})


def _sparsity(names: str, count: int = 1) -> str:
    return _verbose(f"(Sparsity) Found {count} layer(s) eligible to use sparse tactics: {names}")


def _verbose(*messages: str) -> str:
    return "".join(f"[11/22/2024-10:00:00] [V] [TRT] {message}\n" for message in messages)


def _log(text: Callable[[int], str]) -> Attack:
    def attack(size: int, folder: Path) -> Work:
        path = folder / "b.log"
        path.write_text(text(size))
        return lambda: to_json(read_build_log(path))

    return attack


def _report(
    model: Callable[[int], onnx.ModelProto] | None = None,
    layers: Callable[[int], str] | None = None,
    log: Callable[[int], str] | None = None,
    profile: Callable[[int], str] | None = None,
) -> Attack:
    def attack(size: int, folder: Path) -> Work:
        def given(name: str, text: Callable[[int], str] | None) -> Path | None:
            if text is None:
                return None
            (folder / name).write_text(text(size))
            return folder / name

        onnx_file = None if model is None else om.save(model(size), folder / "m.onnx")
        files = EvidenceFiles(
            onnx=onnx_file,
            layers=given("l.json", layers),
            log=given("b.log", log),
            profile=given("p.json", profile),
        )
        return lambda: to_json(report_files(files).report)

    return attack


def _on(model: Callable[[int], onnx.ModelProto], use: Callable[[Path], object]) -> Attack:
    def attack(size: int, folder: Path) -> Work:
        path = om.save(model(size), folder / "m.onnx")
        return lambda: use(path)

    return attack


def _find(path: Path) -> None:
    opened = open_onnx(path)
    find_weights(opened.proto, path=path)
    assert opened.nodes


def _prune(path: Path) -> None:
    target = path.with_name("sparse.onnx")
    prune_onnx(open_onnx(path), target, Pattern(2, 4))
    to_json(validate_path(target, Pattern(2, 4), Selection()))


def _layer_list(size: int, folder: Path) -> Work:
    """Each layer excluded by its name."""
    model = om.save(_chain(size), folder / "m.onnx")
    (folder / "layers.txt").write_text("".join(f"m{i}\n" for i in range(size)))

    def work() -> None:
        weights = open_onnx(model).weights().weights
        selection = read_layers(folder / "layers.txt", Selection())
        assert len(choose(weights, Pattern(2, 4), selection)) == size

    return work


def _model(nodes: list[onnx.NodeProto], *arrays: str, width: int = 8) -> onnx.ModelProto:
    """All constants are width x width; the one input is x."""
    values = np.ones((width, width), np.float32)
    return om.model(nodes, dict.fromkeys(arrays, values), inputs={"x": [2, width]})


def _beside(count: int) -> onnx.ModelProto:
    """Products of one input with one weight, called by their numbers."""
    nodes = [_matmul("x", "w", f"o{i}", str(i)) for i in range(count)]
    return _model(nodes, "w")


def _chain(count: int) -> onnx.ModelProto:
    """Products m0, m1, ... one behind the other, with a weight each."""
    nodes = [_matmul(f"x{i}" if i else "x", f"w{i}", f"x{i + 1}", f"m{i}") for i in range(count)]
    return _model(nodes, *(f"w{i}" for i in range(count)))


def _matmul(data: str, weight: str, output: str, name: str) -> onnx.NodeProto:
    return helper.make_node("MatMul", [data, weight], [output], name)


def _aliases(count: int) -> onnx.ModelProto:
    nodes = []
    for i in range(count):
        nodes.append(helper.make_node("Identity", ["w"], [f"a{i}"]))
        nodes.append(_matmul("x", f"a{i}", f"o{i}", f"m{i}"))
    return _model(nodes, "w")


def _functions(count: int) -> onnx.ModelProto:
    """Each calls the next one."""
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    made = _chain(1)
    for i in range(count):
        op, domain = (f"F{i - 1}", "f") if i % 90 else ("Relu", "")
        body = [helper.make_node(op, ["a"], ["b"], domain=domain)]
        made.functions.append(helper.make_function("f", f"F{i}", ["a"], ["b"], body, imports))
    return made


def _numbers(count: int, between: str) -> str:
    return between.join(map(str, range(count)))


def _named(pattern: str) -> Callable[[int], str]:
    """Layer information with a layer for every number."""
    return lambda size: _layers(*(pattern.format(i, i + 1, size - 1) for i in range(size)))


ATTACKS: Mapping[str, tuple[Attack, int]] = {
    "layers: a name that joins all nodes": (
        _report(_beside, lambda n: _layers(_numbers(n, " + "))), 300),
    "layers: a name of open brackets": (
        _report(_beside, lambda n: _layers("{ForeignNode[" * n + "PWN(a + " * n)), 500),
    "layers: regions that lie in each other": (
        _report(_chain, _named("{{ForeignNode[m0...m{0}]}}")), 50),
    # deeper than any Python's own JSON reader goes: it reads 1,000 levels on some
    "layers: objects within objects": (_report(None, lambda n: "[\n" * n + "]\n" * n), 12_000),
    "log: half of the nodes eligible": (
        _report(_beside, None, lambda n: _sparsity(_numbers(n // 2, ", "), n // 2)), 300),
    "log: fused layers": (
        _report(_chain, None, lambda n: _verbose(
            *(f"X: Fusing m{i} with m{i + 1}" for i in range(n)),
            "Engine generation completed in 1 seconds.",
        ) + _sparsity("m1")), 50),
    "log: timed layers": (_log(lambda n: _verbose(*(
        f"--------------- Timing Runner: l{i} (C[0x1])" for i in range(n)))), 250),
    "log: a line of open brackets": (_log(lambda n: _sparsity("(a || " * n)), 2000),
    "log: rests of a list": (_log(lambda n: _sparsity("a") + ",b\n" * n), 4000),
    "log: lines as wide as the paste": (_log(lambda n: ("x" * 80 + "\n") * n), 2000),
    "log: lines of escapes": (_log(lambda n: ("\x1b[0;" * 40 + "\n") * n), 25),
    "profile": (
        _report(_chain, _named("m{0}"), None, lambda n: json.dumps(
            [{"name": f"m{i}", "averageMs": 1.0} for i in range(n)])), 50),
    "model: one weight, many products": (_on(_beside, _find), 150),
    "model: functions": (_on(_functions, _find), 100),
    "model: pruning names of one weight": (_on(_aliases, _prune), 50),
    "list of layers": (_layer_list, 200),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_four_times_the_input_takes_about_four_times_the_work(name: str, tmp_path: Path) -> None:
    attack, size = ATTACKS[name]
    (tmp_path / "small").mkdir()
    (tmp_path / "large").mkdir()
    small = attack(size * SCALE, tmp_path / "small")
    large = attack(_TIMES * size * SCALE, tmp_path / "large")
    _seconds(small)  # imports and caches
    found = [(_seconds(small), _seconds(large))]
    while len(found) < _TRIES and _ratio(found) > _MOST:  # other programs were at work meanwhile
        found.append((_seconds(small), _seconds(large)))
    assert _ratio(found) <= _MOST, found


def _ratio(found: list[tuple[float, float]]) -> float:
    return min(large for _, large in found) / max(min(small for small, _ in found), 1e-4)


def _seconds(work: Work) -> float:
    """Of this process alone."""
    before = time.process_time()
    with contextlib.suppress(TwofourError):  # refused: in time as well
        work()
    return time.process_time() - before
