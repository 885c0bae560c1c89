"""What every model source offers: its name, its key, and the model itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from twofour.store import sha256_bytes, sha256_file

if TYPE_CHECKING:
    from twofour.pipeline.sources.loaded import LoadedModule


IN_MEMORY = "the module "
"""Begins the text of a source that only lives in one process; a class follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What the user says about the example inputs."""

    inputs: Path | None = None
    """.npz with one array per input (by name or in order), or .txt with a sentence per line."""
    input_shapes: tuple[tuple[int, ...], ...] = ()
    """Random float32 inputs of these shapes, in the order of forward's arguments."""
    input_shape_names: tuple[str, ...] = ()
    """The arguments those shapes are of; (): in their order."""
    seed: int = 0
    """Of every random number: example inputs, and the model a callable builds."""


class Source(Protocol):
    """A model as the user named it; nothing is loaded yet."""

    @property
    def text(self) -> str:
        """What the user wrote."""

    @property
    def name(self) -> str:
        """Default name of the run folder: letters, digits, dot, dash and underscore only."""

    def key(self) -> str:
        """sha256 over all that determines the model and its example inputs."""


class TorchSource(Source, Protocol):
    """A source that gives a torch module."""

    def load(self) -> LoadedModule:
        """Build the module and its example inputs; the same on every call.

        Raises BadInputError, and MissingToolError where an extra is not installed.
        """


def safe_name(text: str) -> str:
    """The text as a folder name on any file system; "model" where nothing of it can be kept."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "model"


def options_key(options: SourceOptions) -> str:
    """sha256 over the options and the content of the file with the inputs.

    Raises BadInputError when that file cannot be read.
    """
    content = "" if options.inputs is None else sha256_file(options.inputs)
    suffix = "" if options.inputs is None else options.inputs.suffix
    names = (str(options.input_shape_names),) if options.input_shape_names else ()
    return key_of(content, suffix, str(options.input_shapes), *names, str(options.seed))


def key_of(*parts: str) -> str:
    """sha256 over texts, each kept apart from the next."""
    return sha256_bytes(*(part.encode() for part in parts))
