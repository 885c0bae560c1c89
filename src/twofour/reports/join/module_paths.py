"""Paths of modules in names: `/layer1/layer1.0/conv1/Conv`, `layer1.0.conv1.weight`, engine names.

torch's exporters, Torch-TensorRT and state dicts write one path in several ways; here each becomes
the dotted path of the module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

_TORCH_NAME = re.compile(
    r"\[(?P<kind>[^\[\]]*)\]-\[[^\[\]]*\]-\[(?P<path>[^\[\]]*)\]"
    r"|(?<!ForeignNode)\[(?P<bare>[^\[\]\s:]*/[^\[\]\s:]*)\]"
)
"""`[CONVOLUTION]-[aten_ops.convolution.default]-[/conv1/convolution]`, `[conv1/convolution]`."""
_PRODUCT = re.compile(r"conv|matrix|matmul|fully|linear|gemm|mm(?:_|$)", re.IGNORECASE)
_FITS = 0.5
"""Share of the products that must meet, of the engine's or the model's, whichever has fewer:
single names such as `conv1` and `fc` are those of many models."""


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


def fitting(paths: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """The nodes by the paths that an engine's names have; {} where too few of its products meet.

    A wrapper around the whole model, on either side, is a first piece that all paths share.
    """
    found = (match[0] for name in names for match in _TORCH_NAME.finditer(name))
    asked = [paths_of_torch_name(name) for name in dict.fromkeys(found) if is_product(name)]
    wanted = _FITS * min(len(asked), len(set(paths.values())))
    outside = _shared([ways[0] for ways in asked if ways])
    inside = _shared(list(paths))
    for outer, inner in (("", ""), (outside, ""), ("", inside), (outside, inside)):
        there = {outer + path[len(inner) :]: at for path, at in paths.items()}
        met = sum(any(way in there for way in ways) for ways in asked)
        if met and met >= wanted:
            return there
    return {}


def _shared(paths: Sequence[str]) -> str:
    """The pieces at the front that all paths have, with their dots; "" for a single path."""
    if len(paths) < 2:
        return ""
    pieces = [path.split(".")[:-1] for path in paths]
    count = 0
    for row in zip(*pieces, strict=False):
        if len(set(row)) > 1:
            break
        count += 1
    return "".join(f"{piece}." for piece in pieces[0][:count])
