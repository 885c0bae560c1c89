"""Services for worker processes that do what libraries do: answer, report, die, hang."""

import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from twofour.engines.protocol import BuildRequest, EngineRow, ProgressCallback
from twofour.engines.timing import EngineTimes, RoundPlan, TimedRequest, with_samples
from twofour.errors import BadInputError, BuildFailedError
from twofour.inputs.fits import Arrays
from twofour.records.export import EngineStatus, VariantBuild
from twofour.records.latency import ComparedVariant
from twofour.workers.host import EngineWorker, OpenedSession

SERVICE = "support.stand_in_worker:StandIn"
DYING = "support.stand_in_worker:DyingEngines"
PLAN = "dying.txt"
"""Beside the model: a line for each failure, "ALL open 11": level, command, signal or message."""


def die(number: int) -> None:
    """By a signal, as a library would."""
    os.kill(os.getpid(), number)
    time.sleep(60)  # until it arrives


class StandIn:
    """Commands of a worker."""

    def __init__(self, report: ProgressCallback) -> None:
        self._report = report

    def add(self, a: int, b: int) -> int:
        return a + b

    def size(self, array: np.ndarray) -> int:
        return int(array.size)

    def refuse(self) -> None:
        raise BadInputError("wrong shape", hint="use another")

    def crash(self) -> None:
        raise ZeroDivisionError("by zero\nsecond line")

    def exhaust(self) -> None:
        raise MemoryError

    def die(self, number: int, said: str = "") -> None:
        sys.stderr.write(said)
        sys.stderr.flush()
        die(number)

    def fork_and_die(self, told: Path) -> None:
        """The number of a child that holds on to all that is open here goes into a file."""
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        told.write_text(str(child))
        die(signal.SIGKILL)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def work(self, seconds: float) -> str:
        """Busy for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(10_000))
        return "done"

    def steps(self, count: int) -> str:
        for step in range(count):
            self._report("building", step + 1, count)
        return "built"

    def file_of(self, module: str) -> str | None:
        return getattr(__import__(module), "__file__", None)

    def threads(self) -> str | None:
        return os.environ.get("OMP_NUM_THREADS")


class KilledAtTheStart(EngineWorker):
    """Engines that are killed when they are tried, as often as the file in $DEATHS is long."""

    def status(self, row: EngineRow) -> EngineStatus:
        deaths = Path(os.environ["DEATHS"])
        if left := deaths.read_text():
            deaths.write_text(left[1:])
            die(signal.SIGKILL)
        return super().status(row)


class DyingEngines(EngineWorker):
    """The engines of a run, which die where the plan beside the model says so."""

    def open(
        self, path: Path, threads: int | None, level: str, kept: Collection[Path] = ()
    ) -> OpenedSession:
        self._folder, self._level = path.parent, level
        self._maybe("open")
        return super().open(path, threads, level, kept)

    def outputs(self, inputs: Arrays) -> dict[str, np.ndarray]:
        self._maybe("outputs")
        return super().outputs(inputs)

    def time(self, wanted: Sequence[TimedRequest], inputs: Arrays, plan: RoundPlan) -> EngineTimes:
        """Of the plans, which are none, as told."""
        opening = wanted[0].opening
        assert opening.file is not None
        self._folder, self._level = opening.file.parent, str(opening.level)
        self._maybe("time")
        if not wanted[0].engine.is_tensorrt:
            return super().time(wanted, inputs, plan)
        rows = (with_samples(ComparedVariant(name=one.name), (1.0, 2.0)) for one in wanted)
        return EngineTimes(rows=tuple(rows))

    def status(self, row: EngineRow) -> EngineStatus:
        """TensorRT can run here, as far as this stand-in goes."""
        if not row.is_tensorrt:
            return super().status(row)
        return EngineStatus(
            engine=row.name, version="10.0", can_run=True, why_not=None, hint=None, device="none"
        )

    def build(self, row: EngineRow, request: BuildRequest) -> VariantBuild:  # noqa: ARG002  # as it is called
        """A build whose log begins before its process may end."""
        lines = ("twofour 0 with TensorRT 10.0.1", "TensorRT version: 10.0.1", "Sparsity: Enabled")
        told = "".join(f"[11/22/2026-01:00:00] [I] {line}\n" for line in lines)
        request.file(".log").write_text(told)
        self._report("building", 1, 2)
        self._folder, self._level = request.onnx.parent, str(request.options.optimization_level)
        self._maybe("build")
        request.file(".plan").write_bytes(b"plan")
        return VariantBuild(
            variant=request.variant,
            onnx=request.onnx.name,
            sparse_weights=request.sparse_weights,
            build_s=1.0,
            size_bytes=4,
            plan=request.file(".plan").name,
            log=request.file(".log").name,
        )

    def _maybe(self, command: str) -> None:
        plan = self._folder / PLAN
        for line in plan.read_text().splitlines() if plan.is_file() else ():
            level, wanted, how = line.split(maxsplit=2)
            if (level, wanted) == (self._level, command):
                if not how.isdigit():
                    raise BuildFailedError(how)
                die(int(how))
