from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest

from twofour.engines.protocol import Arrays, BuildRequest, Engine, ProgressCallback
from twofour.engines.select import all_statuses, choose_engine
from twofour.errors import BadInputError, MissingToolError
from twofour.records import EngineName, EngineStatus, LayerTime, VariantBuild


@dataclass
class FakeEngine:
    name: EngineName
    can_run: bool
    asked: int = 0

    def status(self) -> EngineStatus:
        self.asked += 1
        return EngineStatus(
            engine=self.name,
            version="1.0",
            can_run=self.can_run,
            why_not=None if self.can_run else f"no {self.name.value} library",
            hint=f"install {self.name.value}",
        )

    def build(self, request: BuildRequest, report: ProgressCallback) -> VariantBuild:
        raise NotImplementedError

    def run(self, model: Path, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        raise NotImplementedError

    def profile(self, model: Path, inputs: Arrays, iterations: int) -> tuple[LayerTime, ...]:
        raise NotImplementedError


def engines(*, tensorrt: bool, onnxruntime: bool = True) -> tuple[FakeEngine, FakeEngine]:
    return (
        FakeEngine(EngineName.TENSORRT, tensorrt),
        FakeEngine(EngineName.ONNXRUNTIME, onnxruntime),
    )


def test_auto_takes_tensorrt_where_a_builder_can_be_created() -> None:
    tensorrt, onnxruntime = engines(tensorrt=True)
    engine, status, not_used = choose_engine("auto", (tensorrt, onnxruntime))
    assert engine is tensorrt
    assert (status.can_run, not_used) == (True, ())
    assert onnxruntime.asked == 0, "nothing is tried without need"


def test_auto_goes_on_with_onnx_runtime_and_keeps_the_reason() -> None:
    tensorrt, onnxruntime = engines(tensorrt=False)
    engine, status, not_used = choose_engine("auto", (tensorrt, onnxruntime))
    assert engine is onnxruntime
    assert status.engine is EngineName.ONNXRUNTIME
    assert [s.why_not for s in not_used] == ["no tensorrt library"]


def test_an_engine_asked_for_is_the_only_one_tried() -> None:
    tensorrt, onnxruntime = engines(tensorrt=True)
    engine, _, not_used = choose_engine("onnxruntime", (tensorrt, onnxruntime))
    assert engine is onnxruntime
    assert (tensorrt.asked, not_used) == (0, ())


def test_an_engine_asked_for_that_cannot_run_is_a_missing_tool() -> None:
    with pytest.raises(MissingToolError, match="tensorrt cannot run here: no tensorrt") as failure:
        choose_engine("tensorrt", engines(tensorrt=False))
    assert failure.value.exit_code == 3
    assert failure.value.hint == "install tensorrt"


def test_no_engine_at_all_names_both_reasons() -> None:
    with pytest.raises(
        MissingToolError, match="no tensorrt library; onnxruntime cannot"
    ) as failure:
        choose_engine("auto", engines(tensorrt=False, onnxruntime=False))
    assert failure.value.hint == "install onnxruntime"


def test_another_word_is_bad_input() -> None:
    with pytest.raises(BadInputError, match="no engine 'openvino'"):
        choose_engine("openvino", engines(tensorrt=True))


def test_every_engine_is_tried_for_doctor() -> None:
    statuses = all_statuses(engines(tensorrt=False))
    assert [(s.engine.value, s.can_run) for s in statuses] == [
        ("tensorrt", False),
        ("onnxruntime", True),
    ]


def test_the_fake_meets_the_protocol() -> None:
    engine: Engine = FakeEngine(EngineName.TENSORRT, can_run=True)
    assert engine.status().can_run


BLOCKED = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None
import twofour.engines.gpu, twofour.engines.inputs, twofour.engines.latency
import twofour.engines.protocol, twofour.engines.select, twofour.engines.shapes
import twofour.engines.tensorrt.builder, twofour.engines.tensorrt.cudart
import twofour.engines.tensorrt.plan, twofour.engines.tensorrt.precision
heavy = {{"torch", "onnx", "onnxruntime", "tensorrt", "polygraphy", "pandas"}}
print(sorted(n for n in heavy if sys.modules.get(n) is not None))
print([(s.engine.value, s.can_run, s.why_not) for s in twofour.engines.select.all_statuses()])
"""


def in_new_process(*blocked: str) -> list[str]:
    code = BLOCKED.format(blocked=blocked)
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    return finished.stdout.splitlines()


def test_engines_import_nothing_heavy_and_work_without_torch() -> None:
    imported, statuses = in_new_process("torch", "tensorrt")
    assert imported == "[]"
    assert "('tensorrt', False, 'the Python package tensorrt is not installed')" in statuses
    assert "('onnxruntime', True, None)" in statuses


def test_a_machine_without_any_engine_gets_reasons_and_no_traceback() -> None:
    imported, statuses = in_new_process("torch", "tensorrt", "onnx", "onnxruntime", "polygraphy")
    assert imported == "[]"
    assert "('onnxruntime', False, 'onnxruntime cannot be imported: " in statuses
