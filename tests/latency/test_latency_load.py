"""A difference must survive other work on the machine, both halves of the rounds, and the twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import sampled_variants
from support.comparison_cases import settings
from support.sampled_variants import DENSE, SPARSE, around, compared, variant

from twofour.latency.fail_if import check_fail_if
from twofour.records.latency import (
    ComparedVariant,
    LatencyComparison,
    LatencyVerdict,
    RoundLoad,
    Withheld,
)
from twofour.reports.latency_words import answer_lines, legend


def on_two_cores(part: float, batch: int | None = None) -> RoundLoad:
    return RoundLoad(other_cores=2 * part, cores=2, batch=batch)


def two(ratio: float, part: float | None = None) -> LatencyComparison:
    """While others took a part of the cores."""
    return sampled_variants.two(ratio, loads=() if part is None else (on_two_cores(part),))


def verdict(comparison: LatencyComparison) -> tuple[LatencyVerdict, Withheld | None]:
    (ratio,) = comparison.ratios
    return ratio.verdict, ratio.withheld


@pytest.mark.parametrize("part", [None, 0.0, 0.05])
def test_what_an_idle_system_does_of_its_own_changes_nothing(part: float | None) -> None:
    assert verdict(two(0.97, part=part)) == (LatencyVerdict.FASTER, None)
    assert answer_lines(two(0.97, part=part))[0].startswith("sparse is 1.031x faster")


def test_some_load_widens_what_counts_as_noise() -> None:
    assert verdict(two(0.97, part=0.1)) == (LatencyVerdict.NO_DIFFERENCE, None)
    assert verdict(two(1.15, part=0.1)) == (LatencyVerdict.NO_DIFFERENCE, None)
    assert verdict(two(0.5, part=0.1)) == (LatencyVerdict.FASTER, None)
    first, warning = answer_lines(two(0.5, part=0.1))
    assert first.startswith("sparse is 2.00x faster")
    assert warning == (
        "WARNING: other processes kept 0.20 of 2 cores busy during the rounds: a ratio from 0.833 "
        "to 1.200 on the CPU may be noise"
    )


@pytest.mark.parametrize("ratio", [0.43, 1.0, 2.3])
def test_on_a_busy_machine_nothing_is_claimed(ratio: float) -> None:
    found = two(ratio, part=0.6)
    assert verdict(found) == (LatencyVerdict.UNDECIDED, Withheld.BUSY)
    first, warning = answer_lines(found)
    assert first.startswith(
        "the machine is too busy to compare sparse and dense in onnxruntime:cpu"
    )
    assert warning == (
        "WARNING: other processes kept 1.20 of 2 cores busy during the rounds; above 25 % nothing "
        "is compared: run again on an idle machine"
    )
    assert '"undecided": the machine was busy' in legend(found)
    assert "faster than" not in first
    assert "slower" not in first


def test_variants_on_a_gpu_are_judged_on_a_busy_machine() -> None:
    def on_gpu(made: ComparedVariant) -> ComparedVariant:
        return replace(made, settings=replace(settings(made.name), threads=None))

    variants = [on_gpu(variant(n, around(ms))) for n, ms in ((DENSE, 10), (SPARSE, 8))]
    load = on_two_cores(0.9)
    assert verdict(compared(variants, loads=(load,))) == (LatencyVerdict.FASTER, None)
    unknown = [replace(made, settings=None) for made in variants]
    withheld = (LatencyVerdict.UNDECIDED, Withheld.BUSY)
    assert verdict(compared(unknown, loads=(load,))) == withheld


def test_only_the_batch_that_was_under_load_is_not_judged() -> None:
    variants = [
        variant(f"{label}@onnxruntime:cpu:b{batch}", around(ms), batch=batch)
        for batch in (1, 8)
        for label, ms in (("dense", 10), ("sparse", 8))
    ]
    found = compared(variants, loads=(on_two_cores(0.0, 1), on_two_cores(0.5, 8)))
    assert [r.withheld for r in found.ratios] == [None, Withheld.BUSY]


def test_a_difference_that_only_one_half_of_the_rounds_has_is_no_finding() -> None:
    steps = [*around(10, rounds=10), *around(7, rounds=15)]
    (ratio,) = compared([variant(DENSE, around(10, rounds=25)), variant(SPARSE, steps)]).ratios
    assert ratio.high is not None
    assert ratio.high < 1
    assert (ratio.verdict, ratio.withheld) == (LatencyVerdict.UNDECIDED, Withheld.HALVES)


def test_a_difference_that_is_gone_with_a_twin_in_place_is_no_finding() -> None:
    variants = [
        variant(DENSE, around(10)),
        variant("dense@torch:eager", around(10)),
        variant("dense@torch:eager again", around(10)),
        variant("sparse@torch:eager", around(7)),
        variant("sparse@torch:eager again", around(10)),
    ]
    ratio = next(r for r in compared(variants).ratios if r.baseline == "dense@torch:eager")
    assert ratio.verdict is not LatencyVerdict.FASTER


def test_a_gate_on_a_busy_machine_is_not_judged_whichever_way_it_looks() -> None:
    for ratio in (0.5, 2.0):
        for gate in ("sparse / dense > 1.0", "sparse / dense < 1.0"):
            outcome = check_fail_if(two(ratio, part=0.6), [gate])
            assert outcome.failed == ()
            (line,) = outcome.not_judged
            assert line.endswith("the machine was busy")


def test_a_gate_fails_only_where_both_halves_of_the_rounds_lie_beyond_it() -> None:
    steps = [*around(10.1, rounds=10), *around(14, rounds=15)]
    found = compared([variant(DENSE, around(10, rounds=25)), variant(SPARSE, steps)])
    outcome = check_fail_if(found, ["sparse / dense > 1.1"])
    assert outcome.failed == ()
    assert "the halves of the" in outcome.not_judged[0]
    assert check_fail_if(found, ["sparse / dense > 2"]).not_judged == ()
