"""The source "Hugging Face checkpoint folder"."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.pipeline.sources.arrays import read_sentences
from twofour.pipeline.sources.checkpoint import read_checkpoint
from twofour.pipeline.sources.source import (
    SourceKind,
    SourceOptions,
    key_of,
    options_key,
    safe_name,
)
from twofour.store import sha256_file

if TYPE_CHECKING:
    from twofour.pipeline.sources.loaded import LoadedModule


@dataclass(frozen=True, slots=True, kw_only=True)
class HfSource:
    """A folder with config.json and weights, as save_pretrained writes it."""

    text: str
    folder: Path
    options: SourceOptions

    @property
    def name(self) -> str:
        """The folder's own name."""
        return safe_name(self.folder.resolve().name)

    @property
    def kind(self) -> SourceKind:
        """Always HF."""
        return SourceKind.HF

    def key(self) -> str:
        """sha256 over config, weights, tokenizer, example inputs and transformers' version.

        Raises BadInputError when the folder is no whole checkpoint.
        """
        checkpoint = read_checkpoint(self.folder)
        parts = [
            part
            for file in checkpoint.files
            for part in (str(file.relative_to(self.folder)), sha256_file(file))
        ]
        if self.options.inputs is None:
            parts.extend(read_sentences(None))
        return key_of(*parts, _transformers_version(), options_key(self.options))

    def load(self) -> LoadedModule:
        """The model with its trained weights in float32.

        Raises BadInputError for a damaged or unsafe checkpoint, and MissingToolError without
        transformers.
        """
        from twofour.pipeline.sources.hf import (  # torch takes a second to import
            load_checkpoint,
        )

        return load_checkpoint(read_checkpoint(self.folder), self.options)


def _transformers_version() -> str:
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return "none"
