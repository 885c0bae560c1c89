"""Prune with calibration data and die by SIGKILL: `killed_calibration.py MODEL OUT DATA STEP`."""

import os
import signal
import sys
from pathlib import Path

from twofour.main_job import run_prune
from twofour.pipeline.stages import Silent
from twofour.records.options import CalibrationOptions, RunOptions
from twofour.records.weights import Selection


class Killer(Silent):
    """Kills its own process when the layers before the given one are done."""

    def __init__(self, layer: str) -> None:
        self.layer = layer

    def step(self, text: str, done: int, total: int | None) -> None:  # noqa: ARG002  # Progress's
        """Die there."""
        if text.startswith(self.layer):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    model, out, data, layer = sys.argv[1:]
    options = RunOptions(
        calibration=CalibrationOptions(data=data), selection=Selection(all_layers=True)
    )
    run_prune(model, Path(out), options, Killer(layer))
