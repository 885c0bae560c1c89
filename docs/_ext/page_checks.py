"""Checks of the built pages: nothing comes from the network, no page is long without a heading."""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging

_FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"(?:https?:)?//[^\"]*"
    r"|<link\b(?![^>]*rel=\"canonical)[^>]*\bhref=\"(?:https?:)?//[^\"]*"
    r"|url\(['\"]?(?:https?:)?//[^)]*|@import[^;]*//[^;]*"
)
"""What a browser would fetch from elsewhere when it shows the page."""
LONGEST = 6_000
"""Characters of a section without a heading in it: about two screens."""
_log = logging.getLogger(__name__)


def fetched(page: str) -> list[str]:
    """What a page or style sheet takes from the network."""
    return [hit[0] for hit in _FETCHED.finditer(page)]


def check_lengths(_: Sphinx, doctree: nodes.document) -> None:
    """Warn of a section that is longer than two screens without a heading in it."""
    for section in doctree.findall(nodes.section):
        own = (child for child in section if not isinstance(child, nodes.section | addnodes.desc))
        if (length := sum(len(child.astext()) for child in own)) > LONGEST:
            _log.warning("%d characters without a heading", length, location=section)


def check_network(app: Sphinx, error: Exception | None) -> None:
    """Warn of a page or style sheet that takes something from the network."""
    if error is not None or app.builder.format != "html":
        return
    for pattern in ("*.html", "*.css"):
        for path in Path(app.outdir).rglob(pattern):
            for hit in fetched(path.read_text(encoding="utf-8")):
                _log.warning("%s fetches %s", path.name, hit)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the checks with Sphinx."""
    app.connect("doctree-read", check_lengths)
    app.connect("build-finished", check_network)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
