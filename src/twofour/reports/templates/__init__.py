"""Templates of pages and plots: every text in them is escaped, no name may be missing."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from markupsafe import Markup

if TYPE_CHECKING:
    from jinja2 import Environment


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


def asset(name: str) -> Markup:
    """A style or script of this package, on lines of its own."""
    loader = environment().loader
    assert loader is not None
    text, _, _ = loader.get_source(environment(), name)
    return Markup(f"\n{text}")  # noqa: S704 -- a file of this package
