"""Names in logs: lists of layers, kernels, tactic numbers, and the figures beside them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import lru_cache

_SEPARATOR = ", "
_BRACKET_OR_SEPARATOR = re.compile(r"[(\[{]|[)\]}]|, ")
_MORE = r"(?:and |\+ ?)?\d{1,6} (?:more|others)(?: layers?| names)?"
_DOTS_OR_WORD = (
    r"\.{2,}|\N{HORIZONTAL ELLIPSIS}"
    r"|(?i:snip(?:ped)?|truncated|omitted|elided|shortened|removed|left out|redacted|cut)"
)
_DOTS = re.compile(
    rf"(?:^|(?<=[ ,]))[\[(<](?:{_DOTS_OR_WORD}|{_MORE})[^\])>]{{0,40}}[\])>]$"
    rf"|(?:^|(?<=[ ,]))[\[(<](?:\w{{1,20}} ){{1,5}}(?:{_DOTS_OR_WORD})[^\])>]{{0,40}}[\])>]$"
    r"|(?:^|(?<=, ))<[^<>]{1,60}>$"
    rf"|(?:^|(?<= )){_MORE}$"
    rf"|(?:\.{{3,}}|\N{{HORIZONTAL ELLIPSIS}})\s*(?:more|{_MORE}|[\[(<][^\])>]{{1,40}}[\])>])?$"
)
"""How authors say that they left names out: `....`, `...more`, `[truncated]`, `and 12 more`."""
_SPARSE_KERNEL = re.compile(
    r"(?<![a-z])(?:sparse(?!_?(?:embed|lookup|attention|gather|scatter|segment))"
    r"|spmma|sptensor|spgemm|sp_mma)",
    re.IGNORECASE,
)
_GENERATED_KERNEL = "__my"
_NO_TACTIC = 0xD15EA5EDD15EA5ED
_LARGEST_MS = 3.4e38
"""TensorRT 7 prints the largest float32 where later versions print inf."""
_PROFILE = re.compile(r" \[profile (\d{1,6})\]")
_KERNELS = 4096
"""Names remembered: a log times the same few hundred kernels for every layer."""
_MASK = (1 << 64) - 1
_LONGEST_ID = 24
_ID_LENGTH = 18


@lru_cache(maxsize=_KERNELS)
def is_sparse_kernel(kernel: str | None) -> bool | None:
    """Whether a kernel's name says that it computes on 2:4 weights; None without a name.

    Families: sm80_xmma_fprop_sparse_conv_*, sm80_xmma_fprop_avdt_sparse_*, sm80_xmma_sparse_gemm_*
    and *_sptensor* (TensorRT 10.1 to 10.16). A kernel that Myelin generates is named after the
    operations it fuses, so the word means nothing there.
    """
    if not kernel:
        return None
    if "sp" not in kernel.lower() or kernel.startswith(_GENERATED_KERNEL):
        return False
    return _SPARSE_KERNEL.search(kernel) is not None


def normal_id(text: str | None) -> str | None:
    """A tactic number, signed decimal up to TensorRT 8.2 and hex after, as 0x and 16 digits.

    None for what is no number, and for the number that stands for "no tactic".
    """
    if not text or len(text) > _LONGEST_ID:
        return None
    is_hex = text[:2].lower() == "0x"
    try:
        value = int(text, 16 if is_hex else 10) & _MASK
    except ValueError:
        return None
    if value == _NO_TACTIC:
        return None
    is_normal = is_hex and len(text) == _ID_LENGTH and text.isalnum() and text.islower()
    return text if is_normal else f"0x{value:016x}"


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

    def split(self, text: str, printed: int | None) -> tuple[tuple[str, ...], bool, bool]:
        """Entries, whether the list was elided, and whether the split is uncertain.

        Where a bracket has no partner, the split is taken that gives more of the known names.
        """
        text = text.strip().lstrip(",").strip()
        entries, odd = _entries(text)
        if odd:
            plain = [part.strip() for part in text.split(_SEPARATOR)]
            entries = max(entries, plain, key=lambda found: self._fit(found, printed))
        names, elided = _without_dots(entries)
        return names, elided, odd

    def knows(self, name: str) -> bool:
        """Whether the name was seen as a layer elsewhere in the build."""
        return name in self._known

    def _fit(self, entries: list[str], printed: int | None) -> tuple[int, bool]:
        fits = printed is not None and printed in {len(entries), len(constituents(entries))}
        return sum(entry in self._known for entry in entries), fits


def _entries(text: str) -> tuple[list[str], bool]:
    """The entries, parted by ", " outside of brackets; whether a bracket has no partner."""
    entries, start, depth, odd = [], 0, 0, False
    for match in _BRACKET_OR_SEPARATOR.finditer(text):
        found = match[0]
        if found in {"(", "[", "{"}:
            depth += 1
        elif found == _SEPARATOR:
            if depth == 0:
                entries.append(text[start : match.start()].strip())
                start = match.end()
        elif depth:
            depth -= 1
        else:
            odd = True
    return [*entries, text[start:].strip()] if start < len(text) else entries, odd or depth > 0


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


def without_profile(name: str) -> str:
    """The layer's or tensor's name: TensorRT marks copies for further optimization profiles."""
    end = len(name)
    while (marked := _profile_before(name, end)) is not None:
        end = marked.start()
    return name[:end]


def profile_of(name: str) -> int:
    """Number of the optimization profile in a name; 0, the first one, is not written."""
    marked = _profile_before(name, len(name))
    return 0 if marked is None else int(marked[1])


def _profile_before(name: str, end: int) -> re.Match[str] | None:
    """The mark that ends there; a pattern of several would try every place of a long name."""
    if name[end - 1 : end] != "]":
        return None
    start = name.rfind(" [", 0, end)
    return None if start < 0 else _PROFILE.fullmatch(name, start, end)


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
