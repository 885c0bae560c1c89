"""What pruning sees of calibration data: batches of the model's inputs, and what those must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from twofour.pruning.statistics import held_out_samples
from twofour.records.pruning import Calibration

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """One input of the model: of an ONNX file, or an argument of a module's forward."""

    name: str
    dtype: str | None = None
    """numpy's name of its type, or ml_dtypes'; None: not known, data keeps its own."""
    shape: tuple[int | str, ...] | None = None
    """Sizes, and names of those that are free ("?": without a name); None: not known."""
    example: tuple[int, ...] | None = None
    """Of the example inputs, where there are some."""
    required: bool = True

    @property
    def in_words(self) -> str:
        """Name, dimensions and type: x (batch x 3 x 32 x 32, float32)."""
        dims = None if self.shape is None else " x ".join(map(str, self.shape)) or "scalar"
        known = ", ".join(part for part in (dims, self.dtype) if part)
        return f"{self.name} ({known})" if known else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageScaling:
    """How pixels become what a vision model reads: resized, cut out, scaled to mean and deviation.

    Means and deviations are of each channel, on the scale 0 to 1; one value is for all channels.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: tuple[int, int] | None = None
    """Height and width; None: those of the model's input."""
    resized: float = 1.0
    """The shorter side, as a multiple of `size`, before the centre is cut out."""
    resample: str = "bilinear"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """What a model takes, and where its preprocessing is described; made in models.py."""

    model: str
    """As the user named it."""
    inputs: tuple[ModelInput, ...]
    """In the model's order."""
    positional: tuple[str, ...]
    """Those that arrays without names are for, in order."""
    floats: str | None = None
    """Type of the weights where they have one: floats of inputs of no known type become it."""
    any_name: bool = False
    """Other names are taken too (`**kwargs`)."""
    lone: bool = False
    """It takes one array and no other: what comes with it in a pair are its labels."""
    any_number: bool = False
    """More arrays than `positional` are taken (`*args`)."""
    folder: Path | None = None
    """Where its tokenizer and its image processor are described."""
    most_tokens: int | None = None
    """Of one text, where something besides the tokenizer sets a limit."""
    images: ImageScaling | None = None
    """Where the module itself says it (timm)."""

    def known(self, name: str) -> ModelInput | None:
        """The input of that name."""
        return next((one for one in self.inputs if one.name == name), None)

    @property
    def in_words(self) -> str:
        """All of them, for messages."""
        return ", ".join(one.in_words for one in self.inputs) or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Inputs of one call of the model."""

    arrays: Arrays
    """By name of the model's input, in the model's order and types; every float is finite."""
    samples: int
    """Rows of the first axis of the inputs that have one for each sample."""
    padding: NDArray[Any] | None = None
    """Booleans, samples x positions: True where a position is padding; None: none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationData:
    """Calibration data that was opened and found to fit the model."""

    source: str
    """As the user named it."""
    samples: int
    """How many `batches` gives in all."""
    notes: tuple[str, ...]
    """What the user should know: samples that are missing or could not be read."""
    read: Callable[[], Iterator[Batch]]
    content_key: Callable[[], str]
    watched: tuple[Path, ...] = ()
    """Files that the user's code read while it made them."""

    @property
    def about(self) -> Calibration:
        """The record of the data."""
        return Calibration(
            source=self.source,
            samples=self.samples,
            held_out=int(held_out_samples(0, self.samples).sum()),
            notes=self.notes,
        )

    def batches(self) -> Iterator[Batch]:
        """From the first, the same ones in the same order on every call.

        Raises BadInputError for values that are not finite and files that changed or are damaged.
        """
        return self.read()

    def key(self) -> str:
        """sha256 over the data and how they are read."""
        return self.content_key()
