"""Prune with calibration data and die by SIGKILL: `killed_calibration.py MODEL DATA OUT LEVEL`."""

import os
import signal
import sys
from pathlib import Path

from twofour.pipeline.run import run_prune
from twofour.pipeline.stages import Silent
from twofour.records.options import CalibrationOptions, MethodOptions, RunOptions


class Killer(Silent):
    """Kills its own process when the N-th level begins."""

    def __init__(self, level: int) -> None:
        self._level = level

    def step(self, text: str, done: int, total: int | None) -> None:  # noqa: ARG002  # Progress's
        """Die where asked."""
        if done == self._level:
            os.kill(os.getpid(), signal.SIGKILL)


def options(data: Path) -> RunOptions:
    """By ADMM, with these data."""
    return RunOptions(
        calibration=CalibrationOptions(data=str(data)), method=MethodOptions(name="admm")
    )


if __name__ == "__main__":
    model, data, out, level = sys.argv[1:]
    run_prune(model, Path(out), options(Path(data)), Killer(int(level)))
