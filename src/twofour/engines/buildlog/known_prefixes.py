"""Prefixes that are the same on every line, remembered so that they are not taken apart again."""

from __future__ import annotations

from twofour.records.log import Producer

DATE_END = 22
"""Place of the tags in `[MM/DD/YYYY-HH:MM:SS] [V] [TRT] message`."""
MESSAGE = 32
"""Place of the message there."""
AFTER_DATE = {
    "[V] [TRT] ": Producer.TRTEXEC,
    "[I] [TRT] ": Producer.TRTEXEC,
    "[TRT] [V] ": Producer.PYTHON,
    "[TRT] [I] ": Producer.PYTHON,
}
BRACKETS = frozenset("([")
"""What a message behind a known prefix may not begin with: more of a prefix may follow."""
_AVERAGE = "[I] Average on "
"""trtexec's progress, the most frequent line of all and without a fact."""
_NO_LINE = "\n"
"""Begins no line."""
_MOST = 6


class KnownPrefixes:
    """Prefixes met so far that have no clock in them, with their lengths."""

    def __init__(self) -> None:
        self.first = (_NO_LINE, 0)
        """The first one met: most logs have no other."""
        self._known: list[tuple[str, int]] = []

    def length(self, line: str) -> int:
        """Length of the line's prefix, or of a whole line without a fact; 0 for any other."""
        for prefix, size in self._known:
            if line.startswith(prefix):
                return 0 if line[size : size + 1] in BRACKETS else size
        return len(line) if line.startswith(_AVERAGE, DATE_END) else 0

    def learn(self, line: str, message: str, severity: str) -> None:
        """Remember the line's prefix where it will be the same on the next lines."""
        prefix = line[: len(line) - len(message)]
        if severity not in {"V", "I", ""} or not prefix or any(c.isdigit() for c in prefix):
            return
        pair = (prefix, len(prefix))
        if len(self._known) < _MOST and pair not in self._known:
            self._known.append(pair)
            self.first = self._known[0]
