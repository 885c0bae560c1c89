"""Names of engine layers taken apart, and compared with those of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from twofour.records.export import GraphNode

_POINTWISE = "PWN("
REGION, _REGION_END = "{ForeignNode[", "]}"
_DOTS = "..."
_ENDS = re.compile(r" \+ | \|\| |, |\)")
_SEPARATORS = re.compile(r" *(?: \+ | \|\| |, )")
_TOKENS = re.compile(r" \+ | \|\| |, |[(\[{)\]}]")
_REGION_TOKENS = re.compile(r"\{ForeignNode\[|\]\}")
_LONGEST_END = 4
_MOST_ENDS = 64
"""Ends tried for a known name that holds separators itself."""


_LONGEST_QUOTED = 2_000
"""Characters of a name in the row of each layer it holds; real ones have some hundreds."""


def quoted_name(name: str) -> str:
    """The name for a row of the report: of a very long one, which many rows have, the beginning."""
    return name if len(name) <= _LONGEST_QUOTED else name[:_LONGEST_QUOTED] + _DOTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One layer that went into an engine layer, or a Myelin region with its two ends."""

    text: str
    first: tuple[str, ...] | None = None
    """For a region: the layers named before the dots; None for a plain layer."""
    last: tuple[str, ...] = ()
    """For a region: the layers named after the dots; () where it names one place alone."""

    @property
    def is_region(self) -> bool:
        """Whether it stands for all nodes between two."""
        return self.first is not None


@dataclass(frozen=True, slots=True)
class KnownNames:
    """Names that are taken whole wherever they stand, separators and brackets in them included."""

    names: Set[str]
    most_ends: int
    """Separators in the name that has the most of them."""
    longest: int

    @classmethod
    def of(cls, names: Iterable[str]) -> KnownNames:
        """Count once how far a name may reach."""
        known = frozenset(name for name in names if name)
        ends = max((len(_ENDS.findall(name)) for name in known), default=0)
        return cls(known, min(ends, _MOST_ENDS), max(map(len, known), default=0))


NO_NAMES = KnownNames.of(())
"""Where there is no model, so that names are split by their separators alone."""


def split_name(name: str, known: KnownNames) -> tuple[Part, ...]:
    """The parts of an engine layer's name, in its order; never empty unless the name is."""
    if name in known.names:
        return (Part(text=name),)
    return tuple(_parts(name, known))


def _parts(name: str, known: KnownNames) -> Iterator[Part]:
    at = depth = 0
    while at < len(name):
        end = _known_end(name, at, known)
        if end is None and name.startswith(_POINTWISE, at):
            depth += 1
            at += len(_POINTWISE)
            continue
        if end is None and name.startswith(REGION, at):
            end = _region_end(name, at)
            yield _region(name[at:end], known)
        else:
            end = end if end is not None else _plain_end(name, at, inside=depth > 0)
            if text := name[at:end].strip():
                yield Part(text=text)
        while depth and name.startswith(")", end):
            depth -= 1
            end += 1
        separator = _SEPARATORS.match(name, end)
        at = separator.end() if separator else max(end, at + 1)


def _known_end(name: str, at: int, known: KnownNames) -> int | None:
    """Where the longest known name that starts here ends, if a separator follows it."""
    ends: list[int] = []
    horizon = at + known.longest + _LONGEST_END
    for match in _ENDS.finditer(name, at, horizon):
        ends.append(match.start())
        if len(ends) > known.most_ends:
            break
    else:
        ends.append(min(len(name), horizon))
    return next((end for end in reversed(ends) if name[at:end] in known.names), None)


def _plain_end(name: str, at: int, *, inside: bool) -> int:
    """Where an unknown name ends: a separator, or a closing bracket of PWN, at its own depth 0."""
    depth = 0
    for match in _TOKENS.finditer(name, at):
        found = match[0]
        if found in ("(", "[", "{"):
            depth += 1
        elif found in (")", "]", "}"):
            if depth == 0 and found == ")" and inside and match.start() > at:
                return match.start()
            depth = max(depth - 1, 0)
        elif depth == 0 and match.start() > at:
            return match.start()
    return len(name)


def _region_end(name: str, at: int) -> int:
    depth = 0
    for match in _REGION_TOKENS.finditer(name, at):
        depth += 1 if match[0] == REGION else -1
        if depth == 0:
            return match.end()
    return len(name)


def _region(text: str, known: KnownNames) -> Part:
    inner = text[len(REGION) :].removesuffix(_REGION_END)
    left, _, right = (inner, "", "") if inner in known.names else inner.partition(_DOTS)
    return Part(text=text, first=_plain_texts(left, known), last=_plain_texts(right, known))


def _plain_texts(text: str, known: KnownNames) -> tuple[str, ...]:
    """Names at one end of a region."""
    if text in known.names or REGION in text:
        return (text,)
    return tuple(part.text for part in _parts(text, known))


_UNNAMED = re.compile(r"\(Unnamed Layer\* (\d{1,9})\) \[([^\[\]]{1,80})\]")
_KINDS: Mapping[str, frozenset[str]] = {
    "Convolution": frozenset({"Conv"}),
    "Deconvolution": frozenset({"ConvTranspose"}),
    "Fully Connected": frozenset({"Gemm", "MatMul"}),
    "Matrix Multiply": frozenset({"Gemm", "MatMul"}),
}


def number_unnamed(
    names: Iterable[str], nodes: Sequence[GraphNode], named: Set[int]
) -> dict[str, int]:
    """Node of each unnamed layer in the names; `named` are the nodes that have another name."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        for match in _UNNAMED.finditer(name):
            numbers.setdefault(match[2], set()).add(int(match[1]))
    found: dict[str, int] = {}
    for kind, seen in numbers.items():
        ops = _KINDS.get(kind, frozenset())
        free = [i for i, node in enumerate(nodes) if node.op in ops and i not in named]
        if len(free) == len(seen):
            for number, index in zip(sorted(seen), free, strict=True):
                found[f"(Unnamed Layer* {number}) [{kind}]"] = index
    return found


_TORCH_NAME = re.compile(
    r"\[(?P<kind>[^\[\]]*)\]-\[[^\[\]]*\]-\[(?P<path>[^\[\]]*)\]"
    r"|(?<!ForeignNode)\[(?P<bare>[^\[\]\s:]*/[^\[\]\s:]*)\]"
)
"""`[CONVOLUTION]-[aten_ops.convolution.default]-[/conv1/convolution]`, `[conv1/convolution]`."""
_PRODUCT = re.compile(r"conv|matrix|matmul|fully|linear|gemm|mm(?:_|$)", re.IGNORECASE)


def module_path(name: str) -> str:
    """`layer1.0.conv1` of `/layer1/layer1.0/conv1`, of `layer1/0/conv1` and of itself.

    The exporter of torch.jit repeats the path inside of a container: `layer1`, `layer1.0`.
    """
    found: list[str] = []
    for piece in filter(None, name.split("/")):
        if found and piece.startswith(found[-1] + "."):
            found.pop()
        found.append(piece)
    return ".".join(found)


def paths_of_torch_name(name: str) -> tuple[str, ...]:
    """Dotted paths that a name of Torch-TensorRT may mean, the one without its last piece first."""
    match = _TORCH_NAME.fullmatch(name)
    if match is None:
        return ()
    path = (match["path"] or match["bare"] or "").strip("/")
    return tuple(p for p in (module_path(path.rpartition("/")[0]), module_path(path)) if p)


def is_product(name: str) -> bool:
    """Whether a name of Torch-TensorRT is that of a product, and not of its bias or activation."""
    match = _TORCH_NAME.fullmatch(name)
    if match is None:
        return False
    return _PRODUCT.search(match["kind"] or (match["bare"] or "").rpartition("/")[2]) is not None


def paths_of_layer(node: str | None, weight: str | None) -> tuple[str, ...]:
    """Dotted paths that the names of an ONNX node and its weight state, the weight's first."""
    found = [weight.rpartition(".")[0]] if weight and not weight.startswith("onnx::") else []
    scope = (node or "").rpartition("/")[0]
    return tuple(dict.fromkeys(p for p in (*found, module_path(scope)) if p))


_BESIDE = " || "
MOST_SIBLINGS = 64
"""Of one layer; one name that joined 20,000 nodes took 8 GB when each knew all the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """The layers that one layer of the model is fused with, and the name they have together."""

    name: str
    nodes: tuple[int, ...]
    """Indices of the others, in the order of the graph; the first 64 of them."""


def find_siblings(
    together: Iterable[tuple[str, Sequence[int]]], nodes: Sequence[GraphNode], rows: Set[int]
) -> Mapping[int, Siblings]:
    """By node of a row; `together` are names of engine and log with the nodes that each holds.

    `A || B` is the builder's own sign of it; of other names those nodes count that share an input.
    The first name that tells of a node is taken, and the first 65 nodes of each name.
    """
    found: dict[int, Siblings] = {}
    for name, held in together:
        members = [at for at in dict.fromkeys(held) if at in rows][: MOST_SIBLINGS + 1]
        data = {at: _data(nodes[at]) for at in members}
        for at in members:
            others = tuple(
                other
                for other in members
                if other != at
                and (
                    not data[at].isdisjoint(data[other])
                    # of a node whose inputs are not known nothing but the name tells
                    or (_BESIDE in name and not (nodes[at].inputs and nodes[other].inputs))
                )
            )
            if others and at not in found:
                found[at] = Siblings(name=name, nodes=others)
    return found


def _data(node: GraphNode) -> set[str]:
    return {name for name in node.inputs if name and name not in node.constants}
