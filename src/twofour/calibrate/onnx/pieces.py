"""Pieces of an ONNX graph: cut out by the parent, and run on calibration data by a worker process.

Weights are not copied: a piece names them by their place in the model's own files, or in the files
of arrays that were changed since.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from twofour.calibrate.onnx.input_rows import BatchMarks, InputReading, rows_of
from twofour.calibrate.onnx.layer_plan import Bias, Key, MainGraph
from twofour.engines.machine import usable_cores
from twofour.engines.onnxruntime.session import OrtSession, ProviderSetup
from twofour.engines.protocol import ProgressCallback
from twofour.errors import BadInputError
from twofour.graph.files import (
    DTYPES,
    SEPARATE_INITIALIZERS,
    Array,
    external_data,
    external_tensors,
    point_at,
    read_tensor,
    storage_key,
    write_tensor,
)
from twofour.graph.opened import widen
from twofour.pruning.matrices import Layout
from twofour.pruning.resources import ArrayStore, StoredArray, one_blas_thread
from twofour.pruning.statistics import InputSums, Statistics

KEPT_BYTES = 1 << 30
"""Size of the tensors between two pieces that stay in memory; the rest goes to files."""
_CONFIG = {"session.disable_quant_qdq": "1"}
"""Q and DQ nodes are computed as they stand in the file, not fused into integer arithmetic."""
_MOST_THREADS = 8
"""Batches that are run side by side; each holds its activations."""
Tensor = tuple[str, bool]
"""A tensor's name, and whether it is the dense model's, where the pruned one has other values."""
TypeAndRank = tuple[str, int]
"""numpy's name of a tensor's type, and the number of its axes."""
_CODES = {name: code for code, name in DTYPES.items()}


@dataclass(slots=True, kw_only=True)
class Changes:
    """The differences from the model as it came; they grow while layers are pruned."""

    arrays: dict[Key, Path] = field(default_factory=dict)
    """Stored arrays that were pruned, or biases that were corrected: files with their bytes."""
    constants: dict[tuple[int, int], onnx.TensorProto] = field(default_factory=dict)
    """(node, input) -> the new constant that it reads now."""

    def copy(self, graph: MainGraph, bias: Bias, wish: str, values: Array) -> None:
        """Give the bias's node alone these values, under the name `wish` or one with a number."""
        body = graph.opened.proto.graph
        taken = {*graph.made_by, *(value.name for value in (*body.initializer, *body.input))}
        taken |= {tensor.name for tensor in self.constants.values()}
        name, number = wish, 0
        while name in taken:
            number += 1
            name = f"{wish}.{number}"
        self.constants[bias.node, bias.position] = onnx.TensorProto(
            name=name,
            data_type=_CODES[values.dtype.name],
            dims=values.shape,
            raw_data=np.ascontiguousarray(values).tobytes(),
        )


def in_float32(piece: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """The piece, which is in the folder, in float32 and with all its values in it."""
    for tensor in external_tensors(piece):
        _write_inline(tensor, read_tensor(tensor, folder / "piece"))
    widen(piece)
    return piece


def _write_inline(tensor: onnx.TensorProto, values: Array) -> None:
    """Store the values in the model itself."""
    tensor.ClearField("data_location")
    del tensor.external_data[:]
    write_tensor(tensor, values)


class PieceCutter:
    """Cuts pieces out of a graph, to be written into a folder."""

    def __init__(self, graph: MainGraph, changes: Changes, files: Mapping[Path, str]) -> None:
        """`files`: the names of the model's files in the folder of the pieces."""
        self._graph, self._changes, self._files = graph, changes, files
        model = graph.opened.proto
        self._initial = {tensor.name: tensor for tensor in model.graph.initializer}
        self._inputs = {value.name: value for value in model.graph.input}

    def piece(
        self, outputs: Sequence[str], have: Mapping[str, TypeAndRank]
    ) -> onnx.ModelProto | None:
        """The nodes that compute `outputs` from tensors that are there; None where it takes none.

        Inputs are those of `have` that the nodes read, and inputs of the graph.
        """
        # In x -> A -> B -> C with the weight of A pruned and the input of B kept, the piece for the
        # output of C has the nodes B and C and the input of B: A does not run again. Weights of B
        # and C are names of places in the model's files, or in the file of a pruned array.
        graph = self._graph
        wanted = [name for name in outputs if name not in have and name in graph.made_by]
        if not wanted:
            return None
        places = sorted(graph.needed(wanted, have))
        made = {name for at in places for name in graph.scope.nodes[at].proto.output}
        read = dict.fromkeys(n for at in places for n in graph.reads[at] if n not in made)
        whole, constants = graph.opened, graph.scope.constants
        model = onnx.ModelProto(
            ir_version=max(whole.proto.ir_version, SEPARATE_INITIALIZERS),
            opset_import=whole.proto.opset_import,
            functions=whole.proto.functions,
        )
        model.graph.name = "piece"
        held = []
        for at in places:
            proto = graph.scope.nodes[at].proto
            if proto.op_type == "Constant" and proto.output[0] in constants:
                held.append(proto.output[0])  # an attribute's values cannot lie in another file
            else:
                self._add_node(at, proto, model.graph)
        for tensor in external_tensors(model):  # of attributes: ONNX Runtime would not find them
            _write_inline(tensor, read_tensor(tensor, whole.path))
        for name in held:
            self._add_tensor(name, constants[name], model.graph)
        for name in read:
            if name in have:
                dtype, rank = have[name]
                shape = [f"{name}.{axis}" for axis in range(rank)]
                value = onnx.helper.make_tensor_value_info(name, _CODES[dtype], shape)
                model.graph.input.append(value)
            elif name in self._initial:
                self._add_tensor(name, self._initial[name], model.graph)
            elif name in self._inputs:
                model.graph.input.append(self._inputs[name])
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
        return model

    def _add_node(self, at: int, proto: onnx.NodeProto, body: onnx.GraphProto) -> None:
        """Add the node, with its changed constants."""
        node = body.node.add()
        node.CopyFrom(proto)
        for position in range(len(proto.input)):
            other = self._changes.constants.get((at, position))
            if other is not None:
                node.input[position] = other.name
                body.initializer.append(other)

    def _add_tensor(self, name: str, tensor: onnx.TensorProto, body: onnx.GraphProto) -> None:
        """Add the constant by its name; its values stay in their file."""
        changed = self._changes.arrays.get(storage_key(tensor))
        added = body.initializer.add()
        if changed is None and tensor.data_location != onnx.TensorProto.EXTERNAL:
            added.CopyFrom(tensor)
            added.name = name
            return
        added.name, added.data_type = name, tensor.data_type
        added.dims.extend(tensor.dims)
        if changed is not None:
            point_at(added, changed.name, 0, changed.stat().st_size)
        else:
            place = external_data(tensor, self._graph.opened.path)
            point_at(added, self._files[place.file], place.offset, place.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFile:
    """A batch on disk: arrays by name of the graph's input."""

    path: Path
    samples: int
    first: int
    """Number of its first sample among all."""
    padding: Array | None = None
    """(samples, positions)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tap:
    """A tensor that feeds layers, to be read as rows of matrices."""

    tensor: str
    reading: InputReading
    layer: str
    """One of the layers, for messages."""
    differs: bool = False
    """Whether the dense model has other values there."""
    added: str | None = None
    """A tensor that is added to the layer's output, where the dense model has other values."""
    weight: Array | None = None
    """For `InputSums`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """The statistics of a pass over the batches, and the tensors that are kept now."""

    statistics: tuple[Statistics | None, ...]
    """One for each tap; None: no input came."""
    kept: dict[Tensor, TypeAndRank] | None
    """All tensors that are kept now; None: they cannot be kept, and nothing has changed."""


class CalibrationWorker:
    """Runs pieces on the batches; the parent calls its methods, and gets what they raise.

    It keeps the tensors between two pieces, so that every node runs once on every batch, and adds
    up the statistics of the layers' inputs; only these go back to the parent.
    """

    def __init__(self, report: ProgressCallback) -> None:
        self._report = report
        self._batches: tuple[BatchFile, ...] = ()
        self._factors = np.ones(0)
        self._room = ArrayStore(Path(), 0)
        self._kept: list[dict[Tensor, StoredArray]] = []
        """For each batch the tensors that later pieces start from."""

    def begin(
        self, folder: Path, batches: Sequence[BatchFile], factors: NDArray[np.float64]
    ) -> None:
        """Take the batches and the factors of their samples.

        `folder` is for tensors that do not fit into memory.
        """
        self._room = ArrayStore(folder, KEPT_BYTES)
        self._batches, self._factors = tuple(batches), factors
        self._kept = [{} for _ in batches]

    def look(
        self,
        taps: Sequence[Tap],
        pieces: Sequence[tuple[Path, bool]],
        keep: Collection[Tensor],
        level: str,
    ) -> PassResult:
        """Run the pieces on every batch and add up the rows of the taps.

        Each piece comes with whether it is one of the dense model. `keep` are the tensors that
        later pieces start from; all others are dropped. `level` is ONNX Runtime's optimization
        level. Raises BadInputError for an input that is not finite, CannotRunError where ONNX
        Runtime is not installed or lacks a kernel, and what OrtSession raises.
        """
        setup = ProviderSetup(config=_CONFIG)
        sessions = [
            (OrtSession(piece, threads=1, level=level, providers=setup), dense)
            for piece, dense in pieces
        ]
        sums, is_kept = [InputSums(tap.weight) for tap in taps], True
        with one_blas_thread():
            for number, arrays in self._run(sessions):
                self._add(taps, sums, number, arrays)
                if not number:  # sequences and texts are not kept
                    is_kept = all(
                        isinstance(array, np.ndarray) and not array.dtype.hasobject
                        for tensor, array in arrays.items()
                        if tensor in keep
                    )
                if is_kept:
                    self._pass_on(number, arrays, keep)
                elif not taps:
                    break
        known = {
            tensor: (each.dtype.name, len(each.shape)) for tensor, each in self._kept[0].items()
        }
        return PassResult(
            statistics=tuple(each.statistics() for each in sums), kept=known if is_kept else None
        )

    def _pass_on(
        self, number: int, arrays: Mapping[Tensor, Array], keep: Collection[Tensor]
    ) -> None:
        """Keep the tensors of one batch that later pieces start from, and drop the others."""
        before = self._kept[number]
        now = {
            tensor: before.get(tensor) or self._room.put(array)
            for tensor, array in arrays.items()
            if tensor in keep
        }
        for tensor in before.keys() - now.keys():
            self._room.drop(before[tensor])
        self._kept[number] = now

    def _run(
        self, sessions: Sequence[tuple[OrtSession, bool]]
    ) -> Iterator[tuple[int, dict[Tensor, Array]]]:
        """Kept tensors and the pieces' outputs of every batch, in order; a few run side by side."""
        numbers = range(len(self._batches))
        threads = min(usable_cores(), _MOST_THREADS)
        with ThreadPoolExecutor(threads) as pool:
            coming = (pool.submit(self._outputs, sessions, number) for number in numbers)
            waiting = deque(islice(coming, threads))
            for number in numbers:
                outputs = waiting.popleft().result()
                waiting.extend(islice(coming, 1))
                yield number, outputs

    def _outputs(
        self, sessions: Sequence[tuple[OrtSession, bool]], number: int
    ) -> dict[Tensor, Array]:
        known = {tensor: ArrayStore.get(kept) for tensor, kept in self._kept[number].items()}
        found = dict(known)
        for session, dense in sessions:
            names = [tensor.name for tensor in session.inputs]
            outputs = session.outputs(self._values(names, number, known, dense=dense))
            found |= {(name, dense): array for name, array in outputs.items()}
        return found

    def _values(
        self, names: Sequence[str], number: int, known: Mapping[Tensor, Array], *, dense: bool
    ) -> dict[str, Array]:
        """The tensors of these names; those that no piece made are inputs of the graph."""
        found = {name: known[name, False] for name in names if (name, False) in known}
        if dense:
            found |= {name: known[name, True] for name in names if (name, True) in known}
        asked = [name for name in names if name not in found]
        if asked:
            with np.load(self._batches[number].path, allow_pickle=False) as archive:
                found.update((name, archive[name]) for name in asked)
        return found

    def _add(
        self,
        taps: Sequence[Tap],
        sums: Sequence[InputSums],
        number: int,
        arrays: Mapping[Tensor, Array],
    ) -> None:
        """Add each tap's rows to its sums: taps side by side, the batches of each in order."""
        names = [*dict.fromkeys(t for tap in taps for t in (tap.tensor, tap.added) if t)]
        values = self._values(names, number, arrays, dense=False)
        batch = self._batches[number]
        marks = BatchMarks(
            samples=batch.samples,
            factors=self._factors[batch.first : batch.first + batch.samples],
            first=batch.first,
            in_all=sum(each.samples for each in self._batches),
            padding=batch.padding,
        )

        def add(at: int) -> None:
            tap = taps[at]
            rows, factors = _rows(tap, values[tap.tensor], marks)
            dense = _rows(tap, arrays[tap.tensor, True], marks)[0] if tap.differs else rows
            if dense.shape != rows.shape:  # sizes depend on values: which rows belong together?
                dense = rows
            added = None
            if tap.added is not None and tap.weight is not None:
                here, there = values[tap.added], arrays[tap.added, True]
                shape = *values[tap.tensor].shape[:-1], tap.weight.shape[1]
                if here.shape == there.shape and here.size == math.prod(shape):
                    away = (there.astype(rows.dtype) - here).reshape(shape)
                    layout = Layout(shape=(1, shape[-1]), axis=1, m=1)
                    added, _ = rows_of(away, InputReading(layout=layout), marks)
            if factors.size:
                sums[at].add(rows, factors, dense, added)

        with ThreadPoolExecutor(min(usable_cores(), _MOST_THREADS)) as pool:
            list(pool.map(add, range(len(taps))))


def _rows(tap: Tap, x: Array, marks: BatchMarks) -> tuple[Array, NDArray[np.float64]]:
    """The rows that `rows_of` gives; raises BadInputError for values that are not finite."""
    wide = x if x.dtype == np.float64 else x.astype(np.float32)
    rows, factors = rows_of(wide, tap.reading, marks)
    if rows.size and not np.isfinite(rows).all():
        raise BadInputError(
            f"layer {tap.layer!r}: its input {tap.tensor!r} has values that are NaN or infinite "
            f"on calibration samples {marks.first + 1} to {marks.first + marks.samples}",
            hint="look at these samples and at the nodes before the layer; where the file was "
            "converted to float16, --precision float32 shows whether it overflows",
        )
    return rows, factors
