"""The model's nodes by name, tensor and order, for finding them in an engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from twofour.eligibility.names import KnownNames, is_product, paths_of_torch_name
from twofour.records.export import GraphNode


class Dataflow:
    """Neighbours of every node by index, the nodes in topological order, those of constants alone.

    Linear in nodes and edges.
    """

    def __init__(self, nodes: Sequence[GraphNode]) -> None:
        self.fixed = _fixed(nodes)
        """Nodes whose inputs are all constants: builders fold them."""
        self.before: list[tuple[int, ...]] = _before(nodes)
        after: list[list[int]] = [[] for _ in nodes]
        for at, given in enumerate(self.before):
            for source in given:
                after[source].append(at)
        self.after = [tuple(users) for users in after]
        self.order = _order(self.before, self.after)

    def beyond_constants(self, at: int) -> tuple[int, ...]:
        """The node itself; of one that is folded, those that use what becomes of it."""
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


def _before(nodes: Sequence[GraphNode]) -> list[tuple[int, ...]]:
    """Nodes that each node waits for; what a body of If or Loop reads stands outside of it."""
    makers = {name: at for at, node in enumerate(nodes) for name in node.outputs if name}
    found = []
    for at, node in enumerate(nodes):
        given = (makers.get(name) for name in node.inputs if name not in node.constants)
        found.append(tuple(dict.fromkeys(x for x in given if x is not None and x != at)))
    return found


def _order(before: Sequence[tuple[int, ...]], after: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Every node after those it waits for; what a circle holds up comes last, as it stands."""
    missing = [len(given) for given in before]
    ready = [at for at, count in enumerate(missing) if count == 0]
    for at in ready:
        for user in after[at]:
            missing[user] -= 1
            if missing[user] == 0:
                ready.append(user)
    return (*ready, *(at for at, count in enumerate(missing) if count > 0))


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
class Found:
    """What one name leads to."""

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
    held: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """The same from the user, by indices of nodes; it stands above all else."""


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
            for name in _spellings(node):
                self._exact.setdefault(name, []).append(index)
            for constant in node.constants:
                self._users.setdefault(constant, []).append(index)
            if node.op == "Constant":
                for name in node.outputs:
                    self._users.setdefault(name, [])
        self._stated: dict[str, Found] = {}
        self._state(stated or StatedNames())
        self._mangled = _unique(
            (mangle(name), at)
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
        """Of several layers of one node the first is its product: the parser adds a bias after."""
        renamed = dict(stated.renamed)
        begun = {node for node in self._exact if node not in renamed}
        for name, node in stated.renamed:
            nodes = self._exact.get(node, [])
            if len(nodes) == 1:
                self._stated[name] = Found(nodes=(nodes[0],), is_part=node in begun)
            begun.add(node)
        for name, sources in stated.sources:
            meant = (self._exact.get(source, []) for source in sources)
            nodes = [found[0] for found in meant if len(found) == 1]
            if nodes:
                self._stated[name] = Found(nodes=tuple(dict.fromkeys(nodes)))
        for name, indices in stated.held:
            if indices:
                self._stated[name] = Found(nodes=tuple(dict.fromkeys(indices)))

    def stated(self, name: str) -> Found | None:
        """What a log states of a name, a whole region's too; None where it states nothing."""
        return self._stated.get(name)

    def number_unnamed(self, unnamed: Mapping[str, int]) -> None:
        """Settle what `(Unnamed Layer* 12) [Convolution]` and its like mean (see names.py)."""
        self._stated.update({name: Found(nodes=(at,)) for name, at in unnamed.items()})

    def find(self, name: str) -> Found:
        """What a name means, its exact spelling first; empty where no rule applies."""
        for rule in self._rules():
            found = rule(name)
            if found is not None:
                return found
        return Found(recognised=_HELPER.match(name) is not None)

    def users(self, constant: str) -> tuple[int, ...]:
        """Nodes that a constant leads to, or a copy of it; () for what is none."""
        for name in (constant, _CLONE_SUFFIX.sub("", constant), _COPY_SUFFIX.sub("", constant)):
            if name in self._users:
                if name not in self._led_to:
                    users = (self.flow.beyond_constants(at) for at in self._users[name])
                    self._led_to[name] = tuple(dict.fromkeys(at for us in users for at in us))
                return self._led_to[name]
        return ()

    def _rules(self) -> tuple[Callable[[str], Found | None], ...]:
        return (
            self.stated,
            self._by_name,
            self._by_myelin_name,
            self._by_torch_name,
            self._by_neighbour,
            self._by_clone,
            self._by_copy,
            self._by_joined,
        )

    def _by_name(self, name: str) -> Found | None:
        if name in self._exact:
            return Found(nodes=(self._exact[name][0],))
        return Found(recognised=True) if name in self._users else None

    def _by_myelin_name(self, name: str) -> Found | None:
        """`/fc/Gemm_myl0_2`, with dots as underscores (TensorRT 10), or several joined by +."""
        base = MYELIN_SUFFIX.sub("", name)
        if base == name:
            return None
        pieces = (at for piece in base.split(_JOINED) for at in self._plain(piece))
        found = self._plain(base) or tuple(dict.fromkeys(pieces))
        return Found(nodes=found) if found else None

    def _by_joined(self, name: str) -> Found | None:
        """`/v/MatMul+/q/MatMul`, as Myelin joins products of one input, without blanks."""
        pieces = [self._plain(piece) for piece in name.split(_JOINED)]
        if len(pieces) == 1 or not all(pieces):
            return None
        return Found(nodes=tuple(dict.fromkeys(at for piece in pieces for at in piece)))

    def _plain(self, name: str) -> tuple[int, ...]:
        found = self.stated(name) or self._by_name(name)
        if found is not None:
            return found.nodes
        mangled = self._mangled.get(mangle(name))
        return () if mangled is None else (mangled,)

    def _by_torch_name(self, name: str) -> Found | None:
        """`[CONVOLUTION]-[aten_ops.convolution.default]-[/conv1/convolution]` (Torch-TensorRT)."""
        paths = paths_of_torch_name(name)
        own = name.rpartition("[")[2].removesuffix("]")
        if paths and own in self._exact:
            return Found(nodes=(self._exact[own][0],))
        node = next((self._modules[path] for path in paths if path in self._modules), None)
        return None if node is None else Found(nodes=(node,), is_part=not is_product(name))

    def _by_neighbour(self, name: str) -> Found | None:
        match = _AROUND.match(name)
        if match is None:
            return None
        near = self.stated(name[match.end() :]) or self._by_name(name[match.end() :])
        return Found(around=near.nodes if near else (), recognised=True)

    def _by_clone(self, name: str) -> Found | None:
        base = _CLONE_SUFFIX.sub("", name)
        return None if base == name else self._by_name(base)

    def _by_copy(self, name: str) -> Found | None:
        """`Gemm_12`: the parser numbers a second layer of one node, or a second node of a name.

        Not where the model numbers its own names that way: then it is a node that is not there.
        """
        base = _COPY_SUFFIX.sub("", name)
        if base != name and base in self._users and base not in self._exact:
            return Found(recognised=True)
        nodes = self._exact.get(base, [])
        if base == name or not nodes or base in self._numbered or len(nodes) > 2:
            return None
        return Found(nodes=(nodes[-1],))


def _spellings(node: GraphNode) -> tuple[str, ...]:
    """Names of a node; TensorRT's parser calls one without a name after its first output."""
    names = [node.name, node.label]
    if node.unnamed and node.outputs:
        names.append(f"node_of_{node.outputs[0]}")
    return tuple(dict.fromkeys(name for name in names if name))


def mangle(name: str) -> str:
    """The name as Myelin writes it: everything but letters and digits is "_"."""
    return _ODD_CHARACTER.sub("_", name)


def _unique(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Keys that mean one index alone."""
    found: dict[str, int | None] = {}
    for key, index in pairs:
        found[key] = index if found.get(key, index) == index else None
    return {key: index for key, index in found.items() if index is not None}
