"""The wheel that is published runs alone, with all files that it reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support import onnx_models as om

ROOT = Path(__file__).parents[1]
LOG = ROOT / "tests" / "data" / "logs" / "named_sparse.log"


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


def test_an_installed_wheel_reads_logs_and_forecasts(wheel: Path, tmp_path: Path) -> None:
    """In an environment with nothing but the wheel, and the packages of this one behind it."""
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    install = [sys.executable, "-m", "pip", f"--python={env}", "install", "--no-deps", "--no-index"]
    subprocess.run([*install, "--quiet", "--no-compile", str(wheel)], check=True)
    (site,) = env.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    om.one_layer(tmp_path / "m.onnx", "Gemm", np.eye(512, dtype=np.float16), ((8, 512), (8, 512)))
    found = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def said(*command: str) -> str:
        started = [str(env / "bin" / command[0]), *command[1:]]
        done = subprocess.run(
            started, cwd=tmp_path, env=found, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = said("python", "-c", "import twofour.reports as r; print(r.__file__)")
    assert Path(where).is_relative_to(env)
    assert "prune-export-build" in said("twofour", "--help")
    assert "sparsity was off" in said("twofour", "log", str(LOG))
    assert "<html" in said("twofour", "forecast", "m.onnx", "--gpu", "A100", "--format", "html")
