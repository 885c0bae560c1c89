"""The source `file.py:callable` or `package.module:callable`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofour.pipeline.sources.reference import CodeReference, reference_key
from twofour.pipeline.sources.source import (
    SourceKind,
    SourceOptions,
    key_of,
    options_key,
    safe_name,
)

if TYPE_CHECKING:
    from twofour.pipeline.sources.loaded import LoadedModule


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableSource:
    """User code that returns a module, or a module and example inputs."""

    text: str
    reference: CodeReference
    options: SourceOptions

    @property
    def name(self) -> str:
        """File or module, and callable: two files often both have a `make`."""
        file = self.reference.file
        module = file.stem if file is not None else self.reference.target.rpartition(".")[2]
        return safe_name(f"{module}-{self.reference.attribute}")

    @property
    def kind(self) -> SourceKind:
        """Always CALLABLE."""
        return SourceKind.CALLABLE

    def key(self) -> str:
        """sha256 over the user's code (what it imports of their own included) and the options.

        Data the code reads when it runs is not seen. Raises BadInputError for a missing module.
        """
        return key_of(reference_key(self.reference), options_key(self.options))

    def load(self) -> LoadedModule:
        """Import and call it, with all random numbers seeded; raises BadInputError."""
        from twofour.pipeline.sources.callable_module import (  # imports torch
            load_callable,
        )

        return load_callable(self.reference, self.options)
