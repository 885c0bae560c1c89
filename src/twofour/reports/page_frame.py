"""What every HTML page has: templates that escape, its own style and script, and a policy.

A page trusts no name: text is escaped by the template engine, and a Content Security Policy in the
page lets only its own script and style run.
"""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, *, styles: tuple[str, ...], script: str | None, **known: object) -> str:
    """The template of this name with what it knows; styles and script by the names of their files.

    The template also gets `policy`, `style` and `script`.
    """
    style = Markup("").join(map(asset, styles))
    code = None if script is None else asset(script)
    page = environment().get_template(template)
    return page.render(policy=policy(style, code), style=style, script=code, **known)


@lru_cache(maxsize=1)
def environment() -> Environment:
    """The templates of this package, escaping, strict about names that are not there."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("twofour.reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def policy(style: Markup, script: Markup | None) -> str:
    """Content Security Policy: nothing is fetched, nothing runs but what is in the page."""
    allowed = f"style-src {_hash(style)}"
    if script is not None:
        allowed += f"; script-src {_hash(script)}"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def asset(name: str) -> Markup:
    """A style or script of this package, on lines of its own."""
    loader = environment().loader
    assert loader is not None
    text, _, _ = loader.get_source(environment(), name)
    return Markup(f"\n{text}")  # noqa: S704 -- a file of this package


def breakable(name: str) -> Markup:
    """The name with a place to break the line behind each dot and slash, rather than anywhere."""
    return escape(name).replace(".", Markup(".<wbr>")).replace("/", Markup("/<wbr>"))


def drawn(text: str | None) -> Markup | None:
    """A plot of this package as markup."""
    return None if text is None else Markup(text)  # noqa: S704 -- plots escape what they are given


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
