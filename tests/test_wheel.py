"""The wheel that is published runs alone, with all files that it reads."""

from __future__ import annotations

import contextlib
import email
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from packaging.requirements import Requirement
from safetensors.numpy import save_file
from support import onnx_models as om

ROOT = Path(__file__).parents[1]
LOG = ROOT / "tests" / "data" / "logs" / "named_sparse.log"
MODULE = """
import torch


def make():
    return torch.nn.Linear(64, 64).eval(), (torch.randn(8, 64),)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what a source package contains, without network."""
    copy = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "src" / "twofour", copy / "src" / "twofour")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True)
    (made,) = (copy / "dist").glob("*.whl")
    return made


def test_the_wheel_has_every_file_of_the_package_and_says_what_it_is(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel)
    package = ROOT / "src" / "twofour"
    there = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    info = f"{wheel.name.split('-py3')[0]}.dist-info"
    assert {name for name in files.namelist() if not name.startswith(info)} == there
    about = files.read(f"{info}/METADATA").decode()
    assert "Programming Language :: Python :: 3.13" in about
    assert f"{info}/licenses/LICENSE" in files.namelist()


def _variables() -> dict[str, str]:
    """Without the source folder, which a test run may have on its path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel and the packages that it requires, none of an extra."""

    env: Path

    def run(self, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
        """One of its programs in this folder."""
        return subprocess.run(
            [str(self.env / "bin" / command[0]), *command[1:]],
            cwd=folder,
            env=_variables(),
            capture_output=True,
            text=True,
            check=False,
        )

    def output(self, folder: Path, *command: str) -> str:
        """What a program that ends well writes."""
        done = self.run(folder, *command)
        assert done.returncode == 0, done.stderr
        return done.stdout


def _required(requirements: Iterable[str]) -> set[str]:
    """Names of distributions that are here, of these requirements and of theirs."""
    names: set[str] = set()
    left = [Requirement(text) for text in requirements]
    while left:
        wanted = left.pop()
        applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if not applies or wanted.name in names:
            continue
        names.add(wanted.name)
        with contextlib.suppress(metadata.PackageNotFoundError):  # CUDA's, where torch has none
            left += [Requirement(text) for text in metadata.requires(wanted.name) or ()]
    return names


def _link(name: str, site: Path) -> None:
    """Make one distribution of this environment importable in another one."""
    files = metadata.distribution(name).files or ()
    for part in {file.parts[0] for file in files} - {"..", "__pycache__"}:
        link = site / part
        if not link.exists():
            link.symlink_to(Path(sysconfig.get_path("purelib"), part))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Without network: what the wheel requires is linked from this environment."""
    env = tmp_path_factory.mktemp("installed") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    install = [sys.executable, "-m", "pip", f"--python={env}", "install", "--no-deps", "--no-index"]
    subprocess.run([*install, "--quiet", "--no-compile", str(wheel)], check=True, env=_variables())
    (site,) = env.glob("lib/python*/site-packages")
    about = zipfile.ZipFile(wheel).read(f"{wheel.name.split('-py3')[0]}.dist-info/METADATA")
    requirements = email.message_from_bytes(about).get_all("Requires-Dist", [])
    for name in _required(requirements):
        with contextlib.suppress(metadata.PackageNotFoundError):
            _link(name, site)
    return Installed(env)


def test_an_installed_wheel_reads_logs_and_forecasts(installed: Installed, tmp_path: Path) -> None:
    om.one_layer(tmp_path / "m.onnx", "Gemm", np.eye(512, dtype=np.float16), ((8, 512), (8, 512)))
    where = installed.output(
        tmp_path, "python", "-c", "import twofour.reports as r; print(r.__file__)"
    )
    assert Path(where).is_relative_to(installed.env)
    assert "prune-export-build" in installed.output(tmp_path, "twofour", "--help")
    assert "sparsity was off" in installed.output(tmp_path, "twofour", "log", str(LOG))
    forecast = ("forecast", "m.onnx", "--gpu", "A100", "--format", "html")
    assert "<html" in installed.output(tmp_path, "twofour", *forecast)


def test_an_installed_wheel_without_extras_does_the_main_job(
    installed: Installed, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(MODULE)
    installed.output(tmp_path, "twofour", "prune-export-build", "model.py:make", "--out", "run")
    graph = onnx.load(tmp_path / "run" / "sparse.onnx").graph
    (weight,) = (w for w in map(numpy_helper.to_array, graph.initializer) if w.size == 64 * 64)
    assert np.count_nonzero(weight) == weight.size // 2
    assert "<html" in (tmp_path / "run" / "report.html").read_text()


def test_a_checkpoint_without_transformers_ends_in_3_with_the_extra_to_install(
    installed: Installed, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    save_file({"w": np.eye(8, dtype=np.float32)}, tmp_path / "model.safetensors")
    done = installed.run(tmp_path, "twofour", "prune-export-build", str(tmp_path))
    assert done.returncode == 3, done.stderr
    assert "twofour[hf]" in done.stderr
