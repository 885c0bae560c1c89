"""Names in logs: lists of layers, kernels, tactic numbers, and the figures beside them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

_SEPARATOR = ", "
_BRACKET_OR_SEPARATOR = re.compile(r"[(\[{]|[)\]}]|, ")
_DOTS = re.compile(r"(?:\.{3,}|\N{HORIZONTAL ELLIPSIS})\s*(?:more)?$")
_SPARSE_KERNEL = re.compile(
    r"(?<![a-z])(?:sparse(?!_?(?:embed|lookup|attention|gather|scatter|segment))"
    r"|spmma|sptensor|spgemm|sp_mma)",
    re.IGNORECASE,
)
_GENERATED_KERNEL = "__my"
_NO_TACTIC = 0xD15EA5EDD15EA5ED
_LARGEST_MS = 3.4e38
"""TensorRT 7 prints the largest float32 where later versions print inf."""
_KEY_LENGTH = 6
_MASK = (1 << 64) - 1
_LONGEST_ID = 24


def is_sparse_kernel(kernel: str | None) -> bool | None:
    """Whether a kernel's name says that it computes on 2:4 weights; None without a name.

    Families: sm80_xmma_fprop_sparse_conv_*, sm80_xmma_fprop_avdt_sparse_*, sm80_xmma_sparse_gemm_*
    and *_sptensor* (TensorRT 10.1 to 10.16). A kernel that Myelin generates is named after the
    operations it fuses, so the word means nothing there.
    """
    if not kernel:
        return None
    return not kernel.startswith(_GENERATED_KERNEL) and _SPARSE_KERNEL.search(kernel) is not None


def normal_id(text: str | None) -> str | None:
    """A tactic number, signed decimal up to TensorRT 8.2 and hex after, as 0x and 16 digits.

    None for what is no number, and for the number that stands for "no tactic".
    """
    if not text or len(text) > _LONGEST_ID:
        return None
    try:
        value = int(text, 16 if text[:2].lower() == "0x" else 10) & _MASK
    except ValueError:
        return None
    return None if value == _NO_TACTIC else f"0x{value:016x}"


def finite_ms(value: float) -> float | None:
    """None for inf, NaN and the largest float32: all three mean that nothing was measured."""
    return value if math.isfinite(value) and 0 <= value < _LARGEST_MS else None


def number(text: str) -> float | None:
    """A finite decimal number, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def constituents(names: Iterable[str]) -> tuple[str, ...]:
    """The layers of horizontal fusions (`A || B`) one by one; brackets are kept whole."""
    return tuple(part for name in names for part in _parallel_parts(name))


class NameSplitter:
    """Splits the unquoted lists of (Sparsity) lines; knows the layer names seen elsewhere."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known = set(known)
        self._awkward: dict[str, list[str]] = {}
        for name in self._known:
            entries, depth = _bracket_split(name)
            if len(entries) != 1 or depth:
                self._awkward.setdefault(name[:_KEY_LENGTH], []).append(name)
        for names in self._awkward.values():
            names.sort(key=len, reverse=True)

    def split(self, text: str, printed: int | None) -> tuple[tuple[str, ...], bool, bool]:
        """Entries, whether the list was elided, and whether the split is uncertain."""
        text = text.strip().lstrip(",").strip()
        depth, guarded = 0, False
        entries, depth = _bracket_split(text)
        if self._awkward:
            aware, guarded = self._split_around_known(text)
            entries = aware if guarded else entries
        if depth and not guarded:
            plain = [part.strip() for part in text.split(_SEPARATOR)]
            entries = max(entries, plain, key=lambda found: self._fit(found, printed))
        names, elided = _without_dots(entries)
        return names, elided, bool(depth) or guarded

    def knows(self, name: str) -> bool:
        """Whether the name was seen as a layer elsewhere in the build."""
        return name in self._known

    def _fit(self, entries: list[str], printed: int | None) -> tuple[int, bool]:
        fits = printed is not None and printed in {len(entries), len(constituents(entries))}
        return sum(entry in self._known for entry in entries), fits

    def _split_around_known(self, text: str) -> tuple[list[str], bool]:
        entries, start, used = [], 0, False
        plain, _ = _bracket_split(text)
        ends = _ends(plain)
        while start < len(text):
            name = self._awkward_at(text, start)
            if name is None:
                end = next((e for e in ends if e > start), len(text))
                end = self._cut_at_known(text, start, end)
                name = text[start:end]
            else:
                used = True
            entries.append(name.strip())
            start += len(name) + len(_SEPARATOR)
        return entries, used

    def _cut_at_known(self, text: str, start: int, end: int) -> int:
        """End of an entry whose odd bracket hides the separator before an awkward name."""
        place = text.find(_SEPARATOR, start, end)
        while place != -1:
            after = place + len(_SEPARATOR)
            if text[start:place].strip() in self._known or self._awkward_at(text, after):
                return place
            place = text.find(_SEPARATOR, after, end)
        return end

    def _awkward_at(self, text: str, start: int) -> str | None:
        for name in self._awkward.get(text[start : start + _KEY_LENGTH], ()):
            end = start + len(name)
            if text.startswith(name, start) and (
                end >= len(text) or text.startswith(_SEPARATOR.rstrip(), end)
            ):
                return name
        return None


def _bracket_split(text: str) -> tuple[list[str], int]:
    """Split on ", " outside brackets; the second value is 0 when every bracket was paired."""
    entries, start, depth, odd = [], 0, 0, 0
    for match in _BRACKET_OR_SEPARATOR.finditer(text):
        token = match[0]
        if token in "([{":
            depth += 1
        elif token == _SEPARATOR:
            if depth == 0:
                entries.append(text[start : match.start()])
                start = match.end()
        elif depth:
            depth -= 1
        else:
            odd = 1
    entries.append(text[start:])
    return [entry.strip() for entry in entries], depth or odd


def _ends(entries: list[str]) -> list[int]:
    ends, place = [], 0
    for entry in entries:
        ends.append(place + len(entry))
        place = ends[-1] + len(_SEPARATOR)
    return ends


def _without_dots(entries: list[str]) -> tuple[tuple[str, ...], bool]:
    """Drop what an author put in the place of names (`....`, `...more`) and names cut by it."""
    names, elided = [], False
    for entry in entries:
        dots = _DOTS.search(entry)
        if dots is None:
            names.append(entry.rstrip(","))
            continue
        elided = True
        before = entry[: dots.start()]
        if before.endswith(" "):
            names.append(before.strip().rstrip(","))
    return tuple(name for name in names if name), elided


def _parallel_parts(name: str) -> list[str]:
    if " || " not in name:
        return [name]
    parts: list[str] = []
    depth = 0
    for piece in name.split(" || "):
        if depth > 0:
            parts[-1] += f" || {piece}"
        else:
            parts.append(piece)
        depth += sum(piece.count(c) for c in "([{") - sum(piece.count(c) for c in ")]}")
    return parts
