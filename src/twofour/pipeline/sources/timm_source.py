"""The source `timm:NAME` (trained weights) or `timm:NAME?pretrained=false` (random ones)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from twofour.errors import BadInputError
from twofour.pipeline.sources.source import (
    SourceKind,
    SourceOptions,
    key_of,
    options_key,
    safe_name,
)

if TYPE_CHECKING:
    from twofour.pipeline.sources.loaded import LoadedModule

PREFIX = "timm:"
_PRETRAINED = {"": True, "pretrained=true": True, "pretrained=false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimmSource:
    """A model of the timm library by its name."""

    text: str
    model: str
    pretrained: bool
    options: SourceOptions

    @property
    def name(self) -> str:
        """The name timm knows it by."""
        return safe_name(self.model)

    @property
    def kind(self) -> SourceKind:
        """Always TIMM."""
        return SourceKind.TIMM

    def key(self) -> str:
        """sha256 over timm's version, the name and the options."""
        try:
            version = metadata.version("timm")
        except metadata.PackageNotFoundError:
            version = "none"
        return key_of(version, self.model, str(self.pretrained), options_key(self.options))

    def load(self) -> LoadedModule:
        """The model; raises BadInputError, and MissingToolError without timm."""
        from twofour.pipeline.sources.timm_module import (  # imports torch
            load_timm,
        )

        return load_timm(self.model, self.options, pretrained=self.pretrained)


def parse_timm(text: str, options: SourceOptions) -> TimmSource:
    """Read `timm:NAME`; raises BadInputError for another option than pretrained."""
    name, _, query = text.removeprefix(PREFIX).partition("?")
    if not name or query not in _PRETRAINED:
        raise BadInputError(
            f"{text!r} names no timm model",
            hint="write timm:resnet50, or timm:resnet50?pretrained=false for random weights",
        )
    return TimmSource(text=text, model=name, pretrained=_PRETRAINED[query], options=options)
