"""Evidence about an engine, read from files: logs, layer information, profiles, layer maps.

`reporting` joins it with the rules; the files are those of a run folder, an emitted folder, or
anyone's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from twofour.eligibility.build_evidence import BuildEvidence, ChosenBuild, choose_build
from twofour.eligibility.reasons import REASONS
from twofour.errors import BadInputError, naming, system_errors
from twofour.inputs.fits import batch_names, shapes_of, sizes_by_symbol, stored_arrays
from twofour.pipeline.folder import INPUTS, LAYERS
from twofour.records import frozen
from twofour.records.export import ANONYMOUS, GraphNode, LayerMap, LayerName, TrtexecFolder
from twofour.records.log import SparsityFlag
from twofour.records.weights import PruneResult, Reason, ReasonCode, Weight
from twofour.store import from_json, read_record

if TYPE_CHECKING:
    from twofour.graph.opened import OpenedModel

T = TypeVar("T")
WeightPlace: TypeAlias = tuple[str, str | None]
"""Name of a stored weight, and the node that uses it; None: any."""
EMITTED = "emitted.json"
FAILED = "failed.txt"
"""Names of the variants that trtexec failed for, written by build.sh."""
_MAP_HINT = (
    'write {"engine name": "layer or ONNX node", ...}, or give the layers.json of a run folder'
)


@frozen
class EvidenceFiles:
    """Paths of the files with evidence; every one may be missing."""

    onnx: Path | None = None
    log: Path | str | None = None
    """The log of the build with sparse weights allowed; its text, or its path."""
    layers: Path | None = None
    profile: Path | None = None
    dense_log: Path | str | None = None
    dense_profile: Path | None = None
    layer_map: Path | None = None
    """The layers.json of a run, or the user's map of engine names to layers."""
    inputs: Path | None = None
    """Example inputs by name (.npz); multiply-adds are counted at their sizes."""

    def names(self) -> tuple[str, ...]:
        """Names of the files that are there, for a stage that reads them."""
        paths = (
            self.log,
            self.layers,
            self.profile,
            self.dense_log,
            self.dense_profile,
            self.inputs,
        )
        return tuple(path.name for path in paths if isinstance(path, Path))


def read_evidence(
    files: EvidenceFiles, model: OpenedModel | None = None, layer_map: LayerMap | None = None
) -> BuildEvidence:
    """Read the files that are there; raises BadInputError for one that cannot be read.

    `model` is the opened ONNX file of `files`. Of a log with several builds the one that says most
    about the model is taken, with a note. A map of the user's in `files` adds to `layer_map`, and
    the layers.json of a run replaces it.
    """
    from twofour.logs.layer_info import read_layer_information, read_profile

    given = LayerNames() if files.layer_map is None else read_layer_names(files.layer_map)
    nodes: tuple[GraphNode, ...] = ()
    notes: Sequence[str] = ()
    if model is not None:
        nodes, notes = _nodes(model, files.inputs)
    evidence = BuildEvidence(
        layers=_read(read_layer_information, files.layers),
        profile=_read(read_profile, files.profile),
        dense_profile=_read(read_profile, files.dense_profile),
        nodes=nodes,
        layer_map=given.modules or layer_map,
        engine_names=given.engine,
        notes=tuple(notes),
    )
    return _with_builds(evidence, files)


def _with_builds(evidence: BuildEvidence, files: EvidenceFiles) -> BuildEvidence:
    """The evidence with the builds of both logs."""
    notes: list[str | None] = [*evidence.notes]
    if files.log is not None:
        onnx = "" if files.onnx is None else files.onnx.name
        sparse = read_build(files.log, SparsityFlag.ENABLED, evidence.nodes, onnx)
        evidence = replace(evidence, build=sparse.build, elsewhere=sparse.elsewhere)
        notes.append(sparse.note)
    if files.dense_log is not None:  # it is often of the file before that was pruned
        dense = read_build(files.dense_log, SparsityFlag.DISABLED, evidence.nodes)
        evidence = replace(evidence, dense_build=dense.build)
        notes.append(dense.note)
    return replace(evidence, notes=tuple(filter(None, notes)))


def _read(read: Callable[[Path], T], path: Path | None) -> T | None:
    return None if path is None else read(path)


def read_build(
    log: Path | str, wanted: SparsityFlag, nodes: Sequence[GraphNode] = (), file: str = ""
) -> ChosenBuild:
    """The build of a log that has the wanted sparsity; of several the one that says most.

    Raises BadInputError for a log without a message of TensorRT.
    """
    from twofour.logs.read import read_build_log

    logs = read_build_log(log)
    if not logs.builds:
        raise BadInputError(
            f"{logs.files[0].name} contains no TensorRT message",
            hint="build with a verbose logger (trtexec --verbose), stdout and stderr in one file",
        )
    return choose_build(logs.builds, nodes, wanted, file)


def files_of_folder(folder: Path, onnx: str) -> EvidenceFiles:
    """The files that TensorRT builds left in a run folder, or trtexec in an emitted one."""

    def there(name: str) -> Path | None:
        return folder / name if (folder / name).is_file() else None

    return EvidenceFiles(
        onnx=folder / onnx,
        log=there("sparse.log"),
        layers=there("sparse.layers.json"),
        profile=there("sparse.profile.json"),
        dense_log=there("dense.log"),
        dense_profile=there("dense.profile.json"),
        inputs=there(INPUTS),
    )


@frozen
class LayerNames:
    """The content of a layer map of either kind."""

    modules: LayerMap | None = None
    """The layers.json of a run: module and parameter of each node."""
    engine: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The user's map: a name in the engine or log, and the layers or ONNX nodes in it."""


def read_layer_names(path: Path) -> LayerNames:
    """Read a layer map of either kind; raises BadInputError for any other file."""
    with system_errors(f"cannot read {path}"):
        text = path.read_bytes().decode("utf-8-sig", "replace")  # editors of Windows write a BOM
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path} is no JSON: {error}", hint=_MAP_HINT) from error
    if isinstance(value, dict) and isinstance(value.get("layers"), list):
        with naming(path):
            return LayerNames(modules=from_json(LayerMap, text.encode()))
    return LayerNames(engine=tuple(_users_map(value, path)))


def map_beside(onnx: Path) -> LayerMap | None:
    """The layers.json beside an ONNX file; None for a file of another kind.

    TensorRT's layer information is often called so, too.
    """
    try:
        return read_layer_names(onnx.parent / LAYERS).modules
    except BadInputError:
        return None


def _nodes(model: OpenedModel, inputs: Path | None) -> tuple[tuple[GraphNode, ...], list[str]]:
    """The nodes of the graph for one sample of the example inputs, and notes on its sizes."""
    from twofour.graph.opened import graph_nodes
    from twofour.graph.shapes import with_shapes

    dims = [dim for tensor in model.inputs for dim in tensor.shape]
    free = {dim for dim in dims if isinstance(dim, str)} - {ANONYMOUS}
    first = {tensor.shape[0] for tensor in model.inputs if tensor.shape}
    example = {} if inputs is None else _example_sizes(model, inputs)
    sizes = dict.fromkeys(free & first, 1) | example  # first axes are taken for the batch
    notes = []
    if example:
        at = ", ".join(f"{name} {size}" for name, size in example.items())
        notes.append(f"multiply-adds are counted at {at}, as in the example inputs")
    unknown = ", ".join(sorted(free - sizes.keys()))
    if unknown:
        notes.append(
            f"multiply-adds depend on free sizes ({unknown}): give the file fixed ones, or report "
            "on the folder of a run with example inputs"
        )
    return graph_nodes(with_shapes(model.copy(), sizes)), notes


def _example_sizes(model: OpenedModel, inputs: Path) -> dict[str, int]:
    """The free sizes of the example inputs but that of the batch, such as {"sequence": 128}."""
    sizes = sizes_by_symbol(model.inputs, shapes_of(stored_arrays(inputs)), str(inputs))
    batches = batch_names(model.inputs)
    return {name: size for name, size in sizes.items() if name not in batches}


def _users_map(value: object, path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    if not isinstance(value, dict):
        raise _no_layer_map(path, "a list")
    for engine, layers in value.items():
        # {"conv1 + relu1": "conv1"} is short for {"conv1 + relu1": ["conv1"]}
        names = layers if isinstance(layers, list) else [layers]
        if not names or not all(isinstance(name, str) for name in names):
            raise _no_layer_map(path, f"{engine!r}: {layers!r}")
        yield engine, tuple(names)


def _no_layer_map(path: Path, entry: str) -> BadInputError:
    return BadInputError(f"{path} is no layer map: {entry[:200]}", hint=_MAP_HINT)


def is_emitted_folder(path: Path) -> bool:
    """Whether a folder was made by `emit_trtexec`, built in or not."""
    return (path / EMITTED).is_file()


def read_emitted(folder: Path) -> TrtexecFolder:
    """The record of an emitted folder that came back with at least the log of the sparse engine.

    Every other file that it names may be missing: a build can fail, and a plan is large.
    """
    emitted = read_record(TrtexecFolder, folder / EMITTED)
    for variant in emitted.variants:
        if variant.sparse_weights and not (folder / variant.log).is_file():
            raise BadInputError(
                f"{folder} contains no {variant.log}: nothing was built in it yet",
                hint=f"run {emitted.script} in it on a machine with TensorRT {emitted.tensorrt}, "
                "and copy the folder back",
            )
    return emitted


def failed_variants(folder: Path) -> tuple[str, ...]:
    """The variants that build.sh could not build in its last run; () where all were built."""
    path = folder / FAILED
    if not path.is_file():
        return ()
    return tuple(path.read_text(encoding="utf-8", errors="replace").split())


def with_module_names(
    weights: Sequence[Weight], layers: LayerMap | None, pruned: PruneResult | None = None
) -> tuple[Weight, ...]:
    """Weights of the graph under their modules' names, with what pruning said about each."""
    names = () if layers is None else layers.layers
    more = {} if pruned is None else _known_to_pruning(pruned)
    by_place = {(name.node, name.initializer): name for name in names}
    by_initializer = {name.initializer: name for name in names}
    renamed = []
    for weight in weights:
        initializer = weight.weight or ""
        # two layers may share one array; the node tells them apart, where it kept its name
        name = by_place.get((weight.node or "", initializer)) or by_initializer.get(initializer)
        if name is not None:
            weight = _renamed(weight, name, more)  # noqa: PLW2901  # the same one, named
        renamed.append(weight)
    return tuple(renamed)


def _known_to_pruning(pruned: PruneResult) -> dict[WeightPlace, Weight]:
    """What only pruning knows about a weight: the user's choice, and who else uses it.

    By its state_dict key (an ONNX source: by initializer), and by its node, which several layers of
    one array differ in.
    """
    known: dict[WeightPlace, Weight] = {}
    for row in pruned.weights:
        weight = row.weight
        if weight.weight is None:
            continue
        reasons = tuple(r for r in row.reasons if REASONS[r.code].explains_dense)
        for node in (weight.node, None):  # several layers may use one array: None is any of them
            known[weight.weight, node] = replace(weight, reasons=reasons)
    return known


def _renamed(weight: Weight, name: LayerName, more: Mapping[WeightPlace, Weight]) -> Weight:
    """One weight under its module's name."""
    # /encoder/layer.0/MatMul and onnx::MatMul_812 become encoder.layer.0.query
    reasons = weight.reasons
    looked_up_by = weight.looked_up_by
    known = more.get((name.parameter, weight.node)) or more.get((name.parameter, None))
    if known is not None:
        reasons = tuple(dict.fromkeys((*reasons, *known.reasons)))
        looked_up_by = looked_up_by or known.looked_up_by
    elif more:
        what = f"{name.parameter or name.initializer} belongs to no layer that pruning knows"
        message = f"{what}: the model's own code multiplies by it"
        reasons += (Reason(code=ReasonCode.NOT_A_LAYER, message=message),)
    layer = name.layer or weight.layer
    return replace(weight, layer=layer, reasons=reasons, looked_up_by=looked_up_by)
