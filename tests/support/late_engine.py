"""A toy engine that knows how its runs are timed once it has run, as one on a GPU."""

from __future__ import annotations

from dataclasses import replace

from support.toy_engine import ToyEngine, ToyModel
from twofour.engines.protocol import OpenRequest
from twofour.inputs.fits import Arrays

TIMING = "mean of runs in a row"


class LateEngine(ToyEngine):
    def open(self, request: OpenRequest) -> ToyModel:
        return LateModel(request)


class LateModel(ToyModel):
    def prepare(self, inputs: Arrays) -> None:
        super().prepare(inputs)
        rows = len(inputs["x"])
        self.settings = replace(self.settings, timing=TIMING, launches=3, enqueue_ms=float(rows))
