"""What no row names, in words: which ops use it, and whether the shares count it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twofour.records.weights import NotCovered
from twofour.reports.words import count, printable

NOT_COVERED = "not covered"
NO_FACTOR = "no factor"
"""The same in one word, of embeddings, biases and what else no product multiplies with."""


def count_not_covered(groups: Iterable[NotCovered], *, multiplies: bool) -> int:
    """Weights that shares count, or those that they do not."""
    return sum(group.weights for group in groups if group.multiplies is multiplies)


def uses_of(groups: Iterable[NotCovered]) -> str:
    """Ops with the number of nodes or modules: "LSTM (2), Einsum (4)"."""
    return ", ".join(f"{printable(group.op)} ({group.uses:,})" for group in groups)


def not_covered_lines(groups: Sequence[NotCovered]) -> tuple[str, ...]:
    """A line on what is neither pruned nor judged, and one on what does no matrix product."""
    factors = [group for group in groups if group.multiplies]
    others = [group for group in groups if not group.multiplies]
    lines = []
    if factors:
        weights = count(count_not_covered(factors, multiplies=True), "weight")
        lines.append(f"{NOT_COVERED}: {weights} in {uses_of(factors)}: neither pruned nor judged")
    if others:
        values = count(count_not_covered(others, multiplies=False), "value")
        lines.append(f"no factors of matrix products: {values} in {uses_of(others)}")
    return tuple(lines)
