"""Prune with a permutation and die by SIGKILL at its second class: `... MODEL OUT`."""

import os
import signal
import sys
from pathlib import Path

from twofour.pipeline.run import run_prune
from twofour.pipeline.stages import Silent
from twofour.records.options import MethodOptions, RunOptions, Selection


class Killer(Silent):
    """Kills its own process when one class has its order."""

    def step(self, text: str, done: int, total: int | None) -> None:  # noqa: ARG002  # Progress's
        """Die there."""
        if text.startswith("orders of") and done == 1:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    model, out = sys.argv[1:]
    options = RunOptions(
        method=MethodOptions(permute_seconds=60, repair=False),
        selection=Selection(all_layers=True),
    )
    run_prune(model, Path(out), options, Killer())
