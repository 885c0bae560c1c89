"""Run a job and die by SIGKILL once a stage is recorded: `killed_run.py MODEL OUT STAGE [RAY]`.

It is the main job, and with the address of a Ray cluster `fleet`, which needs no OUT.
"""

import os
import signal
import sys
from pathlib import Path

from twofour.jobs import run_all
from twofour.pipeline.stages import Silent
from twofour.records.options import Precision, RunOptions, SideBySide


class Killer(Silent):
    """Kills its own process after one stage."""

    def __init__(self, stage: str) -> None:
        self.last = stage

    def done(self, name: str, *, seconds: float) -> None:  # noqa: ARG002  # Protocol
        if name == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    model, out, stage, *ray = sys.argv[1:]
    if ray:
        from twofour.fleet import run_fleet

        run_fleet(model, RunOptions(side_by_side=SideBySide(ray=ray[0])), Killer(stage))
    else:
        run_all(model, Path(out), RunOptions(precision=Precision.FLOAT32), Killer(stage))
