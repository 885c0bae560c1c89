"""The pages and parts of pages that are made from the code each time the site is built.

A page says `{{ name }}` where one of PARTS goes. Pages of reasons and of commands are files, one
each, in the folders of PAGES, which hold nothing else and are not kept under version control.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import command_pages
import house
import reason_pages
from repository_files import whole_page
from sphinx.application import Sphinx

from twofour import errors

ROOT = Path(__file__).parents[2]
PAGES: Mapping[str, Callable[[], Mapping[str, str]]] = {
    "reasons": reason_pages.pages,
    "reference/commands": command_pages.pages,
}
"""Folder -> its pages, text by name."""


def exit_codes() -> Iterator[str]:
    """A row for every way in which a command ends."""
    kinds = sorted(errors.TwofourError.__subclasses__(), key=lambda kind: kind.exit_code)
    meaning = {
        0: "Done.",
        errors.TwofourError.exit_code: "A bug of twofour; the traceback is saved.",
        **{kind.exit_code: f"{kind.__doc__} (`{kind.__name__}`)" for kind in kinds},
        errors.NOT_JUDGED: "What was measured does not decide a `--fail-if` condition.",
        errors.INTERRUPTED: "Interrupted, by Ctrl-C or a signal.",
    }
    yield from ("| code | meaning |", "|---|---|")
    yield from (f"| {code} | {text} |" for code, text in sorted(meaning.items()))


def schemas() -> Iterator[str]:
    """A row for every JSON Schema, with the record that it describes."""
    yield from ("| record | schema |", "|---|---|")
    for path in sorted((ROOT / "docs/schema").glob("*.json")):
        yield f"| `{path.name.split('.')[0]}` | [{path.name}](../schema/{path.name}) |"


def benchmarks() -> Iterator[str]:
    """What every program in benchmarks measures."""
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        yield from (f"`{path.name}`", f": {said.splitlines()[0]}", "")


PARTS: Mapping[str, Callable[[], Iterator[str]]] = {
    "exit_codes": exit_codes,
    "schemas": schemas,
    "benchmarks": benchmarks,
    "house": lambda: iter(("```text", house.picture(), "```")),
}


def write_pages(app: Sphinx) -> None:
    """Write the pages of PAGES where they changed, and remove those of earlier builds."""
    for folder, made in PAGES.items():
        place = Path(app.srcdir, folder)
        place.mkdir(parents=True, exist_ok=True)
        texts = made()
        for old in place.glob("*.md"):
            if old.stem not in texts:
                old.unlink()
        for name, text in texts.items():
            path = place / f"{name}.md"
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")


def fill_parts(_: Sphinx, page: str, content: list[str]) -> None:
    """Put the parts into a page that names them, and the file that it shows."""
    content[0] = whole_page(page, content[0])
    for name, made in PARTS.items():
        if (mark := "{{ " + name + " }}") in content[0]:
            content[0] = content[0].replace(mark, "\n".join(made()))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the two steps with Sphinx."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", fill_parts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
