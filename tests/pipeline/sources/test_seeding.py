"""Random numbers of the user's code are seeded; torch is not imported for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[3] / "src"
CODE = """
import sys
from twofour.pipeline.sources.seeding import seed_everything
seed_everything(2)
seed_everything(3)
assert "torch" not in sys.modules
{torch}
assert not any("seeding" in type(finder).__module__ for finder in sys.meta_path)
print(torch.{draw})
seed_everything(4)
print(torch.{draw})
"""
FAKE = """
seeds = []
def manual_seed(seed):
    seeds.append(seed)
"""


def _lines(folder: Path, torch: str, draw: str) -> list[str]:
    path = os.pathsep.join((str(folder), str(SRC)))
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(torch=torch, draw=draw)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_torch_is_seeded_where_code_imports_it_and_each_time_after(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(FAKE)
    assert _lines(tmp_path, "import torch", "seeds") == ["[3]", "[3, 4]"]


def test_an_import_of_torch_that_fails_fails_as_it_would(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('half an installation')")
    code = """
try:
    import torch
except ImportError as error:
    class torch:
        seeds = str(error)
"""
    assert _lines(tmp_path, code, "seeds") == ["half an installation"] * 2


def test_the_numbers_of_the_real_torch_are_those_of_the_seed(tmp_path: Path) -> None:
    import torch

    lines = _lines(tmp_path, "import torch", "rand(2).tolist()")
    with torch.random.fork_rng(devices=[]):
        expected = [torch.manual_seed(seed) and str(torch.rand(2).tolist()) for seed in (3, 4)]
    assert lines == expected
