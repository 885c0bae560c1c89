"""Run the main job and die by SIGKILL once a stage is recorded: `killed_run.py MODEL OUT STAGE`."""

import os
import signal
import sys
from pathlib import Path

from twofour.main_job import run_all
from twofour.pipeline.stages import Silent
from twofour.records.options import Precision, RunOptions


class Killer(Silent):
    """Kills its own process after one stage."""

    def __init__(self, stage: str) -> None:
        self.last = stage

    def done(self, name: str, *, seconds: float, reused: bool) -> None:  # noqa: ARG002  # Protocol
        """Die after the stage."""
        if name == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    model, out, stage = sys.argv[1:]
    run_all(model, Path(out), RunOptions(precision=Precision.FLOAT32), Killer(stage))
