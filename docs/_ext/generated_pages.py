"""What is made from the code each time the site is built.

A page says `{{ name }}` where one of PARTS goes, `{{ file NAME }}` where a file of the repository
goes as it is, and `{{ notebook NAME }}` where a notebook goes with what its cells gave. The folders
of PAGES contain nothing else and are not committed.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import command_pages
import reason_pages
from docutils import nodes
from notebooks import as_page
from sphinx.application import Sphinx

from twofour import errors
from twofour.records import SUBJECTS
from twofour.records.latency import LatencyComparison
from twofour.reports import document_of, renderer
from twofour.store import read_record

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHOWN_AS = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing/working.md",
    "SECURITY.md": "security.md",
    "examples/digits.ipynb": "guides/notebook.md",
    "benchmarks/LOG.md": "contributing/log.md",
    "docs/decisions": "contributing/decisions.md",
}
"""File or folder of the repository -> the page that shows it."""
NOT_SEARCHED = (
    *("decisions/", "contributing/decisions", "contributing/log", "contributing/site"),
    "changelog",
)
"""Pages whose name begins so do not answer a search."""
_FILE = re.compile(r"\{\{ file ([\w./]+) \}\}")
_INDEX = re.compile(r"^<!-- index: (.+) -->$", re.MULTILINE)
"""Words that a search of the site answers with this place first; GitHub does not show them."""
_NOTEBOOK = re.compile(r"\{\{ notebook ([\w./]+) \}\}")
_LINK = re.compile(r"(?<=\]\()([\w./-]+)(?=[)#])")


def record_pages() -> Mapping[str, str]:
    """A page for each subject of the records, and `index`."""
    modules = {name: importlib.import_module(f"twofour.records.{name}") for name in SUBJECTS}
    made = {name: "\n".join(_records(name, module)) for name, module in modules.items()}
    rows = [f"- [{n}]({n}.md): {(m.__doc__ or '').splitlines()[0]}" for n, m in modules.items()]
    intro = (
        "The functions return them, the JSON files contain them. `None` is unknown, `()` is none."
    )
    return made | {"index": command_pages.index("Records", [intro, "", *rows], [*made])}


def _records(subject: str, module: ModuleType) -> Iterator[str]:
    yield f"# Records: {subject}\n\n{module.__doc__}"
    for name, kind in vars(module).items():
        if isinstance(kind, type) and kind.__module__ == module.__name__:
            yield f"## {name}\n\n```{{eval-rst}}\n.. autoclass:: {kind.__module__}.{name}"
            yield "   :members:\n   :undoc-members:\n   :inherited-members: str\n```\n"


def exit_codes() -> Iterator[str]:
    """A row for every way in which a command ends."""
    made = errors.TwofourError.__subclasses__()
    ours = (kind for kind in made if kind.__module__ == errors.__name__)
    kinds = sorted(ours, key=lambda kind: kind.exit_code)
    yield from ("| code | meaning |", "|---|---|", "| 0 | Done. |")
    yield f"| {errors.TwofourError.exit_code} | A bug of twofour; the traceback is saved. |"
    yield from (f"| {k.exit_code} | {k.__doc__} From Python: `{k.__name__}`. |" for k in kinds)
    yield f"| {errors.NOT_JUDGED} | What was measured does not decide a `--fail-if` condition. |"
    yield f"| {errors.INTERRUPTED} | Interrupted. |"


def schemas() -> Iterator[str]:
    """A link to every JSON Schema."""
    for path in sorted((DOCS / "schema").glob("*.json")):
        yield f"- [{path.name}](../schema/{path.name})"


def benchmarks() -> Iterator[str]:
    """What every program in benchmarks measures."""
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        yield from (f"`{path.name}`", f": {said.splitlines()[0]}", "")


PAGES: Mapping[str, Callable[[], Mapping[str, str]]] = {
    "reasons": reason_pages.pages,
    "reference/commands": command_pages.pages,
    "reference/records": record_pages,
}
"""Folder -> its pages, text by name."""
PARTS = {part.__name__: part for part in (exit_codes, schemas, benchmarks)}
_PART = re.compile(r"\{\{ (" + "|".join(PARTS) + r") \}\}")


def write_pages(_: Sphinx) -> None:
    """Write the pages of PAGES that changed, and remove those that went."""
    for folder, make in PAGES.items():
        (DOCS / folder).mkdir(parents=True, exist_ok=True)
        texts = {DOCS / folder / f"{name}.md": text for name, text in make().items()}
        for old in set((DOCS / folder).iterdir()) - texts.keys():
            old.unlink()
        for path, text in texts.items():
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")


def show_kept_comparison(app: Sphinx) -> None:
    """Make the page of the kept comparison, as builds of the site are too busy to compare."""
    comparison = read_record(LatencyComparison, DOCS / "pictures" / "comparison.json")
    made = Path(app.outdir, "_made")
    made.mkdir(parents=True, exist_ok=True)
    page = str(renderer("html")(document_of(comparison)))
    (made / "comparison.html").write_text(page, encoding="utf-8")


def fill_page(app: Sphinx, name: str, content: list[str]) -> None:
    """Put parts and files into a page, and turn links of the repository into links of the site."""
    page, text = DOCS / f"{name}.md", content[0]
    named = _FILE.search(text)
    text = relinked(text, page, page)
    if named is not None:
        shown = ROOT / named[1]
        text = text.replace(named[0], relinked(shown.read_text(encoding="utf-8"), shown, page))
    text = _INDEX.sub(_index, text)
    notebook = _NOTEBOOK.search(text)
    if notebook is not None:
        app.env.note_dependency(str(ROOT / notebook[1]))
        made = as_page(ROOT / notebook[1], ROOT / "build" / "site-runs" / name)
        text = text.replace(notebook[0], made)
    content[0] = _PART.sub(lambda part: "\n".join(PARTS[part[1]]()), text)


def leave_out_of_search(app: Sphinx, _: nodes.document) -> None:
    """Keep what the project noted for itself out of the answers to a user's search."""
    name = app.env.current_document.docname
    if name.startswith(NOT_SEARCHED):
        app.env.metadata[name]["nosearch"] = "true"


def _index(words: re.Match[str]) -> str:
    """An entry of the index for each word; a search shows main ones, marked with "!", first."""
    return "```{index} ! " + words[1].replace(", ", ", ! ") + "\n```"


def relinked(text: str, written_in: Path, page: Path) -> str:
    """The text with links that go from this page to what they named in the file."""

    def of_site(link: re.Match[str]) -> str:
        named = os.path.normpath(written_in.parent / link[0])
        target = DOCS / SHOWN_AS.get(os.path.relpath(named, ROOT), named)
        return Path(os.path.relpath(target, page.parent)).as_posix()

    return _LINK.sub(of_site, text)
