"""Tactics whose kernel has no name: neither dense nor sparse, unless the runner has only dense."""

from __future__ import annotations

import pytest
from support.log_lines import parse_lines

from twofour.logs.read import LogParser
from twofour.logs.tactics import Budget
from twofour.records.log import TunedLayer

RUNNER = "[TRT] [V] --------------- Timing Runner: conv1 "


def layer(runner: str, *lines: str) -> TunedLayer:
    (build,) = parse_lines([f"{RUNNER}({runner}[0x80000009])", *(f"[TRT] [V] {m}" for m in lines)])
    (found,) = build.layers
    return found


@pytest.mark.parametrize(
    ("runner", "dense_ms"),
    [
        ("CudnnConvolution", 0.008),
        ("CublasConvolution", 0.008),
        ("FusedConvActConvolution", 0.008),
        ("Shuffle", 0.008),
        ("CaskConvolution", None),
        ("CaskFullyConnected", None),
        ("Myelin", None),
        ("SomeNewRunner", None),
    ],
)
def test_only_a_runner_without_sparse_kernels_is_dense_without_a_name(
    runner: str, dense_ms: float | None
) -> None:
    found = layer(runner, "Tactic: 0x2 Time: 0.008")
    assert (found.best_sparse_ms, found.best_dense_ms) == (None, dense_ms)


def test_nameless_tactics_without_room_do_not_displace_the_best_dense_one() -> None:
    named = [f"[V] Tactic Name: k Tactic: 0x{i:x} Time: {1 + i}" for i in range(1, 500)]
    nameless = [f"[V] Tactic: 0xf{i:04x} Time: {0.001 * (1 + i)}" for i in range(500)]
    parser = LogParser("build.log", Budget(200_000))
    parser.feed([f"{RUNNER}(CaskConvolution[0x80000009])", *named, *nameless])
    (found,) = parser.finish()[0].layers
    assert found.best_dense_ms == 2.0
    assert found.dropped_tactics > 0
