"""The inputs on which outputs are compared: calibration data where there is some, else examples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from twofour.errors import BadInputError
from twofour.pipeline.folder import STAGES
from twofour.pipeline.sources.calibration.data import Batch, ModelInputs
from twofour.pipeline.sources.calibration.models import onnx_inputs
from twofour.pipeline.sources.calibration.open import calibration_key, open_calibration
from twofour.pipeline.sources.inputs import save_arrays
from twofour.pipeline.stages import INPUTS, Made, Run, Stage
from twofour.records.export import TensorShape
from twofour.records.run import ExampleArrays, ExportedVariant
from twofour.words import count

MEASURED_ON = f"{STAGES}/measured-on.npz"
ENOUGH = 64
"""Samples of the calibration data, the first ones in whole batches."""
Array: TypeAlias = npt.NDArray[np.generic]


def measured_on(run: Run, dense: ExportedVariant) -> Stage[ExampleArrays]:
    """stages/measured-on.npz: 64 calibration samples in whole batches, or the example inputs."""

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
        facts={"data": calibration_key(options.calibration, described_in(run), seed=options.seed)},
        packages=("numpy",),
        reads=(INPUTS,),
    )


def batches_of(arrays: Mapping[str, Array]) -> list[dict[str, Array]]:
    """The inputs of each run of the model, in order, from the arrays of the file."""
    found: dict[int, dict[str, Array]] = defaultdict(dict)
    for key, array in arrays.items():
        number, _, name = key.partition(":")
        found[int(number)][name] = array
    return [found[number] for number in sorted(found)]


def _arrays(run: Run, dense: ExportedVariant) -> tuple[dict[str, Array], str]:
    """The arrays, the number of the run before each name, and a sentence on what they are."""
    examples = {f"0:{name}": array for name, array in run.example_inputs().items()}
    rows = next((len(a) for a in examples.values() if a.ndim), 1)
    said = f"outputs are compared on the example inputs ({count(rows, 'row')})"
    if run.options.calibration.data is None:
        return examples, said
    try:
        batches = _of_calibration(run, dense.inputs)
    except BadInputError as error:  # data that only the torch module takes
        return examples, f"{said}: {error.message}"
    arrays = {f"{i}:{n}": a for i, batch in enumerate(batches) for n, a in batch.arrays.items()}
    samples = sum(batch.samples for batch in batches)
    return arrays, f"outputs are compared on {count(samples, 'sample')} of the calibration data"


def _of_calibration(run: Run, tensors: Sequence[TensorShape]) -> list[Batch]:
    """The first batches as the file takes them."""
    inputs = onnx_inputs(Path(run.source.text).absolute(), tensors)
    return first_batches(run, replace(inputs, folder=described_in(run) or inputs.folder))


def first_batches(run: Run, inputs: ModelInputs) -> list[Batch]:
    """Of the calibration data, until there are enough samples; raises BadInputError without any."""
    options = run.options
    data = open_calibration(options.calibration, inputs, seed=options.seed, folder=run.file(STAGES))
    taken: list[Batch] = []
    for batch in data.batches():
        taken.append(batch)
        if sum(one.samples for one in taken) >= ENOUGH:
            break
    if not taken:
        raise BadInputError("the calibration data has no batch")
    return taken


def described_in(run: Run) -> Path | None:
    """Where the model's tokenizer and image processor may lie."""
    path = Path(run.source.text).absolute()
    if path.is_dir():
        return path
    return path.parent if path.is_file() else None
