from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.comparison_cases import settings
from support.sampled_variants import around, variant

from twofour.engines.timing import percentile, with_samples
from twofour.errors import BadInputError
from twofour.latency.ratios import (
    differ_in_sparsity_only,
    ratios_and_noise,
    verdict_of,
)
from twofour.records.latency import (
    ComparedVariant,
    LatencyVerdict,
    VariantName,
    parse_variant_name,
    variant_name,
    without_batch,
)

DENSE = "dense@onnxruntime:cpu"
VARIANTS = (
    variant(DENSE, around(10)),
    variant(f"{DENSE} again", around(10.1, phase=1)),
    variant("sparse@onnxruntime:cpu", around(10, phase=2)),
    variant("dense@torch:eager", around(20, phase=3)),
    variant("sparse@torch:eager", around(18, phase=4)),
    variant("sparse@torch:compile", around(5, phase=5)),
    variant("dense@torch:compile", error="no compiler"),
)


def test_every_variant_is_over_the_baseline_then_sparse_over_dense_within_other_engines() -> None:
    ratios, _ = ratios_and_noise(VARIANTS, DENSE, 0)
    assert [(r.variant, r.baseline) for r in ratios] == [
        ("sparse@onnxruntime:cpu", DENSE),
        ("dense@torch:eager", DENSE),
        ("sparse@torch:eager", DENSE),
        ("sparse@torch:compile", DENSE),
        ("sparse@torch:eager", "dense@torch:eager"),
    ]
    assert [r.ratio for r in ratios] == pytest.approx([1, 2, 1.8, 0.5, 0.9], rel=0.01)
    assert {r.rounds for r in ratios} == {20}
    assert [r.only_sparsity for r in ratios] == [True, False, False, False, True]


def test_the_noise_is_how_far_the_twin_s_interval_reaches() -> None:
    _, (noise,) = ratios_and_noise(VARIANTS, DENSE, 0)
    assert (noise.variant, noise.again, noise.batch) == (DENSE, f"{DENSE} again", None)
    assert noise.ratio == pytest.approx(1.01, abs=0.001)
    assert noise.high is not None
    assert noise.floor == noise.high - 1
    assert 0.01 < noise.floor < 0.012


def test_with_too_few_rounds_the_noise_reaches_as_far_as_the_widest_round() -> None:
    base, twin = variant(DENSE, (10.0, 10.0, 10.0)), variant(f"{DENSE} again", (10.0, 8.0, 11.0))
    _, (noise,) = ratios_and_noise([base, twin], DENSE, 0)
    assert noise.low is None
    assert noise.floor == pytest.approx(0.25)


def test_every_twin_gives_the_noise_of_its_engine_the_baseline_s_first() -> None:
    variants = [
        variant(f"{name}:b{batch}", around(ms, part=0), batch=batch)
        for batch in (1, 8)
        for name, ms in (
            ("dense@torch:eager again", 22.0),
            ("dense@torch:eager", 20.0),
            ("sparse@torch:eager", 21.0),
            (DENSE, 10.0),
            (f"{DENSE} again", 10.1),
        )
    ]
    ratios, noise = ratios_and_noise(variants, DENSE, 0)
    assert [(n.variant, n.again) for n in noise] == [
        (f"{name}:b{batch}", f"{name} again:b{batch}")
        for name in (DENSE, "dense@torch:eager")
        for batch in (1, 8)
    ]
    assert [n.floor for n in noise] == pytest.approx([0.01, 0.01, 0.1, 0.1])
    assert not any("again" in name for r in ratios for name in (r.variant, r.baseline))
    assert [r.batch for r in ratios] == [1, 1, 8, 8, 1, 8]
    assert all(f"{r.variant}/{r.baseline}".count(f":b{r.batch}") == 2 for r in ratios)


def test_a_ratio_is_held_to_the_larger_noise_of_its_two_engines() -> None:
    """Torch's own twin differs by 15 %, the baseline's by 1 %."""
    variants = [
        variant(DENSE, around(10, part=0)),
        variant(f"{DENSE} again", around(10.1, part=0)),
        variant("sparse@onnxruntime:cpu", around(9, part=0)),
        variant("dense@torch:eager", around(10, part=0)),
        variant("sparse@torch:eager", around(9, part=0)),
        variant("dense@torch:eager again", around(11.5, part=0)),
        variant("dense@torch:compile", around(10, part=0)),
        variant("sparse@torch:compile", around(9, part=0)),
    ]
    ratios, _ = ratios_and_noise(variants, DENSE, 0)
    same, faster = LatencyVerdict.NO_DIFFERENCE, LatencyVerdict.FASTER
    assert {(r.variant, r.baseline): r.verdict for r in ratios} == {
        ("sparse@onnxruntime:cpu", DENSE): faster,
        ("dense@torch:eager", DENSE): same,
        ("sparse@torch:eager", DENSE): same,
        ("dense@torch:compile", DENSE): same,
        ("sparse@torch:compile", DENSE): faster,
        ("sparse@torch:eager", "dense@torch:eager"): same,
        ("sparse@torch:compile", "dense@torch:compile"): faster,
    }


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (None, None, LatencyVerdict.UNDECIDED),
        (1.05, 1.2, LatencyVerdict.NO_DIFFERENCE),
        (1.06, 1.2, LatencyVerdict.SLOWER),
        (0.5, 1 / 1.05, LatencyVerdict.NO_DIFFERENCE),
        (0.5, 0.95, LatencyVerdict.FASTER),
        (0.5, 2.0, LatencyVerdict.NO_DIFFERENCE),
    ],
)
def test_an_interval_that_touches_the_noise_is_no_difference(
    low: float | None, high: float | None, verdict: LatencyVerdict
) -> None:
    assert verdict_of(low, high, 0.05) is verdict


def test_files_are_compared_with_the_baseline_s_file_in_every_engine() -> None:
    variants = [
        variant(f"{label}@{engine}", around(1))
        for engine in ("onnxruntime:cpu", "torch:eager")
        for label in ("a", "b@x:y", "c/d")
    ]
    ratios, _ = ratios_and_noise(variants, "b@x:y@onnxruntime:cpu", 0)
    assert [(r.variant, r.baseline) for r in ratios[5:]] == [
        ("a@torch:eager", "b@x:y@torch:eager"),
        ("c/d@torch:eager", "b@x:y@torch:eager"),
    ]


def test_a_mode_that_only_names_the_kernels_is_sparsity() -> None:
    on = replace(settings("sparse@tensorrt:gpu"), sparse_kernels=True)
    off = replace(settings("sparse@tensorrt:gpu-sparsity-off"), sparse_kernels=False)
    assert differ_in_sparsity_only(on, off)
    assert not differ_in_sparsity_only(on, replace(off, precision="float16"))
    assert not differ_in_sparsity_only(on, replace(off, sparse_kernels=None))
    assert not differ_in_sparsity_only(replace(off, mode="gpu"), off)
    assert not differ_in_sparsity_only(on, replace(off, timing="mean of enqueues"))
    assert differ_in_sparsity_only(on, replace(off, launches=7, enqueue_ms=0.2))
    assert not differ_in_sparsity_only(None, off)
    assert not differ_in_sparsity_only(off, None)


def test_what_the_kernels_alone_gain_stands_beside_what_the_dense_weights_lose() -> None:
    names = ("dense@tensorrt:gpu", "sparse@tensorrt:gpu", "sparse@tensorrt:gpu-sparsity-off")
    rows = []
    for name, ms in zip(names, (2.0, 1.0, 1.6), strict=True):
        made = replace(settings(name), sparse_kernels=name == "sparse@tensorrt:gpu")
        rows.append(replace(variant(name, [ms] * 12), settings=made))
    ratios, _ = ratios_and_noise(rows, "dense@tensorrt:gpu", 0)
    assert [(r.variant, r.baseline, round(r.ratio, 3)) for r in ratios] == [
        ("sparse@tensorrt:gpu", "dense@tensorrt:gpu", 0.5),
        ("sparse@tensorrt:gpu-sparsity-off", "dense@tensorrt:gpu", 0.8),
        ("sparse@tensorrt:gpu", "sparse@tensorrt:gpu-sparsity-off", 0.625),
    ]
    assert ratios[2].only_sparsity


WORDS = st.from_regex(r"[a-z0-9][a-z0-9_.+-]{0,12}", fullmatch=True)
LABELS = st.one_of(
    st.text(max_size=20),
    st.text(alphabet="@:/ b8again", max_size=20),
    st.sampled_from(["a@b:c", "a@b:c again", "a@b:c again:b8", "größe 2:4/x", "", "x\ny@z:w"]),
)


@given(LABELS, WORDS, WORDS, st.booleans(), st.none() | st.integers(1, 10**6))
def test_every_name_can_be_read_back(
    weights: str, engine: str, mode: str, again: bool, batch: int | None
) -> None:
    name = variant_name(weights, engine, mode, again=again, batch=batch)
    assert parse_variant_name(name) == VariantName(
        weights=weights, engine_mode=f"{engine}:{mode}", again=again
    )
    assert without_batch(name) == variant_name(weights, engine, mode, again=again)


@pytest.mark.parametrize("name", ["", "dense", "dense@cpu", "onnxruntime:cpu", "a@b:c:d", "a@:c"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(BadInputError, match="not the name"):
        parse_variant_name(name)


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=50), st.floats(1, 100))
def test_a_percentile_is_the_smallest_sample_that_covers_that_share(
    samples: list[float], percent: float
) -> None:
    found = percentile(samples, percent)
    share = percent / 100 * len(samples)
    assert found in samples
    assert sum(sample <= found for sample in samples) >= share - 1e-9
    assert sum(sample < found for sample in samples) < share + 1e-9


def test_figures_follow_from_the_samples_and_the_batch() -> None:
    row = with_samples(ComparedVariant(name="dense", batch=4), tuple(map(float, range(1, 101))))
    assert (row.median_ms, row.p90_ms, row.p99_ms) == (50.5, 90.0, 99.0)
    assert row.throughput == pytest.approx(4000 / 50.5)
    assert row.samples_ms[:2] == (1.0, 2.0)
    row = with_samples(ComparedVariant(name="dense"), (2.0, 3.0), tuple(map(float, range(1, 11))))
    assert (row.median_ms, row.p90_ms, row.p99_ms) == (2.5, 9.0, 10.0), "of the single runs"
    assert row.throughput == pytest.approx(400)
