"""Files of the repository that are pages of the site as they are: CONTRIBUTING.md, for example.

A page `{{ file CONTRIBUTING.md }}` is that file. Links between such files and the pages, which are
right for a reader of the repository, are turned into links of the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHOWN_AS = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing/extending.md",
    "SECURITY.md": "security.md",
    "benchmarks/LOG.md": "contributing/log.md",
    "docs/decisions": "contributing/decisions.md",
}
"""File or folder of the repository -> the page that shows it."""
_FILE = re.compile(r"\{\{ file ([\w./]+) \}\}")
_LINK = re.compile(r"(?<=\]\()([\w./-]+)(?=[)#])")


def whole_page(name: str, text: str) -> str:
    """The text of a page of this name, with the file that it shows and the links of the site."""
    page = DOCS / f"{name}.md"
    if (named := _FILE.search(text)) is None:
        return relinked(text, page, page)
    shown = ROOT / named[1]
    return text.replace(named[0], relinked(shown.read_text(encoding="utf-8"), shown, page))


def relinked(text: str, written_in: Path, page: Path) -> str:
    """The text with links that go from this page to what they named in the file."""

    def of_site(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(written_in.parent / link[0]))
        known = target.is_relative_to(ROOT) and target.relative_to(ROOT).as_posix()
        target = DOCS / SHOWN_AS[known] if known in SHOWN_AS else target
        return Path(os.path.relpath(target, page.parent)).as_posix()

    return _LINK.sub(of_site, text)
