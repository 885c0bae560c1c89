"""The methods of pruning: one module each behind one signature, and one row each in `METHODS`."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

from twofour.errors import BadInputError
from twofour.pruning.methods import magnitude
from twofour.records.weights import Pattern


class Method(Protocol):
    """Prunes one array in its own memory, and gives sum |w| after over before.

    `bits` are the raw bits of the weights as integers, `kind` the numpy name of their type
    (`bfloat16` and the float8 types too). None for an array whose sum is 0 or no finite float64.
    """

    def __call__(
        self, bits: NDArray[Any], axis: int, pattern: Pattern, *, kind: str
    ) -> float | None:
        """What is left of the magnitudes, as a share."""


METHODS: dict[str, Method] = {
    "magnitude": magnitude.prune_bits_in_place,
}
"""Name, as `twofour.prune(method=...)` takes it and prune.json gives it -> the method."""


def method_named(name: str) -> Method:
    """The method of a name; raises BadInputError for another one."""
    if name in METHODS:
        return METHODS[name]
    raise BadInputError(
        f"there is no pruning method {name!r}", hint=f"the methods are {', '.join(METHODS)}"
    )
