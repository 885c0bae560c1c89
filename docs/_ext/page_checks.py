"""Checks of the built pages: a heading on every two screens, frames that are there, no network."""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging

LONGEST = 6_000
"""Characters of a section without a heading in it: about two screens."""
_FETCHED = re.compile(
    r"<(?:script|img|iframe|link|source)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]*"
    r"|(?:url\(|@import )['\"]?(?:https?:)?//[^)\"']*"
)
_FRAME = re.compile(r"<iframe\b[^>]*\bsrc=\"([^\":]+)\"")
_log = logging.getLogger(__name__)


def unwanted(page: str, root: str) -> list[str]:
    """What a page or style sheet takes from the network, and paths of the machine."""
    return [*(hit[0] for hit in _FETCHED.finditer(page)), *([root] if root in page else [])]


def check_lengths(_: Sphinx, doctree: nodes.document) -> None:
    """Warn of a section that is longer than two screens without a heading in it."""
    for section in doctree.findall(nodes.section):
        own = (
            child
            for child in section
            if not isinstance(child, nodes.section | nodes.raw | addnodes.desc)
        )
        if (length := sum(len(child.astext()) for child in own)) > LONGEST:
            _log.warning("%d characters without a heading", length, location=section)


def check_pages(app: Sphinx, error: Exception | None) -> None:
    """Warn of pages and style sheets with something unwanted."""
    for path in Path(app.outdir).rglob("*") if error is None else ():
        if path.suffix in (".html", ".css"):
            text = path.read_text(encoding="utf-8")
            for hit in unwanted(text, str(Path(app.srcdir).parent)):
                _log.warning("%s contains %s", path.name, hit)
            for frame in _FRAME.findall(text):
                if not (path.parent / frame).exists():
                    _log.warning("%s has a frame of %s, which is not there", path.name, frame)
