"""A timm model as a source."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from twofour.errors import BadInputError
from twofour.export.model_code import described
from twofour.pipeline.sources.inputs import Arguments, inputs_from_options
from twofour.pipeline.sources.seeding import seed_everything
from twofour.pipeline.sources.source import (
    LoadedModule,
    import_extra,
    key_of,
    loaded_module,
    options_key,
    safe_name,
)
from twofour.records.options import ExampleInputs
from twofour.version import installed_version

if TYPE_CHECKING:
    from torch import nn


_ROWS = 2
_PREFIX = "timm:"
_PRETRAINED = {"": True, "pretrained=true": True, "pretrained=false": False}


def _create(timm: ModuleType, name: str, *, pretrained: bool) -> nn.Module:
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained)
    except Exception as error:
        reason = f"timm cannot create {name!r}: {described(error)}"
        if not pretrained:
            raise BadInputError(reason) from error
        raise BadInputError(
            reason,
            hint="its trained weights are downloaded on first use; without a network, give "
            f"timm:{name}?pretrained=false for random weights, or a file.py:callable",
        ) from error
    return model


def _images(model: nn.Module, seed: int) -> Arguments:
    import torch

    settings = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    size = settings.get("input_size") if isinstance(settings, dict) else None
    if not size:
        raise BadInputError(
            f"{type(model).__name__} does not say which images it takes",
            hint="give --input-shape 2x3x224x224",
        )
    generator = torch.Generator().manual_seed(seed)
    return Arguments(args=(torch.randn((_ROWS, *size), generator=generator),))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimmSource:
    """A model of the timm library by its name."""

    text: str
    model: str
    pretrained: bool
    options: ExampleInputs

    @property
    def name(self) -> str:
        """The name timm knows it by."""
        return safe_name(self.model)

    def key(self) -> str:
        """sha256 over timm's version, the name and the options."""
        version = installed_version("timm") or "none"
        return key_of(version, self.model, str(self.pretrained), options_key(self.options))

    def load(self) -> LoadedModule:
        """The model, with 2 random images as example inputs unless the user gives others.

        Raises BadInputError for an unknown name and for weights that cannot be had, and
        MissingToolError without timm.
        """
        timm = import_extra("timm", "timm", "a timm: model")
        if not timm.is_model(self.model.partition(".")[0]):
            close = difflib.get_close_matches(self.model, timm.list_models(), n=3)
            raise BadInputError(
                f"timm {timm.__version__} has no model {self.model!r}",
                hint=f"did you mean {', '.join(close)}?" if close else "see timm.list_models()",
            )
        seed_everything(self.options.seed)
        model = _create(timm, self.model, pretrained=self.pretrained)
        inputs = inputs_from_options(model, self.options) or _images(model, self.options.seed)
        return loaded_module(model, inputs.args, inputs.kwargs)


def is_timm(text: str, _path: Path) -> bool:
    """Whether a text begins as one of timm's names is written."""
    return text.startswith(_PREFIX)


def open_timm(text: str, options: ExampleInputs) -> TimmSource:
    """Read `timm:NAME`; raises BadInputError for another option than pretrained."""
    name, _, query = text.removeprefix(_PREFIX).partition("?")
    if not name or query not in _PRETRAINED:
        raise BadInputError(
            f"{text!r} names no timm model",
            hint="write timm:resnet50, or timm:resnet50?pretrained=false for random weights",
        )
    return TimmSource(text=text, model=name, pretrained=_PRETRAINED[query], options=options)
