"""The stage `permute`: the channels of the dense model in an order in which pruning takes less.

Which channels may change places is read from the graph, an order for them searched, judged by the
method that will prune, and proven by the outputs of the dense model before and after.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from twofour.engines.tensorrt.build import precisions_of
from twofour.errors import BadInputError, BuildFailedError
from twofour.graph.files import read_tensor
from twofour.graph.opened import OpenedModel
from twofour.pattern import check
from twofour.pipeline import onnx_data, onnx_stages
from twofour.pipeline.engine_host import RUNTIMES
from twofour.pipeline.folder import STAGES
from twofour.pipeline.onnx_statistics import InputStatistics, look_at_inputs
from twofour.pipeline.stages import (
    DENSE,
    INPUTS,
    PERMUTE,
    PERMUTED,
    Made,
    Progress,
    Run,
    Stage,
    onnx_files,
    onnx_name,
)
from twofour.pipeline.workers import may_pass
from twofour.pruning.methods import method_named
from twofour.pruning.onnx_problems import layer_problem
from twofour.pruning.permutation.apply import permute_onnx, same_outputs
from twofour.pruning.permutation.choosing import (
    ChoiceProgress,
    ClassOrder,
    Reorder,
    Search,
    choose_orders,
    orders_taken,
)
from twofour.pruning.permutation.classes import ChannelClass, Classes, Reader, find_classes
from twofour.pruning.permutation.judging import (
    error_of,
    input_places,
    input_scales,
    judged_rows,
    lost_energy,
    reordered,
)
from twofour.pruning.permutation.search import Stop
from twofour.pruning.selection import choose
from twofour.records.pruning import (
    FixedChannels,
    Permutation,
    PermutedClass,
    PermutedLayer,
    PermutedModel,
)
from twofour.store import read_sealed, sealed, write_record
from twofour.words import in_seconds

if TYPE_CHECKING:
    from twofour.pipeline.onnx_calibrating import CalibrationJob
    from twofour.pipeline.sources.calibration.data import CalibrationData
    from twofour.records.options import Selection

Array = NDArray[Any]
Outputs = Mapping[str, Array]
_TOLD_EVERY_S = 0.2
_NO_DATA = (
    "the order of channels is chosen by magnitude; calibration data (--calibrate) would tell what "
    "it does to the outputs of the layers"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """state.json: the orders that were found so far."""

    key: str
    records: tuple[ClassOrder, ...] = ()
    seal: str = ""


def permute(run: Run) -> Stage[PermutedModel]:
    """permuted.onnx: dense.onnx with its channels in a better order, where there is one."""
    dense = onnx_files(run.file(onnx_name(DENSE)))
    runs_on_data = run.model is None and run.options.calibration.data is not None

    def work() -> Made[PermutedModel]:
        onnx_stages.remove_onnx(run.file(PERMUTED))
        found = _permuted(run)
        return found, () if found.file is None else onnx_files(run.file(found.file))

    return Stage(
        name="permute",
        title="search a better order of channels",
        record=PERMUTE,
        kind=PermutedModel,
        work=work,
        options=("pattern", "selection", "method", "calibration", "seed"),
        facts={"calibration": _data_key(run), "source": run.source.key()},
        lasting=lambda found: not may_pass(found.about.refused or ""),
        packages=("onnx", "scipy", *RUNTIMES),
        watched=lambda: run.calibration_files,
        reads=dense if runs_on_data else (*dense, INPUTS),
    )


def _data_key(run: Run) -> str:
    if run.model is None:
        return onnx_data.data_key(run)
    from twofour.pipeline.torch_calibrating import data_key

    return data_key(run)


def _permuted(run: Run) -> PermutedModel:
    opened = run.models.open(run.file(onnx_name(DENSE)))
    choice = _Choice(run, opened)
    folder = run.file(STAGES) / "permutation"
    records = choice.orders(folder)
    orders, about = orders_taken(records), choice.about(records)
    shutil.rmtree(folder, ignore_errors=True)
    if not orders:
        return PermutedModel(about=about, orders={}, file=None)
    permute_onnx(opened, run.file(PERMUTED), choice.classes, orders)
    different = _why_different(run, opened, choice.example())
    if different is None and run.model is not None:
        from twofour.pipeline.torch_permuting import why_not_put_back

        different = why_not_put_back(run, orders)
    if different is None:
        return PermutedModel(about=about, orders=orders, file=PERMUTED)
    onnx_stages.remove_onnx(run.file(PERMUTED))
    run.progress.note(f"the channels stay in their order: {different}")
    left = tuple(replace(each, taken=False) for each in about.classes)
    return PermutedModel(
        about=replace(about, classes=left, refused=different), orders={}, file=None
    )


def _why_different(run: Run, opened: OpenedModel, inputs: Outputs) -> str | None:
    """Why the permuted model is not the dense one, or is not known to be; None where it is."""
    try:
        before = run.sessions.open(opened.path).outputs(inputs)
        after = run.sessions.open(run.file(PERMUTED)).outputs(inputs)
    except BuildFailedError as error:
        return f"the model's outputs before and after could not be compared: {error.message}"
    finally:
        run.sessions.close()
    return same_outputs(before, after, dtype=_computes_in(opened))


def _computes_in(opened: OpenedModel) -> str:
    """The coarsest type of the model."""
    used = precisions_of(opened.proto)
    kinds = (("int8", used.int8), ("bfloat16", used.bfloat16), ("float16", used.float16))
    return next((kind for kind, is_used in kinds if is_used), "float32")


def _chosen_by(run: Run, opened: OpenedModel) -> tuple[Selection, CalibrationData | None]:
    """Which layers of the file are pruned, and the data for its inputs."""
    has_data = run.options.calibration.data is not None
    if run.model is None:
        return run.options.selection, onnx_data.open_data(run, opened) if has_data else None
    from twofour.pipeline import torch_permuting

    data = None
    if has_data:
        try:
            data = torch_permuting.open_data(run, opened)
        except BadInputError as error:
            run.progress.note(error.message)
    return torch_permuting.selection_of(run, opened), data


class _Choice:
    """The classes of one model, and the orders that they get."""

    def __init__(self, run: Run, opened: OpenedModel) -> None:
        self._run, self._opened = run, opened
        self._pattern = run.options.pattern
        self._selection, self._data = _chosen_by(run, opened)
        weights = opened.weights(self._pattern).weights
        chosen = choose(weights, self._pattern, self._selection)
        self._layers = {weight.layer for weight, is_pruned, _ in chosen if is_pruned}
        self.classes: Classes = find_classes(opened, self._pattern)

    def example(self) -> Outputs:
        """What the model is run on: the first calibration batch, else the example inputs."""
        if self._data is not None:
            return next(self._data.batches()).arrays
        return self._run.example_inputs()

    def orders(self, folder: Path) -> tuple[ClassOrder, ...]:
        """An order for each class that a pruned layer reads; goes on where a run was killed."""
        read = [each for each in self.classes.classes if self._read(each)]
        if not read:
            self._run.progress.note("no input channels of the pruned layers can change places")
            return ()
        how = Search(
            pattern=self._pattern,
            layers=self._layers,
            seconds=self._run.options.method.permute_seconds,
            seed=self._run.options.seed,
        )
        folder.mkdir(parents=True, exist_ok=True)
        if self._data is None:
            self._run.progress.note(_NO_DATA)
            key = ""
        else:
            job = onnx_data.calibration_job(self._run, self._opened, self._data, folder / "seen")
            job = replace(job, selection=self._selection)
            how, key = self._with_data(how, job), job.key
        return self._searched(how, _Kept(folder / "state.json", key))

    def _with_data(self, how: Search, job: CalibrationJob) -> Search:
        seen = look_at_inputs(job, self._run.progress)
        judge = _Judge(job=job, seen=seen, readers=self._readers(), classes=self.classes)
        return replace(how, scales=_Scales(seen, sorted(self._layers)), score=judge)

    def _searched(self, how: Search, kept: _Kept) -> tuple[ClassOrder, ...]:
        said = _Said(self._run.progress, how.seconds or 0.0)

        def progress(step: ChoiceProgress) -> None:
            if step.record is not None:
                kept.add(step.record)
            said.step(step)

        known = {**{record.key: record for record in self._held()}, **kept.records}
        return choose_orders(self.classes, self._values, how, known=known, progress=progress)

    def about(self, records: Sequence[ClassOrder]) -> Permutation:
        """The record for people."""
        of_key = {each.key: each for each in self.classes.classes}
        names = self._names()
        return Permutation(
            seconds=self._run.options.method.permute_seconds,
            classes=tuple(_class_record(r, self._read(of_key[r.key]), names) for r in records),
            fixed=tuple(
                FixedChannels(
                    layer=names.get(each.layer, each.layer),
                    channels=each.channels,
                    reason=each.reason,
                )
                for each in self.classes.fixed
                if each.layer in self._layers
            ),
        )

    def _names(self) -> dict[str, str]:
        """What the user calls the layers of an exported file."""
        if self._run.model is None:
            return {}
        from twofour.pipeline.torch_permuting import layer_names

        return layer_names(self._run, self._opened)

    def _read(self, each: ChannelClass) -> list[str]:
        return [reader.layer for reader in each.readers if reader.layer in self._layers]

    def _readers(self) -> dict[str, Reader]:
        return {reader.layer: reader for each in self.classes.classes for reader in each.readers}

    def _values(self, constant: str) -> Array:
        return read_tensor(self.classes.tensors[constant], self._opened.path)

    def _held(self) -> Iterator[ClassOrder]:
        """Classes of layers that came in N:M: another order would break it."""
        for each in self.classes.classes:
            for reader in each.readers:
                if not check(self._values(reader.constant), reader.axis, self._pattern).violations:
                    yield ClassOrder(
                        key=each.key,
                        order=tuple(range(each.size)),
                        taken=False,
                        reason=f"{reader.layer} is {self._pattern} already in the order it has",
                        efficacy=0.0,
                        steps=0,
                        stop=Stop.CONVERGED,
                        layers=(),
                    )
                    break


def _class_record(
    record: ClassOrder, layers: Sequence[str], names: Mapping[str, str]
) -> PermutedClass:
    judged = {each.layer: each for each in record.layers}
    rows = []
    for layer in layers:
        row, known = PermutedLayer(layer=names.get(layer, layer)), judged.get(layer)
        if known is not None:
            row = replace(
                row,
                kept_before=known.kept_before,
                kept_after=known.kept,
                error_before=known.error_before,
                error_after=known.error,
            )
        rows.append(row)
    return PermutedClass(
        channels=len(record.order),
        layers=tuple(rows),
        efficacy=record.efficacy,
        taken=record.taken,
        reason=record.reason,
        is_time_cut=record.stop is Stop.SECONDS,
    )


class _Kept:
    """Orders that were found, in a file."""

    def __init__(self, file: Path, key: str) -> None:
        self._file, self._key = file, key
        self.records: dict[str, ClassOrder] = {}
        try:
            state = read_sealed(_State, file)
        except BadInputError:  # none yet, or damaged
            return
        if state.key == key:
            self.records = {record.key: record for record in state.records}

    def add(self, record: ClassOrder) -> None:
        """Known from now on, also to a run after this one is killed."""
        if record.key not in self.records:
            self.records[record.key] = record
            state = _State(key=self._key, records=tuple(self.records.values()))
            write_record(self._file, sealed(state))


class _Said:
    """Tells how far the search is and what time it has left, a few times in a second."""

    def __init__(self, talk: Progress, seconds: float) -> None:
        self._talk, self._seconds = talk, seconds
        self._started = self._last = time.monotonic()

    def step(self, step: ChoiceProgress) -> None:
        now = time.monotonic()
        if step.record is None and now - self._last < _TOLD_EVERY_S:
            return
        self._last = now
        left = max(0.0, self._started + self._seconds - now)
        classes = "1 class" if step.of == 1 else f"{step.of:,} classes"
        words = f"orders of {classes} of channels, at most {in_seconds(left)} left"
        self._talk.step(words, step.classes_done, step.of)


class _Scales(Mapping[str, Array]):
    """Sizes of the inputs of layers, in the shape of their weights, worked out when asked for."""

    def __init__(self, seen: InputStatistics, layers: Sequence[str]) -> None:
        self._seen, self._layers = seen, layers

    def __getitem__(self, layer: str) -> Array:
        piece, known = self._seen.piece(layer), self._seen.of(layer)
        if piece is None or known is None:
            raise KeyError(layer)
        return input_scales(piece.view, piece.layout, known)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


@dataclass(slots=True, kw_only=True)
class _Judge:
    """Output error of a layer after the method that will prune it."""

    job: CalibrationJob
    seen: InputStatistics
    readers: Mapping[str, Reader]
    classes: Classes
    _before: dict[str, float] = field(default_factory=dict)

    def __call__(self, layer: str, reorder: Reorder | None) -> float:
        if reorder is not None:
            return self._error(layer, reorder)
        if layer not in self._before:
            self._before[layer] = self._error(layer, None)
        return self._before[layer]

    def _error(self, layer: str, reorder: Reorder | None) -> float:
        job, piece, known = self.job, self.seen.piece(layer), self.seen.of(layer)
        if piece is None or known is None:
            return self._energy(self.readers[layer], reorder)
        problem = judged_rows(layer_problem(piece, job.pattern, known, job.opened.path))
        if reorder is not None:
            problem = reordered(problem, input_places(piece.view, piece.layout, reorder))
        return error_of(problem, method_named(job.method), job.options)

    def _energy(self, reader: Reader, reorder: Reorder | None) -> float:
        """Of a layer whose inputs nobody saw: it will be pruned by magnitude."""
        stored = read_tensor(self.classes.tensors[reader.constant], self.job.opened.path)
        moved = stored if reorder is None else reorder(stored)
        return lost_energy(moved, reader.axis, self.job.pattern)
