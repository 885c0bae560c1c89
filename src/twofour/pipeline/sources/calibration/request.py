"""What is asked of a kind of calibration data: what the user named, for which model, how much."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from dataclasses import dataclass, field
from pathlib import Path

from twofour.errors import BadInputError
from twofour.pipeline.sources.calibration.data import ModelInputs
from twofour.records.options import CalibrationOptions


class TemporaryFolder:
    """A folder for what does not fit into memory, made when it is needed, gone with this object."""

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        self._path: Path | None = None

    def path(self) -> Path:
        """The folder; raises BadInputError where none can be made."""
        if self._path is None:
            try:
                made = tempfile.mkdtemp(
                    prefix=".calibration.data.", suffix=".part", dir=self._parent
                )
            except OSError as error:
                raise BadInputError(
                    f"no temporary folder can be made for calibration data: {error}",
                    hint="free some space, or set TMPDIR to a folder that has it",
                ) from error
            self._path = Path(made)
            weakref.finalize(self, shutil.rmtree, made, ignore_errors=True)
        return self._path


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one kind of data is opened with."""

    text: str
    """As the user wrote it."""
    path: Path
    """The same as an absolute path: user code may change the working directory."""
    options: CalibrationOptions
    inputs: ModelInputs
    seed: int = 0
    spill: TemporaryFolder = field(default_factory=TemporaryFolder)

    @property
    def settings(self) -> str:
        """Options that change what is read, as text for a key."""
        asked = self.options
        return f"{asked.samples} {asked.image_mean} {asked.image_std} {asked.image_size}"
