"""What comes back from the Python API, in a line and as a notebook's table."""

from __future__ import annotations

import importlib


class Glance:
    """A record that says the main thing in a line; everything else is in its fields.

    The words are those of the reports, which know the records and not the other way round: hence
    the import by name, when somebody looks.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """The class, and the main thing about it."""
        return str(importlib.import_module("twofour.reports.glance").line_of(self))

    def _repr_html_(self) -> str:
        """A table, for Jupyter."""
        return str(importlib.import_module("twofour.reports.glance").table_of(self))
