from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from twofour.engines.onnxruntime.engine import OnnxRuntimeEngine
from twofour.engines.protocol import ENGINES, Engine, EngineRow, builders, choose_engine
from twofour.engines.tensorrt.engine import TensorRtEngine
from twofour.engines.torch.engine import MODES, TorchEngine, TorchTensorRtEngine
from twofour.errors import BadInputError, MissingToolError
from twofour.records.export import EngineStatus


@dataclass
class Statuses:
    """Which engines run; remembers which were tried."""

    runs: tuple[str, ...]
    asked: list[str] = field(default_factory=list)

    def __call__(self, row: EngineRow) -> EngineStatus:
        name = row.name
        self.asked.append(name)
        can_run = name in self.runs
        why_not = None if can_run else f"no {name} library"
        hint = f"install {name}"
        return EngineStatus(engine=name, version="1.0", can_run=can_run, why_not=why_not, hint=hint)


BOTH = ("tensorrt", "onnxruntime")


@pytest.mark.parametrize(
    ("asked", "runs", "taken", "tried", "passed_over"),
    [
        ("auto", BOTH, "tensorrt", ["tensorrt"], []),
        ("auto", BOTH[1:], "onnxruntime", [*BOTH], ["no tensorrt library"]),
        ("onnxruntime", BOTH, "onnxruntime", ["onnxruntime"], []),
    ],
)
def test_no_engine_is_tried_without_need_and_why_one_is_passed_over_is_kept(
    asked: str, runs: tuple[str, ...], taken: str, tried: list[str], passed_over: list[str]
) -> None:
    statuses = Statuses(runs)
    status, not_used = choose_engine(asked, statuses)
    assert (status.engine, status.can_run) == (taken, True)
    assert statuses.asked == tried
    assert [s.why_not for s in not_used] == passed_over


def test_an_engine_asked_for_that_cannot_run_is_a_missing_tool() -> None:
    with pytest.raises(MissingToolError, match="cannot run here: no") as failure:
        choose_engine("tensorrt", Statuses(("onnxruntime",)))
    assert failure.value.exit_code == 3
    assert failure.value.hint == "install tensorrt"


def test_another_word_is_bad_input() -> None:
    with pytest.raises(BadInputError, match="no engine 'openvino'"):
        choose_engine("openvino", Statuses(BOTH))


def test_every_engine_is_known_by_its_name_and_meets_the_protocol() -> None:
    engines: dict[str, type[Engine]] = {
        "tensorrt": TensorRtEngine,
        "onnxruntime": OnnxRuntimeEngine,
        "torch": TorchEngine,
        "torch-tensorrt": TorchTensorRtEngine,
    }
    assert {name: type(row.engine()) for name, row in ENGINES.items()} == engines
    assert tuple(row.name for row in builders()) == BOTH


BLOCKED = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None
import twofour.engines.machine, twofour.inputs.examples, twofour.engines.timing
import twofour.engines.protocol
import twofour.engines.tensorrt.engine
heavy = {{"torch", "onnx", "onnxruntime", "tensorrt", "polygraphy", "pandas"}}
print(sorted(n for n in heavy if sys.modules.get(n) is not None))
statuses = [row.engine().status() for row in twofour.engines.protocol.ENGINES.values()]
print([(s.engine, s.can_run, s.why_not) for s in statuses])
torch = twofour.engines.protocol.ENGINES["torch"].engine()
found = [torch.status(mode.name) for mode in torch.modes]
print(len(found), {{(s.why_not.partition(":")[0], s.hint) for s in found}})
"""


@pytest.mark.parametrize(
    ("blocked", "onnxruntime"),
    [
        (("torch", "tensorrt"), "('onnxruntime', True, None)"),
        (
            ("torch", "tensorrt", "onnx", "onnxruntime", "polygraphy"),
            "('onnxruntime', False, 'onnxruntime cannot be imported: ",
        ),
    ],
)
def test_engines_import_nothing_heavy_and_without_packages_have_reasons_and_no_traceback(
    blocked: tuple[str, ...], onnxruntime: str
) -> None:
    code = BLOCKED.format(blocked=blocked)
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    imported, statuses, of_torch = finished.stdout.splitlines()
    assert imported == "[]"
    assert "('tensorrt', False, 'the Python package tensorrt is not installed')" in statuses
    assert onnxruntime in statuses
    said = {("torch cannot be imported", "pip install torch")}
    assert of_torch == f"{len(MODES)} {said}"
