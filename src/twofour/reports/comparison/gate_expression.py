"""What `--fail-if` says: an operator and a limit for `noise` or for a ratio of two names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from twofour.errors import BadInputError

NOISE = "noise"
_EXPRESSION = re.compile(r"(?P<subject>.*\S)\s*(?P<op>>=|<=|>|<)\s*(?P<limit>\S+)", re.DOTALL)
_HINT = 'write it like "sparse/dense > 1.0" or "noise > 0.05"'
_QUOTES = ("'", '"')


@dataclass(frozen=True, slots=True, kw_only=True)
class GateExpression:
    """One expression; which variants its subject means is settled by the comparison."""

    text: str
    subject: str
    """Before the operator: "noise", or two names with a slash between."""
    operator: str
    """One of > >= < <=."""
    limit: float

    @property
    def upward(self) -> bool:
        """Values above the limit fail."""
        return self.operator in (">", ">=")

    def holds_for(self, value: float) -> bool:
        """Whether `value OP limit` is true."""
        return self.beyond(value, self.limit)

    def beyond(self, value: float, limit: float) -> bool:
        """Whether `value OP limit` is true for another limit than its own."""
        if self.operator in (">=", "<=") and value == limit:
            return True
        return value > limit if self.upward else value < limit

    def splits(self) -> Iterator[tuple[str, str]]:
        """Every way to read the subject as A / B, as names may hold slashes themselves."""
        for match in re.finditer("/", self.subject):
            before, after = self.subject[: match.start()], self.subject[match.end() :]
            yield before.strip(), after.strip()


def parse_fail_if(text: str) -> GateExpression:
    """Read `A / B OP NUMBER` or `noise OP NUMBER`, OP one of > >= < <=.

    Raises BadInputError for anything else, and for a limit that no ratio or noise can have.
    """
    match = _EXPRESSION.fullmatch(text.strip())
    if match is None:
        raise BadInputError(f"--fail-if: {text!r} is no condition", hint=_HINT)
    subject = match["subject"].strip()
    if subject != NOISE and "/" not in subject:
        raise BadInputError(f"--fail-if: {subject!r} is neither noise nor a ratio", hint=_HINT)
    limit = _number(match["limit"])
    if limit is None or limit < 0 or (limit == 0 and subject != NOISE):
        raise BadInputError(f"--fail-if: {match['limit']!r} is no limit for a ratio", hint=_HINT)
    return GateExpression(text=text, subject=subject, operator=match["op"], limit=limit)


def unquoted(name: str) -> str:
    """The name without the quotes around it."""
    quoted = len(name) > 1 and name[0] == name[-1] and name[0] in _QUOTES
    return name[1:-1] if quoted else name


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
