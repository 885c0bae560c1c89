"""What the documentation site makes of the code, what it refuses, and what pages name."""

from __future__ import annotations

import json
import re
import shlex
from itertools import takewhile
from pathlib import Path

import command_pages
import generated_pages
import house
import pytest
import typer
from notebooks import run_cell
from page_checks import unwanted
from run_directive import calmed, calmed_page
from typer.core import TyperGroup

import twofour
from twofour.cli import application
from twofour.reports.latency_words import MACHINE_TOO_BUSY

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_every_public_name_of_python_is_on_the_site() -> None:
    page = (DOCS / "reference" / "python.md").read_text()
    records = "".join(generated_pages.record_pages().values())
    gone = [
        name
        for name in twofour.__all__
        if f"## {name}\n" not in records and name not in page and name != "__version__"
    ]
    assert gone == []


def test_a_page_of_a_command_has_its_example_and_every_option() -> None:
    page = command_pages.pages()["validate"]
    assert page.startswith("# twofour validate\n\nCheck every weight of saved files against")
    assert "```sh\ntwofour validate runs/model/sparse.onnx\n```" in page
    assert "`-p, --pattern N:M`\n: " in page
    assert "runs/\\<model name\\>" in command_pages.pages()["prune"]


def test_every_exit_code_has_a_row() -> None:
    rows = list(generated_pages.exit_codes())[2:]
    assert [int(row.split("|")[1]) for row in rows] == [0, 1, 2, 3, 4, 5, 6, 130]
    assert "`MissingToolError`" in rows[3]


@pytest.mark.parametrize(
    ("file", "page", "link", "found"),
    [
        ("CONTRIBUTING.md", "contributing/working.md", "docs/methods.md", "../methods.md"),
        ("docs/methods.md", "methods.md", "../benchmarks/LOG.md", "contributing/log.md"),
        ("CHANGELOG.md", "changelog.md", "SECURITY.md", "security.md"),
        ("docs/a.md", "a.md", "b.md#part", "b.md#part"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(
    file: str, page: str, link: str, found: str
) -> None:
    text = generated_pages.relinked(f"[x]({link})", ROOT / file, DOCS / page)
    assert text == f"[x]({found})"


def test_a_page_takes_nothing_from_the_network_and_names_no_path_of_the_machine() -> None:
    fine = '<a href="https://x.org">x</a><script src="_static/a.js"></script>'
    assert unwanted(fine, "/home/me") == []
    assert unwanted('<script defer src="https://x.org/a.js">', "/home/me") == [
        '<script defer src="https://x.org/a.js'
    ]
    assert unwanted("src: url(//x.org/f.woff2) /home/me/a", "/home/me") == [
        "url(//x.org/f.woff2",
        "/home/me",
    ]


def test_a_page_and_a_frame_leave_out_times_that_other_processes_disturbed() -> None:
    rest = "Checked sparse.onnx as saved\n"
    busy = f"engine\n{MACHINE_TOO_BUSY} a and b\nWARNING\n\nTimes, batch 1\na 1.0\n\n{rest}"
    assert calmed(busy) == f"engine\n\n{rest}"
    assert calmed(rest) == rest
    times = f'<section class="latency"><p>{MACHINE_TOO_BUSY}</p>\n</section>'
    assert calmed_page(f"<p>a</p>{times}<p>b</p>") == "<p>a</p><p>b</p>"
    quiet = '<section class="latency"><p>no difference</p></section>'
    assert calmed_page(quiet) == quiet


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("eligible but not chosen", "why-nothing-sparse"),
        ("ASP", "guides/other-tools"),
        ("trt_sparsity_enable", "guides/runtimes"),
        ("yolo export", "guides/yolo"),
        ("tensorflow", "guides/tensorflow"),
        ("dla", "guides/dla"),
    ],
)
def test_a_search_for_the_words_of_users_ends_at_the_page_that_answers_them(
    words: str, page: str
) -> None:
    text = (DOCS / f"{page}.md").read_text()
    places = ", ".join(re.findall("^<!-- index: (.+) -->$", text, re.MULTILINE)).lower().split(", ")
    assert words.lower() in places


def test_a_cell_shows_what_it_prints_and_the_value_of_its_last_line() -> None:
    names: dict[str, object] = {}
    assert run_cell("a = 2\nprint(a)", names) == {"text": "2\n", "page": ""}
    assert run_cell("a + 1", names) == {"text": "3\n", "page": ""}
    html = "class Page:\n    def _repr_html_(self): return '<p>'\nPage()"
    assert run_cell(html, names) == {"text": "", "page": "<p>"}


def test_notebooks_are_kept_without_outputs() -> None:
    notebooks = [*(ROOT / "examples").glob("*.ipynb")]
    cells = [cell for path in notebooks for cell in json.loads(path.read_text())["cells"]]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 3
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * len(code)


PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("guides/*.md")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_a_page_shows_without_running_them_have_known_options(page: Path) -> None:
    group = typer.main.get_command(application())
    assert isinstance(group, TyperGroup)
    shown = "\n".join(re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL))
    for line in shown.replace("\\\n", " ").splitlines():
        if line.startswith("twofour "):
            words = takewhile(lambda word: word != ">", shlex.split(line, comments=True)[1:])
            command = group.commands[next(words)]
            assert command.make_parser(typer.Context(command)).parse_args([*words])


# --- files that documents name --------------------------------------------------------------------


SRC = ROOT / "src" / "twofour"
PLANS = [ROOT / "CONTRIBUTING.md", DOCS / "architecture.md"]
_PATH = re.compile(r"`([\w/]+\.(?:py|md)|[\w/]+/)`")


@pytest.mark.parametrize("page", PLANS, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = _PATH.findall(page.read_text())
    beside = [
        name for name in named if "/" not in name
    ]  # such as `open.py` of the folder before it
    gone = [n for n in named if n not in beside and not any((r / n).exists() for r in (ROOT, SRC))]
    assert len(named) > 10
    assert gone == []


def test_every_file_that_a_decision_names_is_there() -> None:
    """But for the two that are about what went and what moved."""
    pages = sorted((DOCS / "decisions").glob("*.md"))
    gone = [
        (page.name, name)
        for page in pages
        if page.name[:4] not in {"0009", "0013"}
        for name in re.findall(r"`(\w+/[\w/]+\.py)`", page.read_text())
        if not any((root / name).exists() for root in (ROOT, SRC, SRC.parent, SRC / "sources"))
    ]
    assert len(pages) > 10
    assert gone == []


def test_the_picture_of_the_house_is_that_of_the_import_contract() -> None:
    assert house.picture() in PLANS[1].read_text()
