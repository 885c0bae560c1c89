"""The page of a comparison in a real browser: labels whole and apart, contrast, no error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chromium import Browser, browser, why_not
from support.comparison_cases import hostile, many, run_folder, sweep
from support.render_cases import every_status
from support.rendered import comparison_page, to_html

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
CASES = {"run_folder": run_folder, "sweep": sweep, "hostile": hostile, "many": many}
OPEN = "for (const d of document.querySelectorAll('details')) d.open = true;"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as session:
        yield session


def _open(chromium: Browser, folder: Path, text: str) -> Browser:
    page = folder / "page.html"
    page.write_text(text, encoding="utf-8")
    chromium.open(page)
    chromium.run(OPEN)
    return chromium


@pytest.mark.parametrize("name", CASES)
def test_no_label_is_cut_or_lies_on_another(chromium: Browser, tmp_path: Path, name: str) -> None:
    page = _open(chromium, tmp_path, comparison_page(CASES[name]()))
    wrong = page.run("""
      const found = [];
      for (const plot of document.querySelectorAll('svg.wide')) {
        const frame = plot.getBoundingClientRect();
        const boxes = [...plot.querySelectorAll('text')].map(t => [t, t.getBoundingClientRect()]);
        for (const [text, box] of boxes)
          if (box.left < frame.left - 1 || box.right > frame.right + 1 ||
              box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
            found.push(`cut: ${text.textContent}`);
        boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
          if (p.left < q.right - 1 && q.left < p.right - 1 &&
              p.top < q.bottom - 3 && q.top < p.bottom - 3)
            found.push(`overlap: ${a.textContent} | ${b.textContent}`); }));
      }
      return found""")
    assert wrong == []
    assert page.run("return document.querySelectorAll('svg.wide text').length") > 5


@pytest.mark.parametrize("name", CASES)
def test_the_page_is_no_wider_than_the_window(chromium: Browser, tmp_path: Path, name: str) -> None:
    page = _open(chromium, tmp_path, comparison_page(CASES[name]()))
    assert page.run("return document.documentElement.scrollWidth - window.innerWidth") <= 0


def test_hostile_names_do_nothing_in_either_page(chromium: Browser, tmp_path: Path) -> None:
    for text in (
        comparison_page(hostile()),
        to_html(every_status(), comparison=hostile()),
        to_html(every_status(), comparison=sweep()),
    ):
        page = _open(chromium, tmp_path, text)
        assert page.run("return document.title").endswith((": latency", ": sparsity report"))
        assert page.run("return document.querySelectorAll('.latency img, .latency b').length") == 0
        assert page.problems() == []


def test_the_table_of_layers_is_still_a_grid_beside_tables_of_times(
    chromium: Browser, tmp_path: Path
) -> None:
    page = _open(chromium, tmp_path, to_html(every_status(), comparison=run_folder()))
    display = "return getComputedStyle(document.querySelector(arguments[0])).display"
    assert page.run(display, "#table tbody tr") == "grid"
    assert page.run(display, ".cells tbody tr") == "table-row"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_in_the_colour_of_a_verdict_have_enough_contrast(
    chromium: Browser, tmp_path: Path, scheme: str
) -> None:
    """At least 4.5 to 1 (WCAG 2.1, criterion 1.4.3)."""
    page = _open(chromium, tmp_path, comparison_page(run_folder()))
    page.emulate(prefers_color_scheme=scheme)
    ratios: dict[str, float] = page.run("""
      const light = (css) => { const [r, g, b] = css.match(/\\d+/g).map(v => v / 255)
          .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const sheet = light(getComputedStyle(document.querySelector('figure')).backgroundColor);
      const found = {};
      const words = document.querySelector('figure').appendChild(document.createElement('p'));
      for (const name of ['badge faster','badge slower',
                          'badge same','badge undecided','badge none','note']) {
        words.className = name;
        const text = light(getComputedStyle(words).color);
        found[name] = (Math.max(text, sheet) + 0.05) / (Math.min(text, sheet) + 0.05); }
      return found""")
    page.emulate(prefers_color_scheme="light")
    assert len(ratios) == 6
    assert min(ratios.values()) >= 4.5, ratios
