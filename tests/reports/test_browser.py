"""The HTML pages in a real browser.

The report: filter, sorting, details, keyboard, themes, speed. A comparison: labels whole, apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chromium import Browser, browser, why_not
from support.comparison_cases import COMPARISONS, run_folder, sweep
from support.comparison_cases import hostile as hostile_comparison
from support.render_cases import every_status
from support.rendered import to_html

from twofour.records.eligibility import EligibilityReport
from twofour.reports.layers_table import layers_table

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
ENTER, SPACE, TAB = "\ue007", " ", "\ue004"
SHOWN = """return [...document.querySelectorAll('tbody tr:not(.details)')]
    .filter(r => r.offsetParent).map(r => r.cells[0].textContent.trim())"""


def _rows(report: EligibilityReport) -> list[str]:
    """The rows' names as the page shows them, with how many layers share each."""
    folded = layers_table(report).folded().columns[0]
    return [f"{cell} {folded.note(at)}".strip() for at, cell in enumerate(folded.cells)]


NAMES = _rows(every_status())


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as session:
        yield session


def _open(chromium: Browser, folder: Path, text: str) -> Browser:
    page = folder / "page.html"
    page.write_text(text, encoding="utf-8")
    chromium.open(page)
    return chromium


@pytest.fixture
def page(chromium: Browser, tmp_path: Path) -> Browser:
    return _open(chromium, tmp_path, to_html(every_status()))


def _choose(page: Browser, select: str, value: str) -> None:
    page.run(
        "const s = document.querySelector(arguments[0]); s.value = arguments[1];"
        "s.dispatchEvent(new Event('change'))",
        select,
        value,
    )


def test_the_text_filter_keeps_the_layers_that_have_every_word(page: Browser) -> None:
    assert page.run(SHOWN) == NAMES
    page.type("#text", "ENCODER 3072")
    assert page.run(SHOWN) == [n for n in NAMES if n.startswith("encoder")]
    assert page.run("return document.querySelector('#shown').value") == "4 of 11 layers"
    page.type("#text", " nothing-like-it")
    assert page.run(SHOWN) == []
    assert page.run("return document.querySelector('#none').offsetHeight > 0")
    page.click("#clear")
    assert page.run(SHOWN) == NAMES


def test_verdict_and_reason_filters_work_together(page: Browser) -> None:
    _choose(page, "#code", "PATTERN_BROKEN")
    assert page.run(SHOWN) == ["stem", "flattened"]
    _choose(page, "#code", "WRONG_AXIS")
    assert page.run(SHOWN) == ["flattened"]
    _choose(page, "#status", "runs")
    assert page.run(SHOWN) == []
    _choose(page, "#code", "")
    assert page.run(SHOWN) == ["large", "encoder.{0-1}.fc x2"]


def test_a_card_shows_its_layers_and_a_second_click_all_of_them(page: Browser) -> None:
    page.click(".card.doubtful")
    assert page.run(SHOWN) == ["resnext", "small"]
    pressed = "return document.querySelector('.card.doubtful').getAttribute('aria-pressed')"
    assert page.run(pressed) == "true"
    page.click(".card.doubtful")
    assert page.run(SHOWN) == NAMES


def test_a_column_sorts_up_then_down_then_as_the_model_is(page: Browser) -> None:
    page.click("[data-sort=layer]")
    up = page.run(SHOWN)
    assert up.index("encoder.{0-1}.fc x2") < up.index("encoder.{2,10}.fc x2")
    assert up[0] == "decoder.fc"
    assert page.run("return document.querySelector('th').getAttribute('aria-sort')") == "ascending"
    page.click("[data-sort=layer]")
    assert page.run(SHOWN) == up[::-1]
    page.click("[data-sort=layer]")
    assert page.run(SHOWN) == NAMES


def test_numbers_sort_as_numbers_and_what_is_not_known_comes_last(page: Browser) -> None:
    timed = ["small", "encoder.{0-1}.fc x2", "large"]
    page.click("[data-sort=sparse]")
    assert page.run(SHOWN)[:3] == timed
    page.click("[data-sort=sparse]")
    assert page.run(SHOWN)[:3] == timed[::-1]
    page.click("[data-sort=size]")
    assert page.run(SHOWN)[0] == "stem"


def test_details_open_move_with_their_row_and_close(page: Browser) -> None:
    page.click("tbody tr:nth-child(3) .more")
    told = page.run("return document.querySelector('.details').textContent")
    for text in ("1 (input channels)", "WRONG_AXIS", "source:"):
        assert text in told
    page.click("[data-sort=layer]")
    before = "return document.querySelector('.details').previousElementSibling.textContent"
    assert page.run(before).startswith("flattened")
    page.type("#text", "decoder")
    assert page.run("return document.querySelector('.details').offsetHeight") == 0
    page.click("#clear")
    page.run(
        "document.querySelector('.details').previousElementSibling.querySelector('.more').click()"
    )
    assert page.run("return document.querySelector('.details')") is None


def test_the_table_can_be_used_with_the_keyboard_alone(page: Browser) -> None:
    page.run("document.querySelector('#clear').focus()")
    page.press(TAB, ENTER)
    focused = "return document.activeElement.dataset.sort || document.activeElement.textContent"
    assert page.run(focused) == "layer"
    assert page.run(SHOWN)[0] == "decoder.fc"
    columns = page.run("return document.querySelectorAll('thead th').length")
    page.press(*[TAB] * columns, SPACE)
    assert page.run(focused) == "decoder.fc"
    assert page.run("return document.activeElement.getAttribute('aria-expanded')") == "true"


def test_a_script_in_the_page_that_is_not_ours_is_refused(page: Browser) -> None:
    page.run(
        "const s = document.createElement('script'); s.textContent = 'document.title = \"owned\"';"
        "document.body.append(s)"
    )
    assert page.run("return document.title") == "digits.py:make: sparsity report"
    assert any("Content Security Policy" in line for line in page.problems())


def test_the_theme_follows_the_system_until_it_is_chosen(page: Browser) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    page.emulate(prefers_color_scheme="light")
    light = page.run(paper)
    page.emulate(prefers_color_scheme="dark")
    dark = page.run(paper)
    assert light != dark
    page.click("#theme")
    assert (page.run(paper), page.run("return theme.textContent")) == (light, "Theme: light")
    page.click("#theme")
    page.emulate(prefers_color_scheme="light")
    assert (page.run(paper), page.run("return theme.textContent")) == (dark, "Theme: dark")
    page.click("#theme")
    assert page.run(paper) == light


def test_on_a_telephone_nothing_scrolls_sideways_and_a_row_keeps_its_verdict(page: Browser) -> None:
    page.resize(420)
    try:
        page.run("for (const more of document.querySelectorAll('.more')) more.click()")
        assert page.run("return document.documentElement.scrollWidth") <= 420
        shown = (
            "return [...document.querySelectorAll('thead th')].filter(h => h.offsetParent).length"
        )
        assert page.run(shown) == 3
    finally:
        page.resize(1400)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_text_in_the_colour_of_a_verdict_has_enough_contrast(
    chromium: Browser, tmp_path: Path, kind: str, scheme: str
) -> None:
    """At least 4.5 to 1 (WCAG 2.1, criterion 1.4.3)."""
    made = to_html(run_folder()) if kind == "comparison" else to_html(every_status())
    page = _opened(chromium, tmp_path, made)
    page.emulate(prefers_color_scheme=scheme)
    ratios = page.run(
        """
      const light = (css) => { const [r, g, b] = css.match(/\\d+/g).map(v => v / 255)
          .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const sheet = light(getComputedStyle(document.querySelector(arguments[0])).backgroundColor);
      const found = {};
      const measure = (words) => {
        const text = light(getComputedStyle(words).color);
        found[words.className] =
            (Math.max(text, sheet) + 0.05) / (Math.min(text, sheet) + 0.05); };
      for (const badge of document.querySelectorAll('.badge, .sub, .legend span')) measure(badge);
      const words = document.body.appendChild(document.createElement('p'));
      for (const name of ['badge faster','badge slower',
                          'badge same','badge undecided','badge none','note']) {
        words.className = name;
        measure(words); }
      return found""",
        "#table" if kind == "report" else "body",
    )
    page.emulate(prefers_color_scheme="light")
    assert len(ratios) >= (12 if kind == "report" else 6)
    assert min(ratios.values()) >= 4.5, ratios


# --- the page of a comparison ---------------------------------------------------------------------


def _opened(chromium: Browser, folder: Path, text: str) -> Browser:
    page = _open(chromium, folder, text)
    page.run("for (const d of document.querySelectorAll('details')) d.open = true;")
    return page


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_page_of_a_comparison_is_no_wider_than_the_window(
    chromium: Browser, tmp_path: Path, name: str
) -> None:
    page = _opened(chromium, tmp_path, to_html(COMPARISONS[name]))
    assert page.run("return document.documentElement.scrollWidth - window.innerWidth") <= 0


def test_hostile_names_do_nothing_in_either_page(chromium: Browser, tmp_path: Path) -> None:
    for text in (
        to_html(hostile_comparison()),
        to_html(every_status(), comparison=hostile_comparison()),
        to_html(every_status(), comparison=sweep()),
    ):
        page = _opened(chromium, tmp_path, text)
        assert page.run("return document.title").endswith((": latency", ": sparsity report"))
        assert page.run("return document.querySelectorAll('.latency img, .latency b').length") == 0
        assert page.problems() == []


def test_the_table_of_layers_is_still_a_grid_beside_tables_of_times(
    chromium: Browser, tmp_path: Path
) -> None:
    page = _opened(chromium, tmp_path, to_html(every_status(), comparison=run_folder()))
    display = "return getComputedStyle(document.querySelector(arguments[0])).display"
    assert page.run(display, "#table tbody tr") == "grid"
    assert page.run(display, ".cells tbody tr") == "table-row"
