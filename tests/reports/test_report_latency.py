"""The small table of times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twofour.records.build import VariantLatency
from twofour.reports.latency_document import build_times
from twofour.reports.terminal import draw, plain_text

GOLDEN = Path(__file__).parent / "golden"


def _variant(name: str, *samples: float, error: str | None = None) -> VariantLatency:
    median = sorted(samples)[len(samples) // 2] if samples else None
    return VariantLatency(
        name=name,
        samples_ms=samples,
        median_ms=median,
        p90_ms=max(samples, default=None),
        p99_ms=max(samples, default=None),
        throughput=1000 / median if median else None,
        peak_memory_bytes=None,
        error=error,
    )


def _shown(variants: tuple[VariantLatency, ...], *, has_sparse: bool) -> str:
    return plain_text(draw(build_times(variants, has_sparse=has_sparse)))


def test_the_latency_table_is_as_expected(golden: Callable[[Path, str], None]) -> None:
    variants = (
        _variant("dense", 2.0, 2.1, 1.9, 2.0, 2.05),
        _variant("sparse", 1.25, 1.2, 1.3, 1.25, 1.28),
        _variant("[bold]failed", error="out of [memory]"),
    )
    golden(GOLDEN / "latency.txt", _shown(variants, has_sparse=True))


def test_onnx_runtime_times_come_with_the_note_that_zeros_bring_no_speed() -> None:
    variants = (_variant("dense", 2.0, 2.1, 1.9, 2.0), _variant("sparse", 2.0, 2.05, 1.9, 2.1))
    text = _shown(variants, has_sparse=False)
    assert "zeros bring no speed here" in text
    assert "zeros" not in _shown(variants, has_sparse=True)


def test_times_taken_one_after_the_other_are_never_called_a_difference() -> None:
    variants = (_variant("dense", *(2.0,) * 30), _variant("sparse", *(1.0,) * 30))
    text = _shown(variants, has_sparse=True)
    assert "0.500 (not judged)" in text
    assert "twofour compare" in text
    for word in ("faster", "slower", "no difference"):
        assert word not in text


def test_without_a_dense_variant_there_is_no_ratio() -> None:
    text = _shown((_variant("sparse", 2.0),), has_sparse=True)
    assert text.splitlines()[-1].split() == ["sparse", "2", "2", "500", "-"]
