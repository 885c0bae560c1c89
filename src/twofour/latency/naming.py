"""Names of the variants of a comparison: `weights@engine:mode`, ` again`, `:b8`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from twofour.errors import BadInputError

_WORD = r"[^@:\s]+"
_NAME = re.compile(
    rf"(?P<weights>.*)@(?P<engine>{_WORD}):(?P<mode>{_WORD})"
    r"(?P<again> again)?(?::b(?P<batch>\d+))?",
    re.DOTALL,
)
_BATCH = re.compile(r":b\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantName:
    """What a variant's name says."""

    weights: str
    engine: str
    mode: str
    again: bool
    """The second opening of the variant, for the noise."""
    batch: int | None
    """Of a sweep; None where there is none."""

    @property
    def engine_mode(self) -> str:
        """engine:mode, as --engines takes it."""
        return f"{self.engine}:{self.mode}"


def variant_name(
    weights: str, engine: str, mode: str, *, again: bool = False, batch: int | None = None
) -> str:
    """`sparse@onnxruntime:cpu`, `dense@onnxruntime:cpu again`, `dense@onnxruntime:cpu again:b8`.

    `weights` may be any text; engine and mode are words without "@", ":" and white space, which is
    what makes the name readable from its end.
    """
    twin = " again" if again else ""
    sweep = "" if batch is None else f":b{batch}"
    return f"{weights}@{engine}:{mode}{twin}{sweep}"


def parse_variant_name(name: str) -> VariantName:
    """The inverse of `variant_name`; raises BadInputError for what is no variant's name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise BadInputError(
            f"{name!r} is not the name of a variant", hint="one is like dense@onnxruntime:cpu"
        )
    return VariantName(
        weights=match["weights"],
        engine=match["engine"],
        mode=match["mode"],
        again=match["again"] is not None,
        batch=None if match["batch"] is None else int(match["batch"]),
    )


def without_batch(name: str) -> str:
    """The name as it is outside of a sweep, and as LatencyComparison.baseline has it."""
    parse_variant_name(name)
    return _BATCH.sub("", name)
