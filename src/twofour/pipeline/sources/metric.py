"""The user's own evaluation, `file.py:evaluate`: a function of a predict function."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofour.errors import BadInputError
from twofour.pipeline.sources.seeding import seed_everything
from twofour.pipeline.sources.user_code import (
    CodeReference,
    import_attribute,
    parse_reference,
    required_arguments,
    user_code,
)

if TYPE_CHECKING:
    import numpy as np

_HINT = "write def evaluate(predict): ... that returns a number, or a dict of numbers by name"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserMetric:
    """A function of the user's, and where it came from."""

    reference: CodeReference
    function: Callable[[Callable[..., object]], object]


def load_metric(text: str) -> UserMetric:
    """Import `file.py:evaluate` or `package.module:evaluate`.

    Raises BadInputError when it cannot be imported or cannot be called with one argument.
    """
    reference = parse_reference(text)
    function = import_attribute(reference)
    if not callable(function):
        raise BadInputError(f"{text} is of type {type(function).__name__}, no function", hint=_HINT)
    _check_signature(text, function)
    return UserMetric(reference=reference, function=function)


def _check_signature(text: str, function: Callable[..., object]) -> None:
    needed = required_arguments(function)
    if len(needed) > 1:
        raise BadInputError(
            f"{text} needs {len(needed)} arguments: {', '.join(needed)}", hint=_HINT
        )
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise BadInputError(f"{text} cannot be called with predict: {error}", hint=_HINT) from error
    except ValueError:  # a builtin that does not tell
        return


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


def run_metric(
    metric: UserMetric, predict: Callable[..., object], *, seed: int = 0
) -> dict[str, float]:
    """Figures by name for one variant; a lone number is called like the function.

    Random numbers are seeded, so that two variants see the same samples. Raises BadInputError
    for a metric that fails or returns anything else than finite numbers.
    """
    seed_everything(seed)
    with user_code(metric.reference, "raised"):
        value = metric.function(predict)
    if isinstance(value, Mapping) and value:
        return {str(name): _number(metric, str(name), v) for name, v in value.items()}
    name = metric.reference.attribute.rpartition(".")[2]
    return {name: _number(metric, name, value)}


def _number(metric: UserMetric, name: str, value: object) -> float:
    """Also numpy scalars and tensors of one element, which have `item`."""
    item = getattr(value, "item", None)
    if callable(item):
        with user_code(metric.reference, f"returned no single number for {name!r}:"):
            value = item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise BadInputError(
            f"{metric.reference.text} returned {name} of type {type(value).__name__}, no number",
            hint=_HINT,
        )
    if not math.isfinite(value):
        raise BadInputError(f"{metric.reference.text} returned {name} = {value}", hint=_HINT)
    return float(value)
