"""Calibration data for a torch module in memory: opened, and given as calls of its forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from twofour.pipeline.sources.calibration.data import CalibrationData
from twofour.pruning.statistics import held_out_samples
from twofour.records.pruning import Calibration

if TYPE_CHECKING:
    from torch import nn

    from twofour.pruning.torch_pruning import CalibrationCalls


def calls_of(module: nn.Module, data: CalibrationData) -> CalibrationCalls:
    """The data's batches in forward's order, read as they are asked for."""
    from twofour.pipeline.sources.calibration.torch_calls import torch_call
    from twofour.pruning.torch_calls import Call
    from twofour.pruning.torch_pruning import CalibrationCalls

    def calls() -> Iterator[Call]:
        for batch in data.batches():
            found = torch_call(module, batch)
            yield Call(
                args=found.args,
                kwargs=found.kwargs,
                samples=batch.samples,
                padding=found.padding,
            )

    return CalibrationCalls(calls=calls(), about=about(data))


def data_of(module: nn.Module, value: object, samples: int) -> CalibrationData:
    """Batches of the caller; raises BadInputError where they do not fit the module's forward."""
    from twofour.pipeline.sources.calibration.models import module_inputs
    from twofour.pipeline.sources.calibration.values import calibration_from_value

    return calibration_from_value(value, module_inputs(module), samples=samples)


def about(data: CalibrationData) -> Calibration:
    """The record of the data."""
    return Calibration(
        source=data.source,
        samples=data.samples,
        held_out=int(held_out_samples(0, data.samples).sum()),
        notes=data.notes,
    )
