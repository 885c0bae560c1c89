"""Tactics the builder did not time: scratch memory, device memory, errors."""

from __future__ import annotations

import re

from twofour.engines.buildlog.names import normal_id
from twofour.records.log import LONGEST_RAW_LINE, SkippedTactic, SkipReason

GPU_ERROR = "GPU error during getBestTactic"
_SCRATCH = re.compile(r"Tactic: (\S+) skipped\. Scratch requested: (\d+), available: (\d+)")
_SKIPPING = re.compile(
    r"Skipping tactic (?P<id>\S+) due to (?P<why>insufficient memory|oom|exception|.{0,40}error)"
    r"(?:.*?requested size of (?P<size>\d+))?(?:.*?detected for tactic (?P<real>0x\w+|-?\d+))?"
)
_LONGEST_NUMBER = 19
_LONGEST_MESSAGE = 4000


def skipped_tactic(message: str, line: int, layer: str | None) -> SkippedTactic | None:
    """The record of any of the three forms; None where the message is none of them."""
    message = message[:_LONGEST_MESSAGE].strip()
    raw = message[:LONGEST_RAW_LINE]
    scratch = _SCRATCH.match(message)
    if scratch is not None:
        return SkippedTactic(
            line=line,
            layer=layer,
            id=normal_id(scratch[1]),
            reason=SkipReason.WORKSPACE,
            requested_bytes=_bytes(scratch[2]),
            available_bytes=_bytes(scratch[3]),
            raw=raw,
        )
    match = _SKIPPING.search(message)
    if match is not None:
        memory = match["why"] in {"insufficient memory", "oom"} or match["size"]
        return SkippedTactic(
            line=line,
            layer=layer,
            id=normal_id(match["real"] or match["id"]),
            reason=SkipReason.MEMORY if memory else SkipReason.ERROR,
            requested_bytes=_bytes(match["size"]),
            raw=raw,
        )
    if GPU_ERROR not in message:
        return None
    return SkippedTactic(line=line, layer=layer, id=None, reason=SkipReason.ERROR, raw=raw)


def _bytes(text: str | None) -> int | None:
    return None if text is None else int(text[:_LONGEST_NUMBER])
