"""READ FIRST: every record that flows through twofour, by subject. Standard library only.

    source -> prune -> validate -> export -> build -> report
    Weight    PruneResult  Validation  ExportResult  BuildResult  EligibilityReport

Records are frozen; sequences in them are tuples; `None` means unknown and `()` means none.
Names of the fields are a contract for whoever reads our JSON: fields may be added, never renamed.
What users may ask for by name alone is found here; twofour itself imports from the modules.
"""

from __future__ import annotations

import importlib

SUBJECTS = (
    "weights", "options", "pruning", "export", "build", "run", "eligibility", "sensitivity",
    "latency", "log",
)  # fmt: skip


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


def __getattr__(name: str) -> object:
    """A record by name, wherever it is: importing all of them takes longer than most commands."""
    if not name.startswith("_"):
        for subject in SUBJECTS:
            module = importlib.import_module(f"{__name__}.{subject}")
            found = getattr(module, name, None)
            if getattr(found, "__module__", None) == module.__name__:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
