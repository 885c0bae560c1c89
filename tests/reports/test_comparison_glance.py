"""A comparison in a notebook: its medians in a line, a row for each variant."""

from __future__ import annotations

from support.comparison_cases import by_trtexec, files, hostile


def test_the_line_has_the_medians_of_the_first_variants() -> None:
    found = files()
    first = found.variants[0]
    assert repr(found).startswith(f"LatencyComparison({found.source}, {len(found.variants)} var")
    assert f"{first.name} {first.median_ms:.4g} ms" in repr(found)


def test_the_table_has_a_row_for_each_variant_and_the_ratio_with_its_interval() -> None:
    found = by_trtexec()
    page = found._repr_html_()
    ratio = found.ratios[0]
    assert page.count("<tr>") == len(found.variants) + 1
    assert f"<td>{ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})</td>" in page
    assert f"<td>{ratio.verdict.value}</td>" in page


def test_names_of_any_kind_stay_text() -> None:
    found = hostile()
    assert "<script" not in found._repr_html_()
    assert "\n" not in repr(found)
