"""Lines of several processes in one file, told apart by the tag each of them begins with.

Docker compose (`trainer-1  | `), torchrun (`[rank0]: `) and MPI (`[1,0]<stdout>:`) write them so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

_TAG = re.compile(
    r"(?P<tag>\[\d{1,5},\d{1,5}\]<std(?:out|err)>:|\[?(?i:rank|worker|proc|process|gpu|node)"
    r"[ _:-]?\d{1,5}\]?[:|](?= )|\d{1,5}: |[A-Za-z][\w.-]{0,60} *\|(?= ))"
)
_ONCE = re.compile(
    r"\[MemUsageChange\] Init CUDA|Loaded shared library \S*nvinfer_builder_resource"
    r"|Engine generation completed in|&&&& RUNNING|(?:Local|Global) timing cache in use"
    r"|Detected \d+ inputs and \d+ output|Input filename:|\(Sparsity\) Found \d+ layer"
)
"""What one build prints once, or nearly so."""
_MOST_TAGS = 64
_SHORTEST = 2


def tags_of(lines: Sequence[str]) -> frozenset[str]:
    """The tags of processes that each build an engine in the lines; empty where one does.

    Two must print the same message of those that one build prints once, and their lines must
    alternate; a tag that changes within one build is no process.
    """
    if not lines or sum(_TAG.match(line) is not None for line in lines[:40]) < _SHORTEST:
        return frozenset()
    tags = [match["tag"] if (match := _TAG.match(line)) else "" for line in lines]
    said: dict[str, set[str]] = {}
    for tag, line in zip(tags, lines, strict=True):
        if tag and (once := _ONCE.search(line)) is not None:
            said.setdefault(once[0], set()).add(tag)
    building = {tag for found in said.values() if len(found) > 1 for tag in found}
    if not building or len(building) > _MOST_TAGS:
        return frozenset()
    own = [tag for tag in tags if tag in building]
    if 2 * len(own) < len(lines):  # the numbers of `cat -n` are no processes
        return frozenset()
    switches = sum(a != b for a, b in pairwise(own))
    return frozenset(building) if switches >= len(building) else frozenset()


def lines_with(tag: str, lines: Sequence[str], tags: frozenset[str]) -> list[str]:
    """The lines of one process, and empty ones in the place of the others; "" has the rest."""
    found = []
    for line in lines:
        match = _TAG.match(line)
        own = match["tag"] if match is not None and match["tag"] in tags else ""
        found.append(line[len(own) :].removeprefix(" ") if own == tag else "")
    return found
