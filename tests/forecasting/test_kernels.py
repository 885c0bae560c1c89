"""Predicted kernel times: measured where they were measured, near them elsewhere, and bounded."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from twofour.eligibility.build_facts import NO_SPARSE_INT8
from twofour.errors import BadInputError
from twofour.forecasting.gpus import all_gpus, gpu_named
from twofour.forecasting.kernels import (
    ODD_GAIN,
    measured_products,
    product_times,
    times_of_products,
)
from twofour.forecasting.roofline import BYTES, KEPT, fitted_terms, kernel_us
from twofour.records.forecast import Basis, GpuKind

MEASURED = measured_products()
PAIRS = sorted(MEASURED)
LARGE = [pair for pair in PAIRS if len(MEASURED[pair]) > 100]
DOUBLING = tuple(2**exponent for exponent in range(17))
WEIGHTS = ((4096, 4096), (14336, 4096), (768, 3072), (512, 512))


def test_a_measured_product_has_its_measured_times() -> None:
    found = product_times("A100", "INT8", 512, 5120, 13824)
    assert (found.gpu, found.basis) == ("A100", Basis.MEASURED)
    assert found.dense_us == pytest.approx(235.971, abs=0.001)
    assert found.sparse_us == pytest.approx(102.687, abs=0.001)
    assert found.gain == found.dense_us / found.sparse_us
    assert found.low < found.gain < found.high < 1.3 * found.low
    assert found.gain > 2.05
    assert found.note == ODD_GAIN
    assert product_times("A100", "FP16", 4096, 5120, 5120).note is None


@pytest.mark.parametrize(("gpu", "precision"), PAIRS)
def test_a_measured_product_keeps_its_times_unless_more_rows_take_less(
    gpu: str, precision: str
) -> None:
    """128 rows of 37,888 x 3,584 took 192 us on an H100 in INT8, 256 rows 97."""
    table = MEASURED[gpu, precision]
    shapes = [(int(a), int(b), int(c)) for a, b, c in table[:, :3]]
    found = times_of_products(gpu, precision, shapes)
    times = np.array([(product.dense_us, product.sparse_us) for product in found])
    assert (times <= table[:, 3:] * (1 + 1e-9)).all()
    if len(table) > 100:
        assert np.isclose(times, table[:, 3:]).all(axis=1).mean() > 0.8
        assert np.mean([product.basis is Basis.MEASURED for product in found]) > 0.9


def test_the_basis_says_how_near_the_measured_products_are() -> None:
    def basis(gpu: str, rows: int, outputs: int, reduction: int) -> Basis:
        return product_times(gpu, "FP16", rows, outputs, reduction).basis

    assert basis("A100", 4096, 4096, 4096) is Basis.MEASURED
    assert basis("A100", 1000, 5120, 3072) is Basis.BETWEEN
    assert basis("A100", 8, 5120, 5120) is Basis.BEYOND
    assert basis("A100", 4096, 64, 64) is Basis.BEYOND
    assert basis("L4", 4096, 4096, 4096) is Basis.SCALED
    assert [kind.value for kind in Basis] == [
        "measured here", "between measured shapes", "beyond them", "scaled from another GPU",
    ]  # fmt: skip


def test_many_products_at_once_are_those_one_by_one() -> None:
    shapes = [(rows, outputs, 1024) for rows in (1, 77, 4096) for outputs in (1000, 4096)]
    alone = [product_times("H100", "FP8", *shape) for shape in shapes]
    assert [p.gain for p in times_of_products("H100", "FP8", shapes)] == pytest.approx(
        [p.gain for p in alone]
    )
    assert times_of_products("H100", "FP8", []) == ()


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)
def test_more_rows_never_take_less_time(gpu: GpuKind) -> None:
    rows = sorted({*DOUBLING, 3, 50, 65, 100, 197, 1000, 3136, 12544})
    weights = (*WEIGHTS, (128, 128), (64, 576), (37888, 3584))
    for precision, weight in itertools.product(dict(gpu.tflops), weights):
        if (str(gpu.measured_as), precision) not in fitted_terms():
            continue
        times = times_of_products(gpu, precision, [(count, *weight) for count in rows])
        for fewer, more in pairwise(times):
            assert more.dense_us > 0.9999 * fewer.dense_us, (precision, fewer, more.rows)
            assert more.sparse_us > 0.9999 * fewer.sparse_us, (precision, fewer, more.rows)


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)
def test_a_gain_that_one_slow_kernel_makes_is_bounded_or_has_a_note(gpu: GpuKind) -> None:
    for precision in dict(gpu.tflops):
        if (str(gpu.measured_as), precision) not in fitted_terms():
            continue
        shapes = [(rows, *weight) for rows in DOUBLING for weight in (*WEIGHTS, (64, 576))]
        for times in times_of_products(gpu, precision, shapes):
            if times.basis is Basis.SCALED:
                assert 0.4999 < times.gain < 2.0501
            assert 0.4999 < times.gain < 2.0501 or times.note, times


@pytest.mark.parametrize("gpu", ["H100 SXM", "H200", "GH200", "H800"])
@pytest.mark.parametrize(
    ("precision", "shape", "published"),
    [
        ("FP16", (8192, 8192, 8192), 1.21),  # CUDALibrarySamples 203
        ("FP16", (3072, 3072, 10240), 1.15),  # pytorch PR 177866
        ("FP8", (512, 8192, 8192), 1.26),  # pytorch/ao PR 2012
    ],
)
def test_a_hopper_without_a_power_limit_gains_about_what_was_published(
    gpu: str, precision: str, shape: tuple[int, int, int], published: float
) -> None:
    """The PCIe card, which was measured, gains 1.59 with 8,192 cubed: its power limit slows it."""
    found = product_times(gpu, precision, *shape)
    assert found.gain == pytest.approx(published, rel=0.07)
    assert found.low < published < found.high


@pytest.mark.parametrize(("gpu", "precision"), LARGE)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_one_row_gains_no_more_than_the_bytes_that_are_not_read(
    gpu: str, precision: str, weight: tuple[int, int]
) -> None:
    shapes = [(rows, *weight) for rows in DOUBLING]
    first, *others = times_of_products(gpu, precision, shapes)
    assert first.gain <= 1.0001 / KEPT[precision]
    assert BYTES[precision] == 1 or KEPT[precision] == 9 / 16
    for one, other in pairwise([first, *others[:6]]):
        assert other.gain / one.gain == pytest.approx(1, abs=0.5), "no jump from 1 to 64 rows"


def test_another_gpu_is_scaled_by_its_data_sheet() -> None:
    """The SXM card of the A100 has the PCIe card's rates and 5 % more bandwidth."""
    here, there = (
        product_times(name, "FP16", 64, 16384, 4096) for name in ("A100", "NVIDIA A100-SXM4-80GB")
    )
    assert there.dense_us == pytest.approx(here.dense_us, rel=0.15)
    assert there.gain == pytest.approx(here.gain, rel=0.15)
    assert there.high / there.low > 1.3 * here.high / here.low
    large = [product_times(name, "FP16", 16384, 8192, 8192) for name in ("L4", "RTX4090")]
    assert large[0].dense_us / large[1].dense_us == pytest.approx(165.2 / 121, rel=0.1)


def test_without_sparse_kernels_there_is_no_gain_and_the_note_says_why() -> None:
    found = product_times("B300", "INT8", 4096, 4096, 4096)
    note = f"int8: {NO_SPARSE_INT8.in_words}"
    assert (found.gain, found.low, found.high, found.note) == (1, 1, 1, note)
    assert found.sparse_us == found.dense_us


def test_a_gain_that_is_the_caches_has_a_note() -> None:
    """At 64 rows GB10 (L2: 24 MiB) was measured at 5.8 with weights of 31 MiB, 18 MiB in 2:4."""
    note = product_times("GB10", "FP16", 64, 4608, 3584).note
    assert note is not None
    assert "into the L2 cache" in note
    assert product_times("H100", "FP16", 64, 8192, 4096).note == note
    for rows, outputs in ((64, 2048), (64, 37888), (8192, 4608)):
        assert product_times("GB10", "FP16", rows, outputs, 3584).note is None


def test_the_h100_takes_its_bf16_times_for_fp16_and_says_so() -> None:
    found = product_times("H100", "FP16", 4096, 5120, 5120)
    assert "in BF16 only" in (found.note or "")
    assert found.gain == product_times("H100", "BF16", 4096, 5120, 5120).gain


@pytest.mark.parametrize(
    ("gpu", "precision", "shape", "message"),
    [
        ("A1000", "FP16", (64, 64, 64), "A100"),
        (
            replace(gpu_named("A100"), name="X1", measured_as=None),
            "FP16",
            (64, 64, 64),
            "on a GPU like X1",
        ),
        ("A100", "FP8", (64, 64, 64), "it has BF16, FP16, INT8"),
        ("A100", "fp32", (64, 64, 64), "it has BF16, FP16, INT8"),
        ("A100", "FP16", (64, 0, 64), r"1 or more, found \(64, 0, 64\)"),
    ],
)
def test_bad_input_ends_in_2_and_names_what_is_there(
    gpu: str | GpuKind, precision: str, shape: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(BadInputError, match=message) as error:
        product_times(gpu, precision, *shape)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(("gpu", "precision"), LARGE)
def test_the_fitted_roofline_is_near_the_measured_times(gpu: str, precision: str) -> None:
    """It fails where a figure of gpus.csv or kernel_times.csv changes and the fit is not redone."""
    table = MEASURED[gpu, precision]
    kinds = zip(fitted_terms()[gpu, precision], table[:, 3:].T, (False, True), strict=True)
    for terms, us, sparse in kinds:
        found = kernel_us(terms, gpu_named(gpu), precision, table[:, :3], sparse=sparse)
        assert np.median(np.abs(np.log(found / us))) < 0.11
        assert np.median(found / us) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("gpu", "precision", "error"), [("GB10", "FP16", 0.12), ("RTX5080", "FP8", 0.03)]
)
def test_a_model_left_out_is_predicted_better_than_by_its_neighbours(
    gpu: str, precision: str, error: float
) -> None:
    pytest.importorskip("scipy")
    import kernel_model

    pair, table = (gpu, precision), MEASURED[gpu, precision]
    ours, nearest = (
        kernel_model.left_out(pair, table, kernel_model.models, way)
        for way in (kernel_model.ours, kernel_model.nearest)
    )
    off = [np.median(np.abs(found[:, 4] / found[:, 2] - 1)) for found in (ours, nearest)]
    assert off[0] <= min(error, off[1])
    assert 0.6 <= ((ours[:, 6] <= ours[:, 2]) & (ours[:, 2] <= ours[:, 8])).mean() <= 0.95
