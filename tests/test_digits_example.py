"""The demo model does what its docstring promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import digits

ROOT = Path(__file__).parents[1]
Predict = Callable[..., tuple[np.ndarray[Any, Any], ...]]


@pytest.fixture(scope="module")
def made() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return digits.make()


def _predict(module: nn.Module) -> Predict:
    def predict(images: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
        with torch.no_grad():
            return (module(torch.from_numpy(images)).numpy(),)

    return predict


@pytest.mark.full
def test_the_dense_model_reads_97_percent_of_unseen_digits(
    made: tuple[nn.Module, tuple[torch.Tensor, ...]],
) -> None:
    assert digits.evaluate(_predict(made[0]))["accuracy"] >= 0.97


def test_calibration_shows_the_training_digits_which_are_never_those_held_out() -> None:
    train_x, _, test_x, _ = digits.split()
    again = digits.split()
    assert (len(train_x), len(test_x)) == (1347, 450)
    assert np.array_equal(test_x, again[2])
    seen = {image.tobytes() for image in train_x}
    assert sum(image.tobytes() in seen for image in test_x) == 0
    shown = np.concatenate(list(digits.calibration()))
    assert np.array_equal(shown, train_x)
    assert shown.dtype == np.float32


def test_the_metric_is_the_share_of_digits_read_correctly() -> None:
    _, _, images, labels = digits.split()

    def oracle(given: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
        assert given.shape == images.shape
        logits = np.eye(10)[labels]
        logits[:45] = 0  # a tenth of the answers withheld: they count as digit 0
        return (logits,)

    right = 405 + int((labels[:45] == 0).sum())
    assert digits.evaluate(oracle) == {"accuracy": right / 450}


@pytest.mark.full
def test_the_readme_shows_lines_that_the_demo_prints(tmp_path: Path) -> None:
    named = "examples/digits.py:"
    options = ("--calibrate", f"{named}calibration", "--metric", f"{named}evaluate")
    command = ["prune-export-build", f"{named}make", *options, "--out", str(tmp_path / "digits")]
    done = subprocess.run(
        [sys.executable, "-m", "twofour", *command],
        cwd=ROOT, env={**os.environ, "COLUMNS": "120"}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    printed = {_without_accuracy(line.rstrip()) for line in done.stdout.splitlines()}
    _, _, behind = (ROOT / "README.md").read_text().partition("`make demo` ends in")
    shown = behind.split("```")[1].strip().splitlines()
    assert [line for line in shown if _without_accuracy(line) not in {*printed, "…"}] == []


def _without_accuracy(line: str) -> str:
    """On another processor an image more or less may be read correctly."""
    return re.sub(r"Accuracy: .* points\)", "Accuracy", line)
