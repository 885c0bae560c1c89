"""Random numbers of the user's code are seeded; torch is imported for code that names it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

SRC = Path(__file__).parents[2] / "src"
CODE = """
import sys
from twofour.sources.user_code import call, import_attribute, parse_reference
for name, expected in (("plain.py:draw", False), ("drawn.py:draw", True)):
    reference = parse_reference(name)
    target = import_attribute(reference)
    assert ("torch" in sys.modules) is expected
    print(call(reference, target, 3, hint=""))
"""


def test_torch_is_imported_and_seeded_for_code_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("def draw():\n    return 1\n")
    (tmp_path / "drawn.py").write_text(
        "def draw():\n    import torch\n    return torch.rand(2).tolist()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        assert done.stdout.splitlines() == ["1", str(torch.rand(2).tolist())]
