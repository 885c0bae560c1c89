"""How the network changes: layers renamed, fused, merged, removed, turned into another kind."""

from __future__ import annotations

import re
from collections.abc import Callable

from twofour.records.log import Fusion, FusionKind, RenamedLayer

FUSING = ": Fusing "
REGISTERING = "Registering layer: "
_FOR_NODE = " for ONNX node: "
_SWAP = re.compile(r"Swap the layer type of (.*) from (\w+) to (\w+)$")
_TRANSFORM = re.compile(r"Running: (\w*Transform\w*) on (.*)$")


def fused(message: str, line: int) -> Fusion | None:
    """`RULE: Fusing A with B`."""
    rule, found, rest = message.partition(FUSING)
    first, between, second = rest.partition(" with ")
    if not found or not between or " " in rule.strip():
        return None
    return Fusion(
        line=line, kind=FusionKind.FUSED, rule=rule.strip(), layers=(first, second.strip())
    )


def renamed(message: str) -> RenamedLayer | None:
    """`Registering layer: A for ONNX node: B` where the names differ."""
    layer, found, node = message[len(REGISTERING) :].partition(_FOR_NODE)
    layer, node = layer.strip(), node.strip()
    if not found or not layer or not node or layer == node:
        return None
    return RenamedLayer(layer=layer, node=node)


def _merged(message: str, line: int) -> Fusion | None:
    names = message[len("Merging layers: ") :].strip()
    layers = tuple(names.split(" || "))
    return Fusion(line=line, kind=FusionKind.MERGED, rule=None, layers=layers) if names else None


def _removed(message: str, line: int) -> Fusion | None:
    name = message[len("Removing ") :].strip()
    return Fusion(line=line, kind=FusionKind.REMOVED, rule=None, layers=(name,)) if name else None


def _swapped(message: str, line: int) -> Fusion | None:
    match = _SWAP.match(message)
    if match is None:
        return None
    rule = f"{match[2]} to {match[3]}"
    return Fusion(line=line, kind=FusionKind.SWAPPED, rule=rule, layers=(match[1],))


def _transformed(message: str, line: int) -> Fusion | None:
    match = _TRANSFORM.match(message)
    if match is None:
        return None
    layers = (match[2].strip(),)
    return Fusion(line=line, kind=FusionKind.TRANSFORMED, rule=match[1], layers=layers)


BY_START: tuple[tuple[str, Callable[[str, int], Fusion | None]], ...] = (
    ("Merging layers: ", _merged),
    ("Removing ", _removed),
    ("Swap the layer type of ", _swapped),
    ("Running: ", _transformed),
)
