"""Sets of layers, measured side by side; what was measured once is kept and read back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from twofour.errors import BadInputError, TwofourError
from twofour.pipeline.checks import metric_key
from twofour.pipeline.engine_host import RUNTIMES
from twofour.pipeline.folder import own_folder
from twofour.pipeline.jobs.job import Job, Service
from twofour.pipeline.jobs.local import Processes
from twofour.pipeline.jobs.open import open_jobs
from twofour.pipeline.jobs.ray_cluster import RayCluster
from twofour.pipeline.sensitivity.measured_on import MEASURED_ON
from twofour.pipeline.sensitivity.measuring import MixedModel, UnseenError
from twofour.pipeline.sources.user_code import parse_reference, state_of
from twofour.pipeline.stages import DENSE, SPARSE, Run, onnx_files, onnx_name, versions
from twofour.pipeline.workers import may_pass
from twofour.records.sensitivity import Measured, Measurement
from twofour.store import read_sealed, sealed, sha256_bytes, sha256_file, write_record

MEASURED = "measured"
SERVICE = Service(name="twofour.pipeline.sensitivity.measuring:Measurer", command="measure")
Places = tuple[int, ...]
Step = Callable[[int, int], None]
"""Told how many of how many measurements are there."""


@dataclass(slots=True)
class Sets:
    """Measures mixtures of the dense and the sparse model that lie in one folder."""

    model: MixedModel
    """The dense one, with which the others are compared."""
    content: str
    """sha256 over all that a measurement depends on, besides the layers."""
    workers: Processes | RayCluster
    step: Step
    found: dict[Places, Measured] = field(default_factory=dict)
    watched: dict[str, str] = field(default_factory=dict)
    """Data files that the metric read -> their state then."""
    made: int = 0
    wanted: int = 0
    """Measurements that were not in the folder."""
    is_lasting: bool = True
    """False: a measurement is missing for want of memory, say, and may be there another time."""

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

        jobs = [
            Job(key=key, arguments=(replace(self.model, key=key, places=places),))
            for key, places in left.items()
        ]
        if jobs:
            self.workers.run(jobs, done)

    def _key(self, places: Places) -> str:
        return sha256_bytes(self.content.encode(), ",".join(map(str, places)).encode())

    def _file(self, key: str) -> Path:
        return Path(self.model.folder, MEASURED, f"{key[:32]}.json")

    def _known(self, key: str, places: Places) -> bool:
        """Whether it is in the folder, and the files that the metric read are as they were."""
        try:
            kept = read_sealed(Measurement, self._file(key))
        except BadInputError:
            return False
        if kept.key != key or any(state_of(Path(n)) != s for n, s in kept.watched.items()):
            return False
        if not places and not Path(self.model.folder, self.model.reference).is_file():
            return False
        self._take(places, kept)
        return True

    def _keep(self, places: Places, key: str, value: object) -> None:
        """A measurement is written down before it counts; one without memory is not."""
        if isinstance(value, TwofourError):
            if not places or isinstance(value, UnseenError):
                raise value
            self.is_lasting &= not may_pass(value.message)
            self.found[places] = Measured(error=value.message)
            return
        assert isinstance(value, Measurement)
        write_record(self._file(key), sealed(value))
        self._take(places, value)

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
    files = [f for v in (DENSE, SPARSE) for f in onnx_files(run.file(onnx_name(v)))]
    facts = (
        *(sha256_file(run.file(name)) for name in (*files, MEASURED_ON)),
        str(metric_key(run.options)),
        str(versions("numpy", *RUNTIMES)),
    )
    model = MixedModel(
        key="",
        folder=str(run.path),
        base=onnx_name(DENSE),
        other=onnx_name(SPARSE),
        places=(),
        inputs=MEASURED_ON,
        reference="stages/outputs.npz",
        metric=metric,
        seed=run.options.seed,
    )
    content = sha256_bytes(*(fact.encode() for fact in facts))
    with open_jobs(SERVICE, run.options.side_by_side) as workers:
        yield Sets(model=model, content=content, workers=workers, step=step)


def union(sets: Sequence[Places]) -> Places:
    """The places of several units."""
    return tuple(sorted({place for places in sets for place in places}))
