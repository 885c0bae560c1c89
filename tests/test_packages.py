"""One list of packages, `twofour.packages`; a missing one is named with what installs it.

ONNX in, ONNX out: nothing of that chain needs torch, so that a TensorRT box can do it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from packaging.version import Version
from support import onnx_models as om

from twofour.engines.protocol import ENGINES
from twofour.packages import PACKAGES, how_to_install

_ROOT = Path(__file__).parent.parent
_MISSING = "raise ModuleNotFoundError('No module named {name}', name='{name}')\n"
_RUN = """
import sys
from pathlib import Path
from twofour.cli import main
said = []
for command in {commands!r}:
    sys.argv = ["twofour", *command]
    try:
        main()
    except SystemExit as end:
        said.append(str(end.code))
for name in {watched!r}:
    said.append(str(name in sys.modules))
Path("said").write_text(" ".join(said))
"""
_TORCH = ["torch", "onnxscript", "onnx_ir", "transformers", "safetensors"]
_MODULES = {package.module or package.name: package for package in PACKAGES}
_EVERYWHERE = (
    *("numpy", "onnx", "array_api_compat", "threadpoolctl"),
    *("psutil", "pydantic", "jinja2", "typer", "rich"),
)
_SITE = ("setuptools", "furo", "myst-parser", "sphinx")
_BOUND = re.compile(r'"([\w-]+)>=([\d.]+)')
_PIN = re.compile(r"^([\w-]+)==([\d.]+)$", re.MULTILINE)
_TOOLS = ("codespell", "import-linter", "mypy", "ruff", "setuptools", "types-psutil", *_SITE)
_TENSORRT_MACHINE = (*_EVERYWHERE, "tensorrt", "polygraphy", "pynvml")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One Conv of 8 to 16 channels."""
    ends = ("batch", 8, 6, 6), ("batch", 16, 4, 4)
    path = tmp_path_factory.mktemp("model") / "conv.onnx"
    return om.one_layer(path, "Conv", om.weights(16, 8, 3, 3), ends)


def _run(
    folder: Path, blocked: list[str], *commands: list[str], watched: tuple[str, ...] = ()
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The commands in one fresh process where, as in its workers, packages are missing.

    Gives their exit codes too, then whether each of the watched modules was imported.
    """
    blockers = folder / "blockers"
    blockers.mkdir(parents=True)
    for name in blocked:
        (blockers / f"{name}.py").write_text(_MISSING.format(name=name))
    done = subprocess.run(
        [sys.executable, "-c", _RUN.format(commands=list(commands), watched=watched)],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(blockers), *sys.path])},
    )
    said = (folder / "said").read_text().split()
    assert len(said) == len(commands) + len(watched)
    return done, said


@pytest.mark.parametrize("module", _EVERYWHERE)
def test_a_command_works_without_a_package_or_ends_in_3_with_what_to_install(
    module: str, model: Path, tmp_path: Path
) -> None:
    commands = ["prune", str(model), "--out", "run"], ["report", "--onnx", str(model)]
    done, codes = _run(tmp_path, [module], *commands)
    assert set(codes) <= {"0", "3"}, done.stderr
    assert "Traceback" not in done.stderr
    for _ in range(codes.count("3")):
        assert f"the Python package {module}, which is not installed" in done.stderr
        assert _MODULES[module].install in done.stderr


def test_with_the_packages_of_a_tensorrt_machine_alone_a_missing_engine_is_named(
    model: Path, tmp_path: Path
) -> None:
    others = [module for module in _MODULES if module not in _TENSORRT_MACHINE]
    done, codes = _run(
        tmp_path,
        [*others, "tensorrt"],
        ["doctor"],
        ["prune", str(model), "--out", "run"],
        ["report", "--onnx", str(model)],
        ["build", str(model), "--out", "built"],
    )
    assert codes == ["0", "0", "0", "3"], done.stderr
    assert "Traceback" not in done.stderr
    assert "tensorrt cannot run here: the Python package tensorrt is not installed" in done.stderr
    assert "onnxruntime cannot run here: " in done.stderr


def test_an_onnx_file_is_pruned_with_data_and_goes_through_the_whole_chain_without_torch(
    model: Path, tmp_path: Path
) -> None:
    x = np.random.default_rng(0).normal(0.5, size=(24, 8, 6, 6)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    chain = ["prune-export-build", str(model), "--out", "r"]
    data = ["--calibrate", "x.npz", "--method", "admm", "--out", "p"]
    commands = chain, [*chain, "--precision", "float32"], ["prune", str(model), *data]
    done, codes = _run(tmp_path, _TORCH, *commands)
    assert codes == ["3", "0", "0"], done.stderr  # float16 takes onnx_ir
    assert "pip install onnx-ir" in done.stderr
    graph = onnx.load(tmp_path / "r" / "sparse.onnx").graph
    (weight,) = (numpy_helper.to_array(t) for t in graph.initializer if t.name == "w")
    assert float(np.mean(weight == 0)) == 0.5
    record = json.loads((tmp_path / "p" / "prune.json").read_text())
    (row,) = record["weights"]
    assert (row["method"], row["pruned"]) == ("admm", True)
    assert 0 < row["output_error"]["calibration"] < 0.15
    assert record["calibration"]["samples"] == 24
    assert not (tmp_path / "p" / "stages" / "calibration").exists()


def test_commands_that_need_torch_say_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import torch\n\ndef make(): return torch.nn.Linear(8, 8)\n")
    (tmp_path / "weights.pt").write_bytes(b"PK")
    done, codes = _run(
        tmp_path,
        _TORCH,
        ["prune", "model.py:make"],
        ["export", "model.py:make"],
        ["prune-export-build", "timm:resnet18"],
        ["validate", "weights.pt"],
    )
    assert codes == ["3"] * 4, done.stderr
    assert done.stderr.count("the Python package torch") == 4
    assert done.stderr.count("pip install torch") == 4


def test_no_command_imports_scipy_and_reading_a_log_imports_no_onnx(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "build.log").write_text("[I] TensorRT version: 10.0.1\n")
    _, log = _run(tmp_path / "log", [], ["log", "../build.log"], watched=("scipy", "torch", "onnx"))
    others = ["--help"], ["doctor"], ["report", "--onnx", str(model)], ["validate", str(model)]
    done, said = _run(tmp_path / "others", [], *others, watched=("scipy", "torch"))
    assert log == ["0", *["False"] * 3]
    assert said == ["0", "0", "0", "4", "False", "False"], done.stderr


def test_pyproject_names_the_packages_of_the_list() -> None:
    text = (_ROOT / "pyproject.toml").read_text()
    named = {
        title: set(re.findall(r'"([\w-]+)\b[^"]*"', lines))
        for title, lines in re.findall(r"^([\w-]+) = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    }
    listed: dict[str, set[str]] = {}
    for package in PACKAGES:
        listed.setdefault(package.extra or "dependencies", set()).add(package.name)
    assert {title: named[title] for title in listed} == listed
    assert len(listed["dependencies"] - {"onnxruntime-gpu"}) <= 14


def test_the_lowest_versions_that_are_tested_are_those_that_pyproject_declares() -> None:
    """TensorRT's bindings have pins of their own, and the tools that check or write are pinned."""
    text = (_ROOT / "pyproject.toml").read_text()
    bounds = {(name, Version(lowest)) for name, lowest in _BOUND.findall(text)}
    pins = (_ROOT / "constraints-lowest.txt").read_text()
    tested = {(name, Version(lowest)) for name, lowest in _PIN.findall(pins)}
    assert tested <= bounds
    not_tried = {name for name, _ in bounds - tested}
    assert not_tried == {"tensorrt", "timm", *_TOOLS}


def test_the_pages_on_installation_and_work_name_packages_of_the_list() -> None:
    known = {package.name for package in PACKAGES}
    said = " ".join((_ROOT / "CONTRIBUTING.md").read_text().split())
    (named,) = re.findall(r"needs (`tensorrt`.*), `pytest` and `PYTHONPATH", said)
    distributions = {_MODULES[module].name for module in _TENSORRT_MACHINE}
    assert set(re.findall(r"`([\w-]+)`", named)) == distributions <= known
    said = " ".join((_ROOT / "docs/install.md").read_text().split())
    (brought,) = re.findall(r"It brings (.*?) and rich\.", said)
    core = {package.name for package in PACKAGES if package.extra is None}
    assert {name for name in core if not re.search(rf"\b{name}\b", brought)} == {"rich"}


def test_engines_name_packages_of_the_list_and_their_parts() -> None:
    known = {name for package in PACKAGES for name in (package.name, *package.parts)}
    assert {name for row in ENGINES.values() for name in row.packages} <= known
    assert ENGINES["torch"].packages == ("torch", "triton")


def test_what_installs_a_module_that_has_another_name_on_pypi() -> None:
    assert how_to_install("PIL") == "pip install 'twofour[images]'"
    assert how_to_install("pynvml") == "pip install 'twofour[tensorrt]'"
    assert how_to_install("some_package") == "pip install some-package"
