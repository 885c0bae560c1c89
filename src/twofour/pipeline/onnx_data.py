"""Calibration data of a run over an ONNX file, and what is to be done with them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twofour.graph.opened import OpenedModel
from twofour.pipeline.engine_host import RUNTIMES
from twofour.pipeline.folder import STAGES
from twofour.pipeline.sources.calibration.open import calibration_key
from twofour.pipeline.sources.source import key_of
from twofour.pipeline.stages import DENSE, Run, onnx_name, versions
from twofour.store import sha256_file

if TYPE_CHECKING:
    from twofour.pipeline.onnx_calibrating import CalibrationJob
    from twofour.pipeline.sources.calibration.data import CalibrationData
    from twofour.pruning.onnx_file import Calibrated


def calibrated(run: Run, opened: OpenedModel, folder: Path) -> Calibrated:
    """New weights by the calibration data; a folder that an earlier run left is gone on with."""
    from twofour.pipeline.onnx_calibrating import calibrate

    data = open_data(run, opened)
    return calibrate(calibration_job(run, opened, data, folder), run.progress)


def _beside(run: Run) -> Path:
    """Where the model's tokenizer and image processor may lie."""
    return Path(run.source.text).absolute().parent


def data_key(run: Run) -> str:
    """sha256 over the run's calibration data; "" without any."""
    return calibration_key(run.options.calibration, _beside(run), seed=run.options.seed)


def open_data(run: Run, opened: OpenedModel) -> CalibrationData:
    """The run's calibration data for the file, which is named as the user did."""
    from twofour.pipeline.sources.calibration.models import onnx_inputs
    from twofour.pipeline.sources.calibration.open import open_calibration

    options = run.options
    inputs = onnx_inputs(Path(run.source.text).absolute(), opened.inputs)
    data = open_calibration(options.calibration, inputs, seed=options.seed, folder=run.file(STAGES))
    run.calibration_files[:] = data.watched
    return data


def calibration_job(
    run: Run, opened: OpenedModel, data: CalibrationData, folder: Path
) -> CalibrationJob:
    """What the options say is to be done with these data; `folder` keeps what is finished."""
    from twofour.pipeline.onnx_calibrating import CalibrationJob

    options = run.options
    facts = (options.pattern, options.selection, options.method, options.calibration)
    parts = (*map(repr, (*facts, versions(*RUNTIMES))), data.key())
    reference = run.models.open(run.file(onnx_name(DENSE))) if options.refits_a_mask else None
    read = [opened] if reference is None else [opened, reference]
    files = (sha256_file(f) for model in read for f in (model.path, *model.data_files))
    return CalibrationJob(
        opened=opened,
        pattern=options.pattern,
        selection=options.selection,
        method=options.method_name,
        options=options.method,
        data=data,
        folder=folder,
        reference=reference,
        key=key_of(*parts, *files),
    )
