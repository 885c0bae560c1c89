"""The inputs on which outputs are compared: calibration data where there is some, else examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twofour.errors import BadInputError
from twofour.pipeline.folder import STAGES
from twofour.pipeline.sources.calibration.data import Batch
from twofour.pipeline.sources.calibration.models import onnx_inputs
from twofour.pipeline.sources.calibration.open import calibration_key, open_calibration
from twofour.pipeline.sources.inputs import save_arrays
from twofour.pipeline.stages import INPUTS, Made, Run, Stage
from twofour.records.export import TensorShape
from twofour.records.run import ExampleArrays, ExportedVariant
from twofour.words import count

MEASURED_ON = f"{STAGES}/measured-on.npz"
MOST_ROWS = 64
"""Of the calibration data, the first ones."""


def measured_on(run: Run, dense: ExportedVariant) -> Stage[ExampleArrays]:
    """stages/measured-on.npz: up to 64 calibration samples; the example inputs where none fit."""

    def work() -> Made[ExampleArrays]:
        arrays, note = _arrays(run, dense)
        save_arrays(run.file(MEASURED_ON), arrays)
        shapes = {name: tuple(map(int, array.shape)) for name, array in arrays.items()}
        return ExampleArrays(shapes=shapes, note=note), (MEASURED_ON,)

    options = run.options
    return Stage(
        name="measured-on",
        title="take the inputs to measure on",
        record=f"{STAGES}/measured-on.json",
        kind=ExampleArrays,
        work=work,
        options=("calibration", "seed"),
        facts={"data": calibration_key(options.calibration, _described(run), seed=options.seed)},
        packages=("numpy",),
        reads=(INPUTS,),
    )


def _arrays(run: Run, dense: ExportedVariant) -> tuple[dict[str, npt.NDArray[np.generic]], str]:
    """The arrays, and a sentence on what they are."""
    examples = run.example_inputs()
    rows = next((len(a) for a in examples.values() if a.ndim), 1)
    said = f"outputs are compared on the example inputs ({count(rows, 'row')})"
    if run.options.calibration.data is None:
        return examples, said
    try:
        arrays = _of_calibration(run, dense.inputs)
    except BadInputError as error:  # data that only the torch module takes
        return examples, f"{said}: {error.message}"
    rows = next(len(a) for a in arrays.values() if a.ndim)
    return arrays, f"outputs are compared on {count(rows, 'sample')} of the calibration data"


def _of_calibration(run: Run, tensors: Sequence[TensorShape]) -> dict[str, npt.NDArray[np.generic]]:
    """Batches of the same sizes side by side; one alone where the file fixes the batch."""
    options = run.options
    inputs = onnx_inputs(Path(run.source.text).absolute(), tensors)
    inputs = replace(inputs, folder=_described(run) or inputs.folder)
    data = open_calibration(options.calibration, inputs, seed=options.seed, folder=run.file(STAGES))
    is_free = all(t.shape and isinstance(t.shape[0], str) for t in tensors)
    taken = list(_alike(data.batches(), MOST_ROWS if is_free else 1))
    if not taken:
        raise BadInputError("the calibration data has no batch")
    return {
        name: np.concatenate([batch.arrays[name] for batch in taken])[
            : MOST_ROWS if is_free else None
        ]
        for name in taken[0].arrays
    }


def _alike(batches: Iterator[Batch], most: int) -> Iterator[Batch]:
    """The first batches of one size behind the first axis, until there are so many samples."""
    sizes, samples = None, 0
    for batch in batches:
        of_this = {name: array.shape[1:] for name, array in batch.arrays.items()}
        sizes = sizes or of_this
        if of_this == sizes:
            yield batch
            samples += batch.samples
        if samples >= most:
            return


def _described(run: Run) -> Path | None:
    """Where the model's tokenizer and image processor may lie."""
    path = Path(run.source.text).absolute()
    if path.is_dir():
        return path
    return path.parent if path.is_file() else None
