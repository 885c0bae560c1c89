"""A case of the GPU benchmark: variants built, checked, timed, checked again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gpu_matrix.clocks import Call, Clock
from gpu_matrix.judge import Judge
from gpu_matrix.kernels import same
from gpu_matrix.lab import SMOKE_LIMITS, Lab, Variant
from gpu_matrix.rounds import measure
from gpu_matrix.rows import Row


class CapturingClock:
    """A clock that captures every call, unless it is told otherwise."""

    tick_ms = 0.0

    def __init__(self, refused: object = None) -> None:
        self.refused = refused
        self.captures = 0

    def launch_ms(self, call: Call) -> float:
        call()
        return 1.0

    def device_ms(self, call: Call, ahead_ms: float) -> float:
        assert 0.05 <= ahead_ms <= 100
        call()
        return 2.0

    def capture(self, call: Call) -> Call:
        self.captures += 1
        if call is self.refused:
            raise RuntimeError("operation not permitted when stream is capturing")
        return call

    def settle(self) -> None:
        """Nothing is queued."""


def lab_of(clock: Clock, sent: list[Any] | None = None, **options: Any) -> Lab:
    return Lab(clock, "cpu", True, 0, (sent if sent is not None else []).append, **options)


def variant_of(run: Call) -> Callable[[], Variant]:
    return lambda: Variant(run, same)


def measured(lab: Lab, **extra: Callable[[], Variant]) -> tuple[Row, dict[str, Row]]:
    right = torch.arange(12.0).reshape(3, 4)
    builders = {"dense": variant_of(right.clone), "dense again": variant_of(right.clone)}
    result = measure(builders | extra, Judge(right, False), lab, SMOKE_LIMITS)
    return result, {row["variant"]: row for row in result["variants"]}


def test_a_wrong_output_is_marked_and_not_timed() -> None:
    def off() -> torch.Tensor:
        return torch.arange(12.0).reshape(3, 4) * 1.1

    def missing() -> torch.Tensor:
        return torch.full((3, 4), float("nan"))

    lab = lab_of(CapturingClock())
    _, rows = measured(lab, off=variant_of(off), missing=variant_of(missing))
    assert rows["off"] == {
        "variant": "off",
        "max_error": pytest.approx(0.1),
        "verdict": "wrong",
    }
    assert rows["missing"] == {"variant": "missing", "max_error": None, "verdict": "wrong"}


def test_an_output_that_turns_wrong_while_timed_loses_its_verdict() -> None:
    calls = iter(range(1000))

    def decaying() -> torch.Tensor:
        return torch.arange(12.0).reshape(3, 4) + (1.0 if next(calls) > 20 else 0.0)

    _, rows = measured(lab_of(CapturingClock()), late=variant_of(decaying))
    assert rows["late"]["verdict"] == "wrong"
    assert rows["late"]["max_error_after"] == pytest.approx(1 / 11, rel=1e-3)
    assert "verdict" not in rows["late"]["device"]


def test_a_variant_that_fails_is_a_row_and_the_others_are_measured() -> None:
    def refuse() -> Variant:
        raise RuntimeError("Supported only on GPUs with compute capability 8.x\nsecond line")

    result, rows = measured(lab_of(CapturingClock()), cutlass=refuse)
    reason = "RuntimeError: Supported only on GPUs with compute capability 8.x"
    assert rows["cutlass"] == {"variant": "cutlass", "error": reason}
    assert rows["dense"]["launch"]["median_ms"] == 1
    assert rows["dense"]["device"]["median_ms"] == 2
    assert result["device_calls"] == "graph"


def test_a_variant_that_fails_while_timed_keeps_the_others_comparable() -> None:
    calls = iter(range(1000))

    def tiring() -> torch.Tensor:
        if next(calls) >= 7:  # one to check, two to warm up, four rounds
            raise RuntimeError("out of something")
        return torch.arange(12.0).reshape(3, 4)

    _, rows = measured(lab_of(CapturingClock()), tiring=variant_of(tiring))
    assert rows["tiring"]["error"] == "launch, round 4: RuntimeError: out of something"
    assert "launch" not in rows["tiring"]
    assert rows["dense again"]["launch"]["ratio"] == 1
    assert rows["dense again"]["device"]["ratio"] == 1


def test_one_call_that_cannot_be_captured_leaves_all_uncaptured_and_is_not_tried_again() -> None:
    sent: list[Any] = []
    run = torch.arange(12.0).reshape(3, 4).clone
    clock = CapturingClock(refused=run)
    lab = lab_of(clock, sent)
    reason = "RuntimeError: operation not permitted when stream is capturing"
    for _ in range(2):
        result, rows = measured(lab, odd=variant_of(run))
        assert result["device_calls"] == f"direct, odd cannot be captured: {reason}"
        assert rows["odd"]["device"]["ratio"] == 1
    assert sent.count(("uncapturable", "odd", reason)) == 1
    assert clock.captures == 5  # dense twice and the odd one, then dense twice


def test_a_banned_variant_is_not_built() -> None:
    lab = lab_of(CapturingClock(), banned=frozenset({"bad"}))
    _, rows = measured(lab, bad=partial(pytest.fail, "was built"))
    assert rows["bad"]["error"].startswith("not tried")
