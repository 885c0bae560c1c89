"""Empty the GPU code of other architectures in a library: zeros compress to nothing.

    python3 -m device.thin LIBRARY 90 TARGET

A library carries its kernels in containers, one for each kernel file, with an entry for each
architecture: machine code (a cubin) or PTX. In a container with machine code of the wanted
architecture the driver loads that entry, and the others are emptied. In one without, PTX and
machine code of the same major version stay. Headers stay everywhere, so that no offset changes.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# magic number, version, size of this header, size of all entries
_CONTAINER = struct.Struct("<IHHQ")
_MAGIC = struct.pack("<I", 0xBA55ED50)
# kind, version, size of this header, size of the code; its architecture is further on
_ENTRY = struct.Struct("<HHIQ")
_ARCHITECTURE = struct.Struct("<I")
_ARCHITECTURE_AT = 28
_PTX, _CUBIN = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The code of one architecture, at `start` in the library."""

    kind: int
    architecture: int
    start: int
    size: int


def thin(content: bytearray, architecture: int) -> int:
    """Zero what a GPU of the architecture (90 is SM 9.0) never loads; gives the bytes zeroed."""
    zeroed = 0
    for entries in _containers(content):
        exact = any(e.kind == _CUBIN and e.architecture == architecture for e in entries)
        for entry in entries:
            if not _is_loaded(entry, architecture, exact=exact):
                content[entry.start : entry.start + entry.size] = bytes(entry.size)
                zeroed += entry.size
    return zeroed


def _is_loaded(entry: Entry, architecture: int, *, exact: bool) -> bool:
    if exact:
        return entry.kind == _CUBIN and entry.architecture == architecture
    return entry.kind == _PTX or entry.architecture // 10 == architecture // 10


def _containers(content: bytearray) -> Iterator[list[Entry]]:
    at = content.find(_MAGIC)
    while at >= 0:
        entries, end = _entries(content, at)
        yield entries
        at = content.find(_MAGIC, end)


def _entries(content: bytearray, at: int) -> tuple[list[Entry], int]:
    """Entries of the container at `at`, and where to search on; none where it is not one."""
    nothing: tuple[list[Entry], int] = [], at + len(_MAGIC)
    if at + _CONTAINER.size > len(content):
        return nothing
    _, version, header, size = _CONTAINER.unpack_from(content, at)
    start, end = at + _CONTAINER.size, at + _CONTAINER.size + size
    if (version, header) != (1, _CONTAINER.size) or end > len(content):
        return nothing
    entries = []
    while start < end:
        if start + _ARCHITECTURE_AT + _ARCHITECTURE.size > end:
            return nothing
        kind, _, header, size = _ENTRY.unpack_from(content, start)
        code = start + header
        # the magic number also occurs by chance: a real container is entries from end to end
        if kind not in {_PTX, _CUBIN} or header <= _ARCHITECTURE_AT or code + size > end:
            return nothing
        (architecture,) = _ARCHITECTURE.unpack_from(content, start + _ARCHITECTURE_AT)
        entries.append(Entry(kind=kind, architecture=architecture, start=code, size=size))
        start = code + size
    return entries, end


if __name__ == "__main__":
    library, wanted, target = sys.argv[1:]
    code = bytearray(Path(library).read_bytes())
    print(Path(library).name, f"{thin(code, int(wanted)) >> 20} of {len(code) >> 20} MiB emptied")
    Path(target).write_bytes(code)
