"""Pieces of an ONNX graph: cut out by the parent, and run on calibration data by a worker process.

Weights are not copied: a piece names them by their place in the model's own files, or in the files
of arrays that were changed since.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from twofour.calibrate.input_rows import BatchMarks, InputReading, rows_of
from twofour.calibrate.new_values import ONNX_TYPES, NewValues
from twofour.engines.machine import usable_cores
from twofour.engines.onnxruntime.session import OrtSession, ProviderSetup
from twofour.engines.protocol import ProgressCallback
from twofour.errors import BadInputError
from twofour.graph.files import (
    SEPARATE_INITIALIZERS,
    Array,
    external_data,
    load_external,
    point_at,
    storage_key,
)
from twofour.graph.opened import widen
from twofour.pruning.matrices import Layout
from twofour.pruning.resources import ArrayStore, StoredArray, one_blas_thread
from twofour.pruning.statistics import InputSums, Statistics
from twofour.records import frozen

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


def in_float32(piece: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """The piece, which is in the folder, in float32 and with all its values in it."""
    load_external(piece, folder / "piece")
    widen(piece)
    return piece


class PieceCutter:
    """Cuts pieces out of a graph with its new values, to be written into a folder."""

    def __init__(self, values: NewValues, files: Mapping[Path, str]) -> None:
        """`files`: the names of the model's files in the folder of the pieces."""
        self._values = values
        self._graph = values.graph
        self._files = files

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
        whole = graph.opened.proto
        model = onnx.ModelProto(
            ir_version=max(whole.ir_version, SEPARATE_INITIALIZERS),
            opset_import=whole.opset_import,
            functions=whole.functions,
        )
        model.graph.name = "piece"
        places = sorted(graph.needed(wanted, have))
        self._add_nodes(places, model)
        made = {name for at in places for name in graph.scope.nodes[at].proto.output}
        read = dict.fromkeys(name for at in places for name in graph.reads[at])
        self._add_inputs([name for name in read if name not in made], have, model.graph)
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
        return model

    def _add_nodes(self, places: Sequence[int], model: onnx.ModelProto) -> None:
        """Add the nodes; Constant nodes become initializers."""
        scope = self._graph.scope
        constants = []
        for at in places:
            proto = scope.nodes[at].proto
            if proto.op_type == "Constant" and proto.output[0] in scope.constants:
                constants.append(proto.output[0])
            else:
                model.graph.node.append(proto)
        # an attribute's values cannot lie in another file: ONNX Runtime would not find them
        load_external(model, self._graph.opened.path)
        for name in constants:
            self._add_tensor(name, scope.constants[name], model.graph)

    def _add_inputs(
        self, names: Sequence[str], have: Mapping[str, TypeAndRank], body: onnx.GraphProto
    ) -> None:
        """Add what the nodes read and none of them makes: kept tensors, weights, inputs."""
        scope = self._graph.scope
        inputs = {value.name: value for value in scope.graph.input}
        for name in names:
            if name in have:
                dtype, rank = have[name]
                # every size has a name of its own: batches may differ in any
                shape = [f"{name}.{axis}" for axis in range(rank)]
                code = ONNX_TYPES[dtype]
                body.input.append(onnx.helper.make_tensor_value_info(name, code, shape))
            elif name in scope.constants:
                self._add_tensor(name, scope.constants[name], body)
            elif name in inputs:
                body.input.append(inputs[name])

    def _add_tensor(self, name: str, tensor: onnx.TensorProto, body: onnx.GraphProto) -> None:
        """Add the constant by its name; its values stay in their file."""
        changed = self._values.arrays.get(storage_key(tensor))
        added = body.initializer.add()
        # a small constant in the model itself; a large one of it was left on disk by the parser
        if changed is None and tensor.data_location != onnx.TensorProto.EXTERNAL:
            added.CopyFrom(tensor)
            added.name = name
            return
        added.name = name
        added.data_type = tensor.data_type
        added.dims.extend(tensor.dims)
        if changed is not None:
            point_at(added, changed.name, 0, changed.stat().st_size)
        else:
            place = external_data(tensor, self._graph.opened.path)
            point_at(added, self._files[place.file], place.offset, place.size_bytes)


@frozen
class BatchFile(BatchMarks):
    """A batch on disk: arrays by name of the graph's input."""

    path: Path


@frozen
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

    @property
    def reads(self) -> set[Tensor]:
        """The tensors whose values it takes, of both models."""
        tensors = {(self.tensor, False)}
        if self.differs:
            tensors.add((self.tensor, True))
        if self.added is not None:
            tensors |= {(self.added, False), (self.added, True)}
        return tensors


@frozen
class PassResult:
    """The statistics of a pass over the batches, and the tensors that are kept now."""

    statistics: tuple[Statistics | None, ...]
    """One for each tap; None: no input came."""
    kept: dict[Tensor, TypeAndRank]
    """All tensors that are kept now: sequences and texts are not."""


class CalibrationWorker:
    """Runs pieces on the batches; the parent calls its methods, and gets what they raise.

    It keeps the tensors between two pieces, so that every node runs once on every batch, and adds
    up the statistics of the layers' inputs; only these go back to the parent.
    """

    def __init__(self, report: ProgressCallback) -> None:
        self._report = report
        self._batches: tuple[BatchFile, ...] = ()
        self._room = ArrayStore(Path(), 0)
        self._kept: list[dict[Tensor, StoredArray]] = []
        """For each batch the tensors that later pieces start from."""

    def begin(self, folder: Path, batches: Sequence[BatchFile]) -> None:
        """Take the batches; `folder` is for tensors that do not fit into memory."""
        self._room = ArrayStore(folder, KEPT_BYTES)
        self._batches = tuple(batches)
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
        sessions = []
        for piece, dense in pieces:
            session = OrtSession(piece, threads=1, level=level, providers=setup)
            sessions.append((session, dense))
        sums = [InputSums(tap.weight) for tap in taps]
        with one_blas_thread():
            for number, arrays in self._run(sessions):
                self._add(taps, sums, number, arrays)
                self._pass_on(number, arrays, keep)
        kept = {}
        for tensor, stored in self._kept[0].items():
            kept[tensor] = stored.dtype.name, len(stored.shape)
        return PassResult(statistics=tuple(each.statistics() for each in sums), kept=kept)

    def _pass_on(
        self, number: int, arrays: Mapping[Tensor, Array], keep: Collection[Tensor]
    ) -> None:
        """Keep the tensors of one batch that later pieces start from, and drop the others."""
        before = self._kept[number]
        now = {}
        for tensor, array in arrays.items():
            # ONNX Runtime gives a sequence as a list, texts as objects
            if tensor in keep and isinstance(array, np.ndarray) and not array.dtype.hasobject:
                now[tensor] = before.get(tensor) or self._room.put(array)
        for tensor in before.keys() - now.keys():
            self._room.drop(before[tensor])
        self._kept[number] = now

    def _run(
        self, sessions: Sequence[tuple[OrtSession, bool]]
    ) -> Iterator[tuple[int, dict[Tensor, Array]]]:
        """Kept tensors and the pieces' outputs of every batch, in order; a few run side by side."""
        threads = min(usable_cores(), _MOST_THREADS)
        coming: deque[Future[dict[Tensor, Array]]] = deque()
        with ThreadPoolExecutor(threads) as pool:
            for number in range(len(self._batches) + threads):
                if number < len(self._batches):
                    coming.append(pool.submit(self._outputs, sessions, number))
                # with 2 threads: batches 0, 1 and 2 wait or run, 0 is taken, 3 waits, ...
                first = number - threads
                if first >= 0:
                    yield first, coming.popleft().result()

    def _outputs(
        self, sessions: Sequence[tuple[OrtSession, bool]], number: int
    ) -> dict[Tensor, Array]:
        known = {tensor: ArrayStore.get(kept) for tensor, kept in self._kept[number].items()}
        arrays = dict(known)
        for session, dense in sessions:
            names = [tensor.name for tensor in session.inputs]
            outputs = session.outputs(self._values(names, number, known, dense=dense))
            arrays.update(((name, dense), array) for name, array in outputs.items())
        return arrays

    def _values(
        self, names: Collection[str], number: int, known: Mapping[Tensor, Array], *, dense: bool
    ) -> dict[str, Array]:
        """The tensors of these names; those that no piece made are inputs of the graph."""
        values = {}
        for name in names:
            # a piece of the dense model reads the dense tensor where that is another one
            if dense and (name, True) in known:
                values[name] = known[name, True]
            elif (name, False) in known:
                values[name] = known[name, False]
        given = [name for name in names if name not in values]
        if given:
            with np.load(self._batches[number].path, allow_pickle=False) as archive:
                values.update((name, archive[name]) for name in given)
        return values

    def _add(
        self,
        taps: Sequence[Tap],
        sums: Sequence[InputSums],
        number: int,
        arrays: Mapping[Tensor, Array],
    ) -> None:
        """Add each tap's rows to its sums: taps side by side, the batches of each in order."""
        names = {name for tap in taps for name, _ in tap.reads}
        values = self._values(names, number, arrays, dense=False)
        marks = self._batches[number]

        def add(tap: Tap, to: InputSums) -> None:
            rows, factors = _rows(tap, values[tap.tensor], marks)
            if not factors.size:
                return
            dense = rows
            if tap.differs:
                dense, _ = _rows(tap, arrays[tap.tensor, True], marks)
            if dense.shape != rows.shape:  # sizes depend on values: which rows belong together?
                dense = rows
            to.add(rows, factors, dense, _added_rows(tap, values, arrays, marks))

        with ThreadPoolExecutor(min(usable_cores(), _MOST_THREADS)) as pool:
            list(pool.map(add, taps, sums))


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


def _added_rows(
    tap: Tap, values: Mapping[str, Array], arrays: Mapping[Tensor, Array], marks: BatchMarks
) -> Array | None:
    """What the dense model adds to the outputs less what this one adds; None: not known."""
    if tap.added is None or tap.weight is None:
        return None
    x = values[tap.tensor]
    here = values[tap.added]
    there = arrays[tap.added, True]
    outputs = tap.weight.shape[1]
    shape = (*x.shape[:-1], outputs)
    # (2, 5, 8) inputs and 6 outputs: what is added must have the 2 x 5 x 6 numbers of the outputs
    if here.shape != there.shape or here.size != math.prod(shape):
        return None
    kind = np.float64 if x.dtype == np.float64 else np.float32
    away = (there.astype(kind) - here).reshape(shape)
    layout = Layout(shape=(1, outputs), axis=1, m=1)
    rows, _ = rows_of(away, InputReading(layout=layout), marks)
    return rows
