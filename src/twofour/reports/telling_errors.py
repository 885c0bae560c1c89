"""Which errors of a failed build say most: causes before what merely follows from them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from twofour.records.log import LogMessage

_FRAME = re.compile(r"--- (?:Begin|End) node ---$")
"""What the ONNX parser prints around a node, as errors too."""
_CAUSE = re.compile(
    r"ERROR: |In node -?\d|Assertion failed|not found|Could not find any implementation"
    r"|out of memory|must have|not supported|[Uu]nsupported"
)
_CONSEQUENCE = re.compile(
    r"^(?:Failed to (?:parse|create)|Parsing model failed|Engine set up failed"
    r"|Building engine failed|Skipping tactic )|buildSerializedNetwork: Error"
)


def telling_errors(errors: Iterable[LogMessage]) -> list[LogMessage]:
    """Causes first, consequences last, without the frames around a node."""
    plain = [error for error in errors if not _FRAME.search(error.text)]
    plain.sort(key=lambda e: (not _CAUSE.search(e.text), _CONSEQUENCE.search(e.text) is not None))
    return plain
