"""Where a TensorRT takes the types of layers from, by its version: precision flags or the graph."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from twofour.errors import BadInputError
from twofour.records.options import AllowedType


class Typing(str, Enum):
    """Where the builder takes the types of layers from."""

    WEAK = "weak"
    """Precision flags allow types; the graph's own are a suggestion."""
    STRONG_BY_FLAG = "strong by flag"
    STRONG = "strong"
    """There are no weakly typed networks any more (11.0 migration guide)."""


WEAK_IS_DEPRECATED = (10, 12)
DEPRECATED = (
    "weakly typed builds (--fp16, --int8, --bf16) are deprecated from TensorRT 10.12 on and gone "
    "in 11: --precision float16 writes the type into the file"
)


def typing_of(version: Sequence[int]) -> Typing | None:
    """Of a version in numbers; None for (), a version that is not known."""
    if not version:
        return None
    if version[0] < 10:
        return Typing.WEAK
    return Typing.STRONG_BY_FLAG if version[0] == 10 else Typing.STRONG


def never_weakly_typed(version: str, allowed: AllowedType) -> BadInputError:
    """For a type that is to be allowed where types come from the graph alone."""
    return BadInputError(
        f"TensorRT {version} builds strongly typed networks only: --{allowed.value} came to an end "
        "with TensorRT 10",
        hint="write the type into the file: --precision float16",
    )
