"""Run the main job and die by SIGKILL where asked: `killed_run.py MODEL OUT STAGE begin|end`.

Progress is told of each stage before and after its work, so that is where the process dies; "end"
comes after run.json was written, "begin" leaves the stage undone.
"""

import os
import signal
import sys
from pathlib import Path

from twofour.pipeline.run import run_all
from twofour.pipeline.stages import Silent
from twofour.records.options import Precision, RunOptions


class Killer(Silent):
    """Kills its own process at one place."""

    def __init__(self, stage: str, moment: str) -> None:
        self.where = (stage, moment)

    def stage(self, name: str, title: str) -> None:  # noqa: ARG002  # Progress's signature
        """Die before the stage."""
        self._at(name, "begin")

    def done(self, name: str, *, seconds: float, reused: bool) -> None:  # noqa: ARG002  # as above
        """Die after the stage."""
        self._at(name, "end")

    def _at(self, name: str, moment: str) -> None:
        if (name, moment) == self.where:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    model, out, stage, moment = sys.argv[1:]
    run_all(model, Path(out), RunOptions(precision=Precision.FLOAT32), Killer(stage, moment))
