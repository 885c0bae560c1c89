"""Runs inner_probes.py against real TensorRT bindings, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.real_bindings import run_inner


@pytest.mark.parametrize("major", [pytest.param("trt8", marks=pytest.mark.full), "trt10"])
def test_the_questions_are_asked_through_the_real_bindings(major: str) -> None:
    assert run_inner(major, Path(__file__).with_name("inner_probes.py")) == 2
