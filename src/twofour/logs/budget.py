"""A bound on what is kept, so that a log of any size is read in constant memory."""

from __future__ import annotations

RECORD_BYTES = 260
"""What one kept fact costs besides its text, measured on CPython 3.11 with its record."""
TEXT_BYTES = 50
"""What a text costs besides its characters."""
KEPT_BYTES = 40 << 20
_RESERVED_PART = 3
"""One third is kept for what matters more than one more tactic of a layer."""


class Budget:
    """Bytes that all the builds of one reading may still keep."""

    __slots__ = ("_reserved", "left")

    def __init__(self, size_bytes: int = KEPT_BYTES) -> None:
        self.left = size_bytes
        self._reserved = size_bytes // _RESERVED_PART

    def take_text(self, length: int) -> bool:
        """The same for one more text of a fact that is kept already."""
        return self.take(length + TEXT_BYTES - RECORD_BYTES)

    def take(self, text_length: int) -> bool:
        """Whether there is room for one more fact of that length; if so, it is taken."""
        cost = text_length + RECORD_BYTES
        if cost > self.left:
            return False
        self.left -= cost
        return True

    def take_spare(self, text_length: int) -> bool:
        """The same for facts whose essence is kept in any case: they leave the reserve alone."""
        cost = text_length + RECORD_BYTES
        if self.left <= self._reserved or cost > self.left:
            return False
        self.left -= cost
        return True
