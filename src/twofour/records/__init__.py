"""READ FIRST: every record that flows through twofour, by subject. Standard library only.

    source -> prune -> validate -> export -> build -> report
    Weight    PruneResult  Validation  ExportResult  BuildResult  EligibilityReport

Records are `frozen`, as other data is; sequences in them are tuples; `None` means unknown and `()`
means none.
Names of the fields are a contract for whoever reads our JSON: fields may be added, never renamed.
A user finds every record here by its name; twofour itself imports from the modules.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform  # in typing from Python 3.11 on

    @dataclass_transform(frozen_default=True, kw_only_default=True)
    def frozen(kind: object = None, /, *, repr: bool = True, eq: bool = True) -> Any:  # noqa: A002, ANN401  # those of dataclass
        """A dataclass that is frozen, has slots, and takes its fields by keyword alone."""
else:
    frozen = functools.partial(dataclasses.dataclass, frozen=True, slots=True, kw_only=True)

SUBJECTS = ("weights", "options", "export", "run", "eligibility", "latency", "log", "forecast")


def __getattr__(name: str) -> object:
    """A record by name, wherever it is: importing all of them takes longer than most commands."""
    if not name.startswith("_"):
        for subject in SUBJECTS:
            module = importlib.import_module(f"{__name__}.{subject}")
            record = getattr(module, name, None)
            if getattr(record, "__module__", None) == module.__name__:
                return record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
