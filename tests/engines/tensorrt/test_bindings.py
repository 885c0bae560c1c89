"""Runs the tests against real TensorRT bindings, each version in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.real_bindings import run_inner

HERE = Path(__file__).parent
ALL = (HERE / "inner_build.py", HERE / "inner_timed.py")


@pytest.mark.parametrize("major", ["trt10", pytest.param("trt11", marks=pytest.mark.full)])
def test_the_engine_holds_against_the_real_bindings(major: str) -> None:
    assert run_inner(major, *ALL, HERE / "inner_typed.py") >= 40


@pytest.mark.full
def test_the_engine_holds_against_the_real_bindings_of_86() -> None:
    assert run_inner("trt8", *ALL, HERE / "inner_86.py") >= 40
