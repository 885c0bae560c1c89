"""Names of engine layers taken apart, and looked up among the names of the model's nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import chain, islice

from twofour.records import frozen
from twofour.records.export import GraphNode

_POINTWISE = "PWN("
REGION = "{ForeignNode["
_REGION_END = "]}"
_DOTS = "..."
_ENDS = re.compile(r" \+ | \|\| |, |\)|\Z")
_MOST_ENDS = 32
"""Ends tried for a known name that contains separators itself."""
_SEPARATORS = re.compile(r" *(?: \+ | \|\| |, )")
_TOKENS = re.compile(r" \+ | \|\| |, |[(\[{)\]}]")
_REGION_TOKENS = re.compile(r"\{ForeignNode\[|\]\}")


@frozen
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


def split_name(name: str, known: Set[str] = frozenset()) -> tuple[NamePart, ...]:
    """The parts of an engine layer's name, in its order; never empty unless the name is.

    Names that are `known` are taken whole, separators in them included.
    """
    if name in known:
        return (NamePart(text=name),)
    return tuple(_parts(name, known))


def _parts(name: str, known: Set[str]) -> Iterator[NamePart]:
    # `PWN(PWN(/act/Sigmoid, /act/Mul), /add/Add) + {ForeignNode[/a/MatMul.../b/Add]}` gives the
    # parts /act/Sigmoid, /act/Mul, /add/Add and one region. `depth` counts the open `PWN(`, whose
    # closing brackets belong to no name; brackets of a name itself, `Conv(1)`, stay in it.
    at = depth = 0
    while at < len(name):
        if name.startswith(_POINTWISE, at):
            depth += 1
            at += len(_POINTWISE)
            continue
        if name.startswith(REGION, at):
            end = _region_end(name, at)
            yield _region(name[at:end], known)
        else:
            end = _known_end(name, at, known) or _plain_end(name, at, inside=depth > 0)
            text = name[at:end].strip()
            if text:
                yield NamePart(text=text)
        while depth and name.startswith(")", end):
            depth -= 1
            end += 1
        separator = _SEPARATORS.match(name, end)
        at = separator.end() if separator else max(end, at + 1)


def _known_end(name: str, at: int, known: Set[str]) -> int | None:
    """Where the longest known name that starts here ends, at one of the next separators."""
    # in `Conv_65 + Relu_66 || Conv_68 + Relu_69` of a log without its model, the layers' names are
    # the two beside the bars
    ends = [match.start() for match in islice(_ENDS.finditer(name, at), _MOST_ENDS)]
    return next((end for end in reversed(ends) if name[at:end] in known), None)


def _plain_end(name: str, at: int, *, inside: bool) -> int:
    """Where a name ends: a separator, or a closing bracket of PWN, at its own depth 0."""
    depth = 0
    for match in _TOKENS.finditer(name, at):
        mark = match[0]
        if mark in "([{":
            depth += 1
            continue
        is_end = depth == 0 and match.start() > at
        if mark in ")]}":
            is_end = is_end and inside and mark == ")"
            depth = max(depth - 1, 0)
        elif depth:
            continue
        if is_end:
            return match.start()
    return len(name)


def _region_end(name: str, at: int) -> int:
    depth = 0
    for match in _REGION_TOKENS.finditer(name, at):
        depth += 1 if match[0] == REGION else -1
        if depth == 0:
            return match.end()
    return len(name)


def _region(text: str, known: Set[str]) -> NamePart:
    if text in known:
        return NamePart(text=text)
    inner = text.removeprefix(REGION).removesuffix(_REGION_END)
    if inner in known:
        return NamePart(text=text, first=(inner,))
    first, _, last = inner.partition(_DOTS)
    return NamePart(text=text, first=_end(first, known), last=_end(last, known))


def _end(text: str, known: Set[str]) -> tuple[str, ...]:
    """The layers named at one end of a region; a region inside of it is taken whole."""
    if text in known or REGION in text:
        return (text,)
    return tuple(part.text for part in _parts(text, known))


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
    pieces: list[str] = []
    for piece in filter(None, name.split("/")):
        if pieces and piece.startswith(pieces[-1] + "."):
            pieces.pop()
        pieces.append(piece)
    return ".".join(pieces)


def paths_of_layer(node: str | None, weight: str | None) -> tuple[str, ...]:
    """Dotted paths that the names of an ONNX node and its weight state, the weight's first."""
    paths = []
    if weight and not weight.startswith("onnx::"):
        paths.append(weight.rpartition(".")[0])
    scope = (node or "").rpartition("/")[0]
    paths.append(module_path(scope))
    return tuple(dict.fromkeys(filter(None, paths)))


# --- the model's nodes ----------------------------------------------------------------------------


class Dataflow:
    """Neighbours of every node by index, the nodes in topological order, those of constants alone.

    Linear in nodes and edges.
    """

    def __init__(self, nodes: Sequence[GraphNode]) -> None:
        self.fixed = _fixed(nodes)
        """Nodes whose inputs are all constants: builders fold them."""
        makers: dict[str, int] = {}
        for at, node in enumerate(nodes):
            makers |= dict.fromkeys(filter(None, node.outputs), at)
        self.before: list[tuple[int, ...]] = []
        """The nodes that each node waits for."""
        after: list[list[int]] = [[] for _ in nodes]
        for at, node in enumerate(nodes):
            given = {makers.get(name): None for name in node.inputs if name not in node.constants}
            given.pop(at, None)  # what a body of If or Loop reads is made outside of it
            sources = tuple(source for source in given if source is not None)
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
        # `w` -> Transpose -> MatMul: the Transpose is folded, and the MatMul uses its output
        reached = {at}
        waiting = [at]
        for node in waiting:
            if node in self.fixed:
                waiting += set(self.after[node]) - reached
                reached.update(self.after[node])
        return tuple(sorted(reached - self.fixed))


def _fixed(nodes: Sequence[GraphNode]) -> frozenset[int]:
    fixed: set[int] = set()
    values: set[str] = set()
    for at, node in enumerate(nodes):
        given = set(filter(None, node.inputs))
        is_fixed = bool(given) and given - values <= set(node.constants)
        if node.op == "Constant" or is_fixed:
            fixed.add(at)
            values.update(node.outputs)
    return frozenset(fixed)


MYELIN_SUFFIX = re.compile(r"_myl\d+_\d+$")
_CLONE_SUFFIX = re.compile(r"_clone(?:_\d+)?$")
_COPY_SUFFIX = re.compile(r"_\d+$")
_ODD_CHARACTER = re.compile(r"\W")
_AROUND = re.compile(r"(?:reshape|squeeze|unsqueeze|transpose|shuffle)(?:_node)?_(?:before|after)_")
"""What the builder puts around a layer: it moves or casts data and computes nothing."""
_JOINED = "+"
_HELPER = re.compile(r"ONNXTRT_|Optimizer Reformat\(")
"""Names made up by TensorRT's ONNX parser and builder, for which the model has no node."""


@frozen
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


@frozen
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
        modules: Mapping[str, int],
        stated: StatedNames | None = None,
    ) -> None:
        self.nodes = nodes
        self._modules = modules
        self._exact: dict[str, list[int]] = {}
        self._users: dict[str, list[int]] = {}
        """Nodes that read each constant."""
        self._led_to: dict[str, tuple[int, ...]] = {}
        self._stated: dict[str, NamedNodes] = {}
        # The node /b.0/fc/Gemm is found as itself, as /b_0/fc/Gemm_myl0_2 (Myelin), as
        # [LINEAR]-[aten_ops.linear.default]-[/b/0/fc/linear] (Torch-TensorRT) and as the name
        # that a line `Registering layer: fc_1_2 for ONNX node: /b.0/fc/Gemm` states.
        self._add_nodes()
        self._state(stated or StatedNames())
        self._mangled = self._mangle()
        self._numbered = {_COPY_SUFFIX.sub("", n) for n in self._exact if _COPY_SUFFIX.search(n)}
        """Names that the model itself gives with numbers behind them."""
        self.known = frozenset(filter(None, (*self._exact, *self._users, *self._stated)))

    def _add_nodes(self) -> None:
        for at, node in enumerate(self.nodes):
            names = {node.name: None, node.label: None}
            if node.unnamed and node.outputs:
                # TensorRT's parser calls a node without a name after its first output
                names[f"node_of_{node.outputs[0]}"] = None
            for name in filter(None, names):
                self._exact.setdefault(name, []).append(at)
            for constant in node.constants:
                self._users.setdefault(constant, []).append(at)
            if node.op == "Constant":
                for name in node.outputs:
                    self._users.setdefault(name, [])

    @cached_property
    def flow(self) -> Dataflow:
        """The edges between the nodes; made when the first region asks for them."""
        return Dataflow(self.nodes)

    def _state(self, stated: StatedNames) -> None:
        """The first of several layers of one node is its product: the parser adds a bias after."""
        # `Registering layer: fc_1 for ONNX node: fc` of a model that has a node fc: fc_1 is a part
        renamed = dict(stated.renamed)
        begun = self._exact.keys() - renamed.keys()
        for name, node in stated.renamed:
            nodes = self._exact.get(node, [])
            if len(nodes) == 1:
                self._stated[name] = NamedNodes(nodes=tuple(nodes), is_part=node in begun)
            begun.add(node)
        for name, sources in stated.sources:
            made_of = [self._exact.get(source, []) for source in sources]
            self.settle(name, [nodes[0] for nodes in made_of if len(nodes) == 1])
        for name, indices in stated.given:
            self.settle(name, indices)

    def _mangle(self) -> dict[str, int]:
        """Nodes by their names as Myelin writes them, where such a name means one node alone."""
        meant: dict[str, set[int]] = {}
        for name in (*self._exact, *self._stated):
            named = self._given(name)
            if named is not None and not named.is_part:
                meant.setdefault(_mangled(name), set()).add(named.nodes[0])
        return {name: min(nodes) for name, nodes in meant.items() if len(nodes) == 1}

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
            self._given,
            self._by_myelin_name,
            self._by_torch_name,
            self._by_neighbour,
            self._by_clone,
            self._by_copy,
        ):
            named = rule(name)
            if named is not None:
                return named
        return NamedNodes(recognised=_HELPER.match(name) is not None)

    def users(self, constant: str) -> tuple[int, ...]:
        """Nodes that a constant leads to, or a copy of it; () for what is none."""
        for name in (constant, _CLONE_SUFFIX.sub("", constant), _COPY_SUFFIX.sub("", constant)):
            if name in self._users:
                if name not in self._led_to:
                    users = map(self.flow.beyond_constants, self._users[name])
                    self._led_to[name] = tuple(dict.fromkeys(chain.from_iterable(users)))
                return self._led_to[name]
        return ()

    def _given(self, name: str) -> NamedNodes | None:
        """What a log states of the name, else what the model has under it."""
        return self.stated(name) or self._by_name(name)

    def _by_name(self, name: str) -> NamedNodes | None:
        if name in self._exact:
            return NamedNodes(nodes=(self._exact[name][0],))
        if name in self._users:
            return NamedNodes(recognised=True)
        return None

    def _by_myelin_name(self, name: str) -> NamedNodes | None:
        """`/fc/Gemm_myl0_2`, and products of one input in one: `/v/MatMul+/q/MatMul`."""
        # TensorRT 10 writes /layer.0/fc/Gemm as /layer_0/fc/Gemm_myl0_2. A + without such a suffix
        # joins names only if each of them is a node's: `c++` is a name of its own.
        base = MYELIN_SUFFIX.sub("", name)
        pieces = [self._plain(piece) for piece in base.split(_JOINED)]
        whole: tuple[int, ...] = ()
        if base != name:
            whole = self._plain(base)
        elif len(pieces) == 1 or not all(pieces):
            return None
        nodes = whole or tuple(dict.fromkeys(chain.from_iterable(pieces)))
        return NamedNodes(nodes=nodes) if nodes else None

    def _plain(self, name: str) -> tuple[int, ...]:
        named = self._given(name)
        if named is not None:
            return named.nodes
        mangled = self._mangled.get(_mangled(name))
        return () if mangled is None else (mangled,)

    def _by_torch_name(self, name: str) -> NamedNodes | None:
        """`[CONVOLUTION]-[aten_ops.convolution.default]-[/conv1/convolution]` (Torch-TensorRT)."""
        match = _TORCH_NAME.fullmatch(name)
        if match is None:
            return None
        own = name.rpartition("[")[2].removesuffix("]")
        path = own.strip("/")
        scope, _, kind = path.rpartition("/")
        if path and own in self._exact:
            return NamedNodes(nodes=(self._exact[own][0],))
        is_part = _PRODUCT.search(match["kind"] or kind) is None
        # the path may end with the op of the module: the one without its last piece comes first
        for module in (module_path(scope), module_path(path)):
            if module and module in self._modules:
                return NamedNodes(nodes=(self._modules[module],), is_part=is_part)
        return None

    def _by_neighbour(self, name: str) -> NamedNodes | None:
        """`reshape_before_/fc/Gemm`, which only brings data to the node."""
        match = _AROUND.match(name)
        if match is None:
            return None
        beside = name[match.end() :]
        near = self._given(beside)
        return NamedNodes(around=near.nodes if near else (), recognised=True)

    def _by_clone(self, name: str) -> NamedNodes | None:
        """`fc.weight_clone_2`, a copy of a constant."""
        base = _CLONE_SUFFIX.sub("", name)
        return None if base == name else self._by_name(base)

    def _by_copy(self, name: str) -> NamedNodes | None:
        """`Gemm_12`: the parser numbers a second layer of one node, or a second node of a name.

        Not where the model numbers its own names that way: then it is a node that is not there.
        """
        base = _COPY_SUFFIX.sub("", name)
        if base == name:
            return None
        nodes = self._exact.get(base, [])
        if not nodes and base in self._users:
            return NamedNodes(recognised=True)
        if not nodes or base in self._numbered or len(nodes) > 2:
            return None
        return NamedNodes(nodes=(nodes[-1],))


def _mangled(name: str) -> str:
    """The name as Myelin writes it: everything but letters and digits is "_"."""
    return _ODD_CHARACTER.sub("_", name)
