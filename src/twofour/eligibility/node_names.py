"""Names of engine layers taken apart, and looked up among the names of the model's nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

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
"""Ends tried for a known name that contains separators itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamePart:
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
"""The known names where there is no model: names are split by their separators alone."""


def split_name(name: str, known: KnownNames) -> tuple[NamePart, ...]:
    """The parts of an engine layer's name, in its order; never empty unless the name is."""
    if name in known.names:
        return (NamePart(text=name),)
    return tuple(_parts(name, known))


def _parts(name: str, known: KnownNames) -> Iterator[NamePart]:
    # `PWN(PWN(/act/Sigmoid, /act/Mul), /add/Add) + {ForeignNode[/a/MatMul.../b/Add]}` gives the
    # parts /act/Sigmoid, /act/Mul, /add/Add and one region. `depth` counts the open `PWN(`, whose
    # closing brackets belong to no name; brackets of a name itself, `Conv(1)`, stay in it.
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
                yield NamePart(text=text)
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


def _region(text: str, known: KnownNames) -> NamePart:
    inner = text[len(REGION) :].removesuffix(_REGION_END)
    left, _, right = (inner, "", "") if inner in known.names else inner.partition(_DOTS)
    first, last = (
        (end,)
        if end in known.names or REGION in end
        else tuple(part.text for part in _parts(end, known))
        for end in (left, right)
    )
    return NamePart(text=text, first=first, last=last)


# --- names of Torch-TensorRT ----------------------------------------------------------------------

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


def paths_of_layer(node: str | None, weight: str | None) -> tuple[str, ...]:
    """Dotted paths that the names of an ONNX node and its weight state, the weight's first."""
    found = [weight.rpartition(".")[0]] if weight and not weight.startswith("onnx::") else []
    scope = (node or "").rpartition("/")[0]
    return tuple(dict.fromkeys(p for p in (*found, module_path(scope)) if p))


# --- the model's nodes ----------------------------------------------------------------------------


class Dataflow:
    """Neighbours of every node by index, the nodes in topological order, those of constants alone.

    Linear in nodes and edges.
    """

    def __init__(self, nodes: Sequence[GraphNode]) -> None:
        self.fixed = _fixed(nodes)
        """Nodes whose inputs are all constants: builders fold them."""
        makers = {name: at for at, node in enumerate(nodes) for name in node.outputs if name}
        self.before: list[tuple[int, ...]] = []
        """The nodes that each node waits for."""
        after: list[list[int]] = [[] for _ in nodes]
        for at, node in enumerate(nodes):
            given = (makers.get(name) for name in node.inputs if name not in node.constants)
            # what a body of If or Loop reads is made outside of it
            sources = tuple(dict.fromkeys(x for x in given if x is not None and x != at))
            self.before.append(sources)
            for source in sources:
                after[source].append(at)
        self.after = [tuple(users) for users in after]
        self.order = self._order()

    def _order(self) -> tuple[int, ...]:
        """Every node after those it waits for; nodes in a circle come last, in their own order."""
        missing = [len(given) for given in self.before]
        ready = [at for at, count in enumerate(missing) if count == 0]
        for at in ready:
            for user in self.after[at]:
                missing[user] -= 1
                if missing[user] == 0:
                    ready.append(user)
        return (*ready, *(at for at, count in enumerate(missing) if count > 0))

    def beyond_constants(self, at: int) -> tuple[int, ...]:
        """The node itself; for one that is folded, the nodes that use what becomes of it."""
        found: set[int] = set()
        waiting, seen = [at], {at}
        while waiting:
            node = waiting.pop()
            if node not in self.fixed:
                found.add(node)
                continue
            fresh = [user for user in self.after[node] if user not in seen]
            seen.update(fresh)
            waiting += fresh
        return tuple(sorted(found))


def _fixed(nodes: Sequence[GraphNode]) -> frozenset[int]:
    found: set[int] = set()
    known: set[str] = set()
    for at, node in enumerate(nodes):
        given = [name for name in node.inputs if name]
        alone = all(name in known or name in node.constants for name in given)
        if node.op == "Constant" or (given and alone):
            found.add(at)
            known.update(node.outputs)
    return frozenset(found)


MYELIN_SUFFIX = re.compile(r"_myl\d+_\d+$")
_CLONE_SUFFIX = re.compile(r"_clone(?:_\d+)?$")
_COPY_SUFFIX = re.compile(r"_\d+$")
_ODD_CHARACTER = re.compile(r"\W")
_AROUND = re.compile(r"(?:reshape|squeeze|unsqueeze|transpose|shuffle)(?:_node)?_(?:before|after)_")
"""What the builder puts around a layer: it moves or casts data and computes nothing."""
_JOINED = "+"
_HELPER = re.compile(r"ONNXTRT_|Optimizer Reformat\(")
"""Names made up by TensorRT's ONNX parser and builder, for which the model has no node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedNodes:
    """The nodes that one name leads to."""

    nodes: tuple[int, ...] = ()
    """Indices of the nodes whose work it does."""
    around: tuple[int, ...] = ()
    """Indices of nodes that it only brings data to or from."""
    is_part: bool = False
    """It is a further layer of its node, such as the bias of a Gemm, and not the product."""
    recognised: bool = False
    """It is a constant or one of the builder's own layers, if it leads to no node."""

    @property
    def anything(self) -> bool:
        """Whether the name is accounted for."""
        return bool(self.nodes or self.around or self.recognised)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedNames:
    """What logs and users state of names that the model does not have; TensorRT's name first."""

    renamed: tuple[tuple[str, str], ...] = ()
    """The ONNX parser's names of layers and the node of each, in the order of the log."""
    sources: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Layers and all the nodes that each is made of."""
    given: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The same from the user, by indices of nodes; it overrides all else."""


class NodeIndex:
    """The names of a model's nodes, in every spelling an engine may use for them."""

    def __init__(
        self,
        nodes: Sequence[GraphNode],
        modules: Mapping[str, int] | None,
        stated: StatedNames | None = None,
    ) -> None:
        self.nodes = nodes
        self._exact: dict[str, list[int]] = {}
        self._users: dict[str, list[int]] = {}
        self._led_to: dict[str, tuple[int, ...]] = {}
        for index, node in enumerate(nodes):
            # TensorRT's parser calls a node without a name after its first output
            own = [f"node_of_{node.outputs[0]}"] if node.unnamed and node.outputs else []
            for name in dict.fromkeys(filter(None, (node.name, node.label, *own))):
                self._exact.setdefault(name, []).append(index)
            for constant in node.constants:
                self._users.setdefault(constant, []).append(index)
            if node.op == "Constant":
                for name in node.outputs:
                    self._users.setdefault(name, [])
        self._stated: dict[str, NamedNodes] = {}
        self._state(stated or StatedNames())
        self._mangled = _unique(
            (_mangle(name), at)
            for name, at in (
                *((name, at[0]) for name, at in self._exact.items() if name not in self._stated),
                *((name, f.nodes[0]) for name, f in self._stated.items() if not f.is_part),
            )
        )
        self._numbered = {_COPY_SUFFIX.sub("", n) for n in self._exact if _COPY_SUFFIX.search(n)}
        self._modules = dict(modules or {})
        self.known = KnownNames.of([*self._exact, *self._users, *self._stated])

    @cached_property
    def flow(self) -> Dataflow:
        """The edges between the nodes; made when the first region asks for them."""
        return Dataflow(self.nodes)

    def _state(self, stated: StatedNames) -> None:
        """The first of several layers of one node is its product: the parser adds a bias after."""
        renamed = dict(stated.renamed)
        begun = {node for node in self._exact if node not in renamed}
        for name, node in stated.renamed:
            nodes = self._exact.get(node, [])
            if len(nodes) == 1:
                self._stated[name] = NamedNodes(nodes=(nodes[0],), is_part=node in begun)
            begun.add(node)
        for name, sources in stated.sources:
            meant = (self._exact.get(source, []) for source in sources)
            self.settle(name, [found[0] for found in meant if len(found) == 1])
        for name, indices in stated.given:
            self.settle(name, indices)

    def settle(self, name: str, nodes: Sequence[int]) -> None:
        """Settle what a name such as `(Unnamed Layer* 12) [Convolution]` means."""
        if nodes:
            self._stated[name] = NamedNodes(nodes=tuple(dict.fromkeys(nodes)))

    def stated(self, name: str) -> NamedNodes | None:
        """What a log states of a name, a whole region's too; None where it states nothing."""
        return self._stated.get(name)

    def find(self, name: str) -> NamedNodes:
        """What a name means, its exact spelling first; empty where no rule applies."""
        for rule in (
            self.stated,
            self._by_name,
            self._by_myelin_name,
            self._by_torch_name,
            self._by_neighbour,
            self._by_clone,
            self._by_copy,
            self._by_joined,
        ):
            found = rule(name)
            if found is not None:
                return found
        return NamedNodes(recognised=_HELPER.match(name) is not None)

    def users(self, constant: str) -> tuple[int, ...]:
        """Nodes that a constant leads to, or a copy of it; () for what is none."""
        for name in (constant, _CLONE_SUFFIX.sub("", constant), _COPY_SUFFIX.sub("", constant)):
            if name in self._users:
                if name not in self._led_to:
                    users = (self.flow.beyond_constants(at) for at in self._users[name])
                    self._led_to[name] = tuple(dict.fromkeys(at for us in users for at in us))
                return self._led_to[name]
        return ()

    def _by_name(self, name: str) -> NamedNodes | None:
        if name in self._exact:
            return NamedNodes(nodes=(self._exact[name][0],))
        return NamedNodes(recognised=True) if name in self._users else None

    def _by_myelin_name(self, name: str) -> NamedNodes | None:
        """`/fc/Gemm_myl0_2`, with dots as underscores (TensorRT 10), or several joined by +."""
        base = MYELIN_SUFFIX.sub("", name)
        if base == name:
            return None
        pieces = (at for piece in base.split(_JOINED) for at in self._plain(piece))
        found = self._plain(base) or tuple(dict.fromkeys(pieces))
        return NamedNodes(nodes=found) if found else None

    def _by_joined(self, name: str) -> NamedNodes | None:
        """`/v/MatMul+/q/MatMul`, as Myelin joins products of one input, without blanks."""
        pieces = [self._plain(piece) for piece in name.split(_JOINED)]
        if len(pieces) == 1 or not all(pieces):
            return None
        return NamedNodes(nodes=tuple(dict.fromkeys(at for piece in pieces for at in piece)))

    def _plain(self, name: str) -> tuple[int, ...]:
        found = self.stated(name) or self._by_name(name)
        if found is not None:
            return found.nodes
        mangled = self._mangled.get(_mangle(name))
        return () if mangled is None else (mangled,)

    def _by_torch_name(self, name: str) -> NamedNodes | None:
        """`[CONVOLUTION]-[aten_ops.convolution.default]-[/conv1/convolution]` (Torch-TensorRT)."""
        match = _TORCH_NAME.fullmatch(name)
        if match is None:
            return None
        path = (match["path"] or match["bare"] or "").strip("/")
        own = name.rpartition("[")[2].removesuffix("]")
        if path and own in self._exact:
            return NamedNodes(nodes=(self._exact[own][0],))
        # the path may end with the op of the module: the one without its last piece comes first
        paths = (module_path(path.rpartition("/")[0]), module_path(path))
        node = next((self._modules[p] for p in paths if p and p in self._modules), None)
        kind = match["kind"] or (match["bare"] or "").rpartition("/")[2]
        is_part = _PRODUCT.search(kind) is None
        return None if node is None else NamedNodes(nodes=(node,), is_part=is_part)

    def _by_neighbour(self, name: str) -> NamedNodes | None:
        match = _AROUND.match(name)
        if match is None:
            return None
        near = self.stated(name[match.end() :]) or self._by_name(name[match.end() :])
        return NamedNodes(around=near.nodes if near else (), recognised=True)

    def _by_clone(self, name: str) -> NamedNodes | None:
        base = _CLONE_SUFFIX.sub("", name)
        return None if base == name else self._by_name(base)

    def _by_copy(self, name: str) -> NamedNodes | None:
        """`Gemm_12`: the parser numbers a second layer of one node, or a second node of a name.

        Not where the model numbers its own names that way: then it is a node that is not there.
        """
        base = _COPY_SUFFIX.sub("", name)
        if base != name and base in self._users and base not in self._exact:
            return NamedNodes(recognised=True)
        nodes = self._exact.get(base, [])
        if base == name or not nodes or base in self._numbered or len(nodes) > 2:
            return None
        return NamedNodes(nodes=(nodes[-1],))


def _mangle(name: str) -> str:
    """The name as Myelin writes it: everything but letters and digits is "_"."""
    return _ODD_CHARACTER.sub("_", name)


def _unique(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Keys that mean one index alone."""
    found: dict[str, int | None] = {}
    for key, index in pairs:
        found[key] = index if found.get(key, index) == index else None
    return {key: index for key, index in found.items() if index is not None}
