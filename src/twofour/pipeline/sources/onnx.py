"""The source `file.onnx`: used as it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from twofour.errors import BadInputError
from twofour.graph.opened import OpenedModel, OpenedModels
from twofour.pipeline.sources.source import key_of, options_key, path_of, safe_name
from twofour.records.options import ExampleInputs
from twofour.store import sha256_file


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxSource:
    """An ONNX file; whether it is a sound one is found when the graph is read."""

    text: str
    path: Path
    options: ExampleInputs
    models: OpenedModels = field(default_factory=OpenedModels, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The file's stem."""
        return safe_name(self.path.stem)

    def key(self) -> str:
        """sha256 over the file, its external data and the options.

        A damaged model is left to the reader of the graph, and is not hashed: it may be large.
        Raises BadInputError when a file cannot be read.
        """
        try:
            self.opened()
        except BadInputError:
            return key_of("damaged", self.path.name, options_key(self.options))
        files = (self.path, *self.data_files())
        parts = (part for file in files for part in (file.name, sha256_file(file)))
        return key_of(*parts, options_key(self.options))

    def opened(self) -> OpenedModel:
        """The graph, parsed once while the file stays as it is; raises BadInputError."""
        return self.models.open(self.path)

    def data_files(self) -> tuple[Path, ...]:
        """Files beside it that hold its weights, sorted; () where the model is damaged.

        What is missing or points outside is for the reader of the graph to complain about, and
        must not be opened here (it could be a device).
        """
        try:
            return tuple(sorted(self.opened().data_files))
        except BadInputError:
            return ()

    def refuse_changed(self, read: OpenedModel) -> None:
        """Raises BadInputError where the files are no longer those that were opened, and hashed."""
        if not read.is_as_it_was():
            raise BadInputError(
                f"{self.path}, or its data, was changed while it was read",
                hint="wait until what writes it is done; the same command begins anew",
            )


def is_onnx(_text: str, path: Path) -> bool:
    """Whether there is a file of that suffix."""
    return path.is_file() and path.suffix.lower() == ".onnx"


def open_onnx(text: str, options: ExampleInputs) -> OnnxSource:
    """The file, unread."""
    return OnnxSource(text=text, path=path_of(text), options=options)
