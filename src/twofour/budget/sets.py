"""Everything pruned, in a folder of its own, and sets of layers out of it, measured side by side.

What was measured once is kept and read back.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twofour.budget.measurer import (
    BASE,
    MEASURED_ON,
    OTHER,
    REFERENCE,
    Measurer,
    UnseenError,
)
from twofour.budget.pool import Pool, RayCluster
from twofour.errors import BadInputError, TwofourError
from twofour.inputs.calibration import Batch
from twofour.inputs.fits import save_arrays
from twofour.pipeline.checks import metric_key
from twofour.pipeline.folder import STAGES, open_run_folder, own_folder
from twofour.pipeline.stages import (
    DENSE,
    INPUTS,
    Made,
    Run,
    Runner,
    Stage,
    onnx_files,
    onnx_name,
    versions,
)
from twofour.pipeline.validating import validate
from twofour.records.export import LayerMap, TensorShape
from twofour.records.options import SideBySide
from twofour.records.run import ExampleArrays, ExportedVariant, Measured, Measurement
from twofour.records.weights import PruneResult
from twofour.sources.calibration.open import onnx_inputs
from twofour.sources.source import state_of
from twofour.sources.user_code import parse_reference
from twofour.store import link_or_copy, read_sealed, sealed, sha256_bytes, sha256_file, write_record
from twofour.words import count
from twofour.workers.host import RUNTIMES
from twofour.workers.process import may_pass

FOLDER = "sensitivity"
"""Of everything pruned and of the measurements, inside the run folder."""
ENOUGH = 64
"""Samples of the calibration data, the first ones in whole batches."""


@contextmanager
def apart(run: Run) -> Iterator[Run]:
    """The run in a folder of its own."""
    path = run.path / FOLDER
    with open_run_folder(path, run.runner.folder.manifest.source) as folder:
        own_folder(path / STAGES)
        if run.options.fresh:
            folder.forget()
            shutil.rmtree(path / MEASURED, ignore_errors=True)
        yield replace(
            run,
            path=path,
            shown=run.shown / FOLDER,
            runner=Runner(folder, run.progress),
        )


def prune_everything(run: Run, dense: ExportedVariant) -> tuple[PruneResult, LayerMap, str | None]:
    """sparse.onnx beside links to dense.onnx and the inputs, all that the selection takes.

    The text says on what the outputs are compared.
    """
    outer = run.path.parent
    there = onnx_files(outer / onnx_name(DENSE))
    for name in set(onnx_files(run.file(onnx_name(DENSE)))) - {*there}:
        run.file(name).unlink(missing_ok=True)
    for name in (*there, INPUTS):
        link_or_copy(outer / name, run.path / name)
    pruned = run.do(run.model.prune(run))
    run.do(validate(run, pruned, run.model.weights(run)))
    sparse = run.do(run.model.export_sparse(run, dense))
    return pruned, sparse.layers, run.do(_measured_on(run, dense)).note


def _measured_on(run: Run, dense: ExportedVariant) -> Stage[ExampleArrays]:
    """stages/measured-on.npz: 64 calibration samples in whole batches, or the example inputs."""

    def work() -> Made[ExampleArrays]:
        arrays, note = _arrays(run, dense)
        save_arrays(run.file(MEASURED_ON), arrays)
        shapes = {name: tuple(map(int, array.shape)) for name, array in arrays.items()}
        return ExampleArrays(shapes=shapes, note=note), (MEASURED_ON,)

    options = run.options
    return Stage(
        name="measured-on",
        title="take the inputs to measure on",
        kind=ExampleArrays,
        work=work,
        depends_on=(
            options.calibration,
            options.seed,
            run.calibration_key(),
        ),
        packages=("numpy",),
        reads=(INPUTS,),
    )


def _arrays(run: Run, dense: ExportedVariant) -> tuple[dict[str, npt.NDArray[np.generic]], str]:
    """The arrays, the number of the run before each name, and a sentence on what they are."""
    examples = {f"0:{name}": array for name, array in run.example_inputs().items()}
    rows = next((len(a) for a in examples.values() if a.ndim), 1)
    said = f"outputs are compared on the example inputs ({count(rows, 'row')})"
    if run.options.calibration.data is None:
        return examples, said
    try:
        batches = _first_batches(run, dense.inputs)
    except BadInputError as error:  # data that only the torch module takes
        return examples, f"{said}: {error.message}"
    arrays = {f"{i}:{n}": a for i, batch in enumerate(batches) for n, a in batch.arrays.items()}
    samples = sum(batch.samples for batch in batches)
    return arrays, f"outputs are compared on {count(samples, 'sample')} of the calibration data"


def _first_batches(run: Run, tensors: tuple[TensorShape, ...]) -> list[Batch]:
    """Of the calibration data as the file takes them, until there are enough samples."""
    inputs = onnx_inputs(Path(run.source.text).absolute(), tensors)
    data = run.open_calibration(replace(inputs, folder=run.described_in or inputs.folder))
    taken: list[Batch] = []
    for batch in data.batches():
        taken.append(batch)
        if sum(one.samples for one in taken) >= ENOUGH:
            break
    if not taken:
        raise BadInputError("the calibration data has no batch")
    return taken


MEASURED = "measured"
SERVICE = f"{Measurer.__module__}:{Measurer.__name__}", Measurer.measure.__name__
Places = tuple[int, ...]
Step = Callable[[int, int], None]
"""Told how many of how many measurements are there."""


@dataclass(slots=True, kw_only=True)
class Sets:
    """Measures mixtures of the dense and the sparse model that lie in one folder."""

    folder: Path
    metric: str | None
    seed: int
    content: str
    """sha256 over all that a measurement depends on, besides the layers."""
    workers: Pool | RayCluster
    step: Step
    found: dict[Places, Measured] = field(default_factory=dict)
    watched: dict[str, str] = field(default_factory=dict)
    """Data files that the metric read -> their state then."""
    made: int = 0
    wanted: int = 0
    """Measurements that were not in the folder."""
    is_lasting: bool = True
    """False when a measurement failed for a passing reason, such as lack of memory."""

    def measure(self, sets: Iterable[Places]) -> None:
        """Have all of these in `found`; those that are in the folder are not made again.

        A measurement that fails is there with its error, but raises for the dense model (a metric
        that cannot be called, an engine that does not run it) and where a node lacks the files.
        """
        wanted = {self._key(p): p for p in dict.fromkeys(map(tuple, sets)) if p not in self.found}
        left = {key: p for key, p in wanted.items() if not self._known(key, p)}
        self.wanted += len(left)

        def done(key: str, value: object) -> None:
            self.made += 1
            self._keep(left[key], key, value)
            self.step(self.made, self.wanted)

        folder = str(self.folder)
        calls = {key: (folder, places, self.metric, self.seed) for key, places in left.items()}
        if calls:
            self.workers.run(calls, done)

    def _key(self, places: Places) -> str:
        return sha256_bytes(self.content.encode(), ",".join(map(str, places)).encode())

    def _file(self, key: str) -> Path:
        return self.folder / MEASURED / f"{key[:32]}.json"

    def _known(self, key: str, places: Places) -> bool:
        """Whether it is in the folder, and the files that the metric read are as they were."""
        try:
            kept = read_sealed(Measurement, self._file(key))
        except BadInputError:
            return False
        if kept.key != key or any(state_of(Path(n)) != s for n, s in kept.watched.items()):
            return False
        if not places and not (self.folder / REFERENCE).is_file():
            return False
        self._take(places, kept)
        return True

    def _keep(self, places: Places, key: str, value: object) -> None:
        """A measurement is written down before it counts; one that failed is not."""
        if isinstance(value, TwofourError):
            if not places or isinstance(value, UnseenError):
                raise value
            self.is_lasting &= not may_pass(value.message)
            self.found[places] = Measured(error=value.message)
            return
        assert isinstance(value, tuple)
        measured, watched = value
        kept = sealed(Measurement(key=key, measured=measured, watched=watched))
        write_record(self._file(key), kept)
        self._take(places, kept)

    def _take(self, places: Places, kept: Measurement) -> None:
        self.found[places] = kept.measured
        self.watched.update(kept.watched)


@contextmanager
def open_sets(run: Run, step: Step) -> Iterator[Sets]:
    """For the folder of a run that holds dense.onnx, sparse.onnx and the inputs."""
    own_folder(run.file(MEASURED))
    metric = run.options.metric
    if metric is not None and (file := parse_reference(metric).file) is not None:
        metric = f"{file}:{metric.rpartition(':')[2]}"
    files = [file for name in (BASE, OTHER) for file in onnx_files(run.file(name))]
    facts = (
        *(sha256_file(run.file(name)) for name in (*files, MEASURED_ON)),
        str(metric_key(run.options)),
        str(versions("numpy", *RUNTIMES)),
    )
    content = sha256_bytes(*(fact.encode() for fact in facts))
    with open_workers(run.options.side_by_side) as workers:
        yield Sets(
            folder=run.path,
            metric=metric,
            seed=run.options.seed,
            content=content,
            workers=workers,
            step=step,
        )


def open_workers(how: SideBySide) -> Pool | RayCluster:
    """Where measurements are made until its `with` block ends."""
    return Pool(*SERVICE, how.jobs) if how.ray is None else RayCluster(*SERVICE, how.ray)


def union(sets: Sequence[Places]) -> Places:
    """The places of several units."""
    return tuple(sorted({place for places in sets for place in places}))
