from __future__ import annotations

from dataclasses import replace

import pytest
from support.sampled_variants import DENSE, SPARSE, TWIN, around, compared, two, variant

from twofour.errors import BadInputError
from twofour.latency.fail_if import check_fail_if, parse_gate
from twofour.records.latency import ComparedVariant, LatencyComparison

ON_GPU = ["sparse@tensorrt:gpu", "dense@tensorrt:gpu"]
NO_KERNEL = variant(SPARSE, error="no kernel")
SLOWER, FASTER = "sparse / dense > 1.0", "sparse / dense < 1.0"


def fails(comparison: LatencyComparison, *expressions: str) -> bool:
    return bool(check_fail_if(comparison, expressions).failed)


@pytest.mark.parametrize(
    ("ratio", "expression", "failing"),
    [
        (1.05, "sparse / dense > 1.0", True),
        (1.0, "sparse / dense > 0.9", True),
        (0.89, "sparse / dense > 0.9", False),
        (0.91, "sparse / dense >= 0.9", True),
        (0.95, "dense / sparse < 1.1", True),
        (0.85, "dense / sparse < 1.1", False),
        (0.85, "sparse / dense <= 0.9", True),
    ],
)
def test_a_ratio_fails_beyond_its_limit(ratio: float, expression: str, failing: bool) -> None:
    assert fails(two(ratio), expression) is failing


@pytest.mark.parametrize("ratio", [0.9, 0.975, 0.985, 1.0, 1.015, 1.025, 1.1])
def test_at_a_limit_of_one_a_gate_says_what_the_verdict_says(ratio: float) -> None:
    comparison = two(ratio, twin=1.02)
    (found,) = comparison.ratios
    assert fails(comparison, SLOWER) is (found.verdict.value == "slower")
    assert fails(comparison, FASTER) is (found.verdict.value == "faster")


def test_without_an_interval_nothing_is_judged() -> None:
    few = compared([variant(DENSE, (10.0,) * 3), variant(SPARSE, (10.1,) * 3)])
    outcome = check_fail_if(few, [SLOWER])
    assert outcome.failed == ()
    (line,) = outcome.not_judged
    assert f"{SPARSE} / {DENSE} is 1.010" in line


def test_a_failing_line_has_ratio_interval_and_noise() -> None:
    (line,) = check_fail_if(two(1.1, part=0, twin=1.02), [SLOWER]).failed
    figures = "1.100 (1.100 to 1.100), noise 2.0 %"
    assert line == f"{SLOWER}: {SPARSE} / {DENSE} is {figures}"


def in_torch(ratio: float, *, twin: float | None) -> LatencyComparison:
    """Two engines; ONNX Runtime without noise, torch with what its own twin differs by, if any."""
    again = () if twin is None else (variant("dense@torch:eager again", around(5 * twin, part=0)),)
    rows = [
        *two(1.0, part=0).variants,
        variant("dense@torch:eager", around(5, part=0)),
        variant("sparse@torch:eager", around(5 * ratio, part=0)),
    ]
    return compared([*rows, *again])


def test_a_ratio_within_an_engine_is_held_to_the_noise_of_that_engine() -> None:
    (line,) = check_fail_if(in_torch(1.1, twin=1.05), [SLOWER]).failed
    assert line.endswith("1.100), noise 5.0 %")
    assert not fails(in_torch(1.1, twin=1.2), SLOWER)
    (line,) = check_fail_if(in_torch(1.1, twin=None), [SLOWER]).failed
    assert line.endswith(f"noise of {DENSE} 0.0 %")


def test_labels_stand_for_every_engine_and_batch_that_has_both() -> None:
    rows = [
        variant(f"{weights}@{engine}:b{batch}", around(ms), batch=batch)
        for engine, sparse_ms in (("onnxruntime:cpu", 12.0), ("torch:eager", 9.0))
        for batch in (1, 8)
        for weights, ms in (("dense", 10.0), ("sparse", sparse_ms * batch))
    ]
    lines = check_fail_if(compared(rows), [SLOWER]).failed
    assert [line.split(": ", 1)[1].split(" is ")[0] for line in lines] == [
        "sparse@onnxruntime:cpu:b1 / dense@onnxruntime:cpu:b1",
        "sparse@onnxruntime:cpu:b8 / dense@onnxruntime:cpu:b8",
        "sparse@torch:eager:b8 / dense@torch:eager:b8",
    ]


@pytest.mark.parametrize(
    ("expression", "failing"),
    [
        ("sparse@torch:eager / dense@onnxruntime:cpu > 1.5", True),
        ("dense@torch:eager / sparse@onnxruntime:cpu > 1.9", True),
        ("dense@onnxruntime:cpu again / dense@onnxruntime:cpu > 1.1", False),
    ],
)
def test_names_mean_any_two_variants(expression: str, failing: bool) -> None:
    rows = [
        variant(DENSE, around(10)),
        variant(TWIN, around(10)),
        variant(SPARSE, around(10)),
        variant("dense@torch:eager", around(20)),
        variant("sparse@torch:eager", around(18)),
    ]
    assert fails(compared(rows), expression) is failing


@pytest.mark.parametrize(
    "expression", ["sparse / thin > 1", "dense / dense > 1", "noise / dense > 1"]
)
def test_what_names_nothing_is_refused_with_what_there_is(expression: str) -> None:
    with pytest.raises(BadInputError, match="names no two variants") as raised:
        check_fail_if(two(1.0), [expression])
    assert raised.value.hint == f"known are dense, sparse, {DENSE}, {TWIN}, {SPARSE}"


@pytest.mark.parametrize(
    "expression",
    [
        "sparse / dense = 1",
        "sparse > 1",
        "sparse / dense > one",
        "sparse / dense > 0",
        "sparse/dense > 1",
        "sparse / dense>1",
    ],
)
def test_what_is_no_condition_is_refused(expression: str) -> None:
    with pytest.raises(BadInputError, match="--fail-if") as raised:
        parse_gate(expression)
    assert raised.value.hint == f'write it like "{SLOWER}"'


@pytest.mark.parametrize(
    ("rows", "missing"),
    [
        pytest.param([variant(DENSE, around(10)), NO_KERNEL], [SPARSE], id="one side"),
        pytest.param(
            [*(variant(f"{DENSE}:b{b}", around(10), batch=b) for b in (1, 8)), NO_KERNEL],
            [SPARSE],
            id="every batch",
        ),
        pytest.param(
            [variant(DENSE, around(10)), variant(SPARSE, around(5)[:12], error="it crashed")],
            [SPARSE],
            id="on the way",
        ),
        pytest.param(
            [*two(0.8).variants, *(variant(name, error="it crashed") for name in ON_GPU)],
            ON_GPU,
            id="another engine",
        ),
    ],
)
def test_a_gate_on_what_was_not_measured_fails_and_names_it(
    rows: list[ComparedVariant], missing: list[str]
) -> None:
    (line,) = check_fail_if(compared(rows), [SLOWER]).failed
    assert line.startswith(f"{SLOWER}: not measured: ")
    assert [part.rpartition(": ")[0] for part in line.split(": ", 2)[2].split("; ")] == missing


def test_a_gate_leaves_out_what_cannot_run_here_and_says_so() -> None:
    absent = (variant(name, error="no GPU") for name in ON_GPU)
    rows = [*two(0.8).variants, *(replace(row, can_run=False) for row in absent)]
    outcome = check_fail_if(compared(rows), [SLOWER])
    assert (outcome.failed, outcome.not_judged) == ((), ())
    (line,) = outcome.left_out
    assert line.endswith(" / ".join(ON_GPU))
    named = check_fail_if(compared(rows), [f"{' / '.join(ON_GPU)} > 1.0"])
    assert f"{ON_GPU[0]}: no GPU" in named.failed[0]


def test_names_that_a_terminal_would_obey_are_escaped() -> None:
    rows = [variant(f"{label}@e:m", around(ms)) for label, ms in (("a", 10), ("b\x1b[31m", 20))]
    (line,) = check_fail_if(compared(rows, baseline="a@e:m"), ["b\x1b[31m / a > 1"]).failed
    assert "\x1b" not in line
    assert r"b\x1b[31m@e:m / a@e:m is 2.000" in line
