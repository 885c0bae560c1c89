"""Which constants of a graph are one array, or share bytes, or are read by one node alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from twofour.graph.files import external_data, external_tensors, is_external, storage_key
from twofour.graph.opened import OpenedModel
from twofour.graph.scope import Scope, integer

_Region = tuple[Path, int, int, object, str | None]
"""File, start, end, what makes two of them one array, and the name in the main graph."""


def first_names(scope: Scope) -> dict[str, str]:
    """For each constant in a data file, the name of the first one that is the same array."""
    first: dict[tuple[object, ...], str] = {}
    return {
        name: first.setdefault((storage_key(t), tuple(t.dims), t.data_type), name)
        for name, t in scope.constants.items()
        if is_external(t)
    }


def overlapping(opened: OpenedModel, scope: Scope) -> Iterator[str]:
    """Constants that share some bytes with what is not the same array of the main graph."""
    together: list[_Region] = []
    for region in sorted(_regions(opened, scope), key=lambda region: region[:3]):
        ends = [end for _, _, end, _, _ in together]
        if together and (region[0] != together[0][0] or region[1] >= max(ends)):
            yield from _strangers(together)
            together = []
        together.append(region)
    yield from _strangers(together)


def _regions(opened: OpenedModel, scope: Scope) -> Iterator[_Region]:
    names = {id(tensor): name for name, tensor in scope.constants.items()}
    for tensor in external_tensors(opened.proto):
        place = external_data(tensor, opened.path)
        if place.size_bytes:
            same = (place.offset, tuple(tensor.dims), tensor.data_type)
            end = place.offset + place.size_bytes
            yield place.file, place.offset, end, same, names.get(id(tensor))


def _strangers(together: list[_Region]) -> Iterator[str]:
    names = [name for *_, name in together]
    if None in names or len({same for *_, same, _ in together}) > 1:
        yield from (name for name in names if name is not None)


def grouped_weights(scope: Scope, storage: Mapping[str, str]) -> dict[str, int]:
    """Constants that are the weight of one grouped convolution and nothing else, and its groups."""
    found, arrays = {}, Counter(storage.values())
    for node in scope.nodes:
        groups = integer(node.proto, "group", 1)
        if node.op != "Conv" or groups < 2 or len(node.proto.input) < 2:
            continue
        name = node.proto.input[1]
        tensor = scope.constants.get(name)
        alone = len(scope.users.get(name, ())) == 1 and name not in scope.outputs
        if tensor is None or not alone or arrays[storage.get(name, name)] > 1:
            continue
        if len(tensor.dims) > 1 and tensor.dims[1] > 1 and not tensor.dims[0] % groups:
            found[name] = groups
    return found
