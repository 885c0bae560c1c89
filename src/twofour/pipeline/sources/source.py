"""What every model source offers: its name, its key, and the model itself."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from twofour.records.options import ExampleInputs
from twofour.store import sha256_bytes, sha256_file

if TYPE_CHECKING:
    from twofour.pipeline.sources.loaded import LoadedModule


IN_MEMORY = "the module "
"""Begins the text of a source that only lives in one process; a class follows."""


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


def options_key(options: ExampleInputs) -> str:
    """sha256 over the options and the content of the file with the inputs.

    Raises BadInputError when that file cannot be read.
    """
    content = "" if options.file is None else sha256_file(options.file)
    suffix = "" if options.file is None else options.file.suffix
    names = (str(options.input_shape_names),) if options.input_shape_names else ()
    return key_of(content, suffix, str(options.input_shapes), *names, str(options.seed))


def key_of(*parts: str) -> str:
    """sha256 over texts, each kept apart from the next."""
    return sha256_bytes(*(part.encode() for part in parts))
