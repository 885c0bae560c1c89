"""The GitHub action and the pre-commit hook: what they run is run here, on real files."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.mlp_onnx import save_mlp

import twofour

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "ci.md"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dense file and two that hold 2:4, one but for a layer."""
    folder = tmp_path_factory.mktemp("files")
    dense = save_mlp(folder / "dense.onnx")
    for name, exclude in (("sparse", ()), ("mixed", ("middle",))):
        options = twofour.RunOptions(selection=twofour.Selection(exclude=exclude, all_layers=True))
        twofour.run(dense, out=folder / "runs" / name, options=options)
        (folder / f"{name}.onnx").symlink_to(folder / "runs" / name / "sparse.onnx")
    return folder


def _bash(script: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    search = str(ROOT / "src")
    command = ["bash", "-eo", "pipefail", "-c", script]
    own = {**os.environ, "PATH": path, "PYTHONPATH": search, **env}
    return subprocess.run(command, check=False, cwd=folder, env=own, capture_output=True, text=True)


def _action() -> dict[str, Any]:
    action: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
    return action


def _run_action(folder: Path, inputs: Mapping[str, str]) -> int:
    """The steps as GitHub runs them, but for the first, which installs this repository."""
    action = _action()
    values = {name: inputs.get(name, one.get("default")) for name, one in action["inputs"].items()}
    install, *steps = action["runs"]["steps"]
    assert install["run"] == 'python -m pip install "$GITHUB_ACTION_PATH"'
    assert (ROOT / "pyproject.toml").is_file(), "which is where the action is"
    for step in steps:
        env = {
            name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda m: str(values[m[1]]), text)
            for name, text in step["env"].items()
        }
        code = _bash(step["run"], folder, **env).returncode
        if code:
            return code
    return 0


@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        ({"paths": "sparse.onnx"}, 0),
        ({"paths": "sparse.onnx dense.onnx"}, 4),
        ({"paths": "runs/*/sparse.onnx", "options": "--exclude middle"}, 0),
        ({"paths": "none.onnx"}, 2),
        ({"paths": "sparse.onnx", "options": "--pattern 1:4"}, 4),
    ],
)
def test_the_action_ends_as_validate_does(inputs: dict[str, str], code: int, files: Path) -> None:
    assert _run_action(files, inputs) == code


@pytest.mark.parametrize(
    ("names", "args", "broken"),
    [
        (["sparse.onnx"], [], []),
        (["dense.onnx", "sparse.onnx", "mixed.onnx"], [], ["dense.onnx", "mixed.onnx"]),
        (["mixed.onnx", "sparse.onnx"], ["--exclude", "middle"], []),
    ],
)
def test_the_hook_ends_as_validate_does_and_names_every_broken_file(
    names: list[str], args: list[str], broken: list[str], files: Path
) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert all(re.search(hook["files"], name) for name in names)
    assert not re.search(hook["files"], "model.py")
    ended = _bash(shlex.join([*shlex.split(hook["entry"]), *args, *names]), files)
    assert ended.returncode == (4 if broken else 0)
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert [line.split(":")[1].strip() for line in errors] == broken


def test_the_guide_shows_both_with_names_that_they_have() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    shown = [yaml.safe_load(block) for block in blocks]
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    rows = [row for block in shown if isinstance(block, list) for row in block]
    (hooks,) = [row["hooks"] for row in rows if "hooks" in row]
    assert [one["id"] for one in hooks] == [hook["id"]]
    (step,) = [row for row in rows if "uses" in row]
    assert set(step["with"]) <= set(_action()["inputs"])
