"""The `predict` that a user's metric is called with, around whatever gives a model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from twofour.errors import BadInputError


def predictor(
    names: Sequence[str], outputs: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
) -> Callable[..., tuple[np.ndarray, ...]]:
    """Arrays in the order of the inputs' `names` -> the outputs in the model's order.

    Calling it with another number of arrays raises BadInputError.
    """

    def predict(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        if len(arrays) != len(names):
            raise BadInputError(
                f"predict was given {len(arrays)} arrays, "
                f"the model takes {len(names)}: {list(names)}"
            )
        return tuple(outputs(dict(zip(names, arrays, strict=True))).values())

    return predict
