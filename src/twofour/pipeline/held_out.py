"""Held-out calibration samples: kept by pruning, so that both files can be compared on them."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from twofour.calibrate.onnx.pieces import BatchFile
from twofour.errors import BadInputError, BuildFailedError
from twofour.graph.files import Array
from twofour.graph.opened import OpenedModel
from twofour.inputs.fits import save_arrays, stored_arrays
from twofour.inputs.samples import Batch, cut_batches
from twofour.pipeline.folder import FINETUNED, SPARSE, STAGES, onnx_files, onnx_name
from twofour.pipeline.stages import Run
from twofour.sources.calibration.kinds import onnx_inputs

CALIBRATION = f"{STAGES}/calibration"
"""Folder of what calibration keeps until the weights are written."""
_HELD_OUT = "held-out.npz"
"""`<number of the batch>:<input>`."""
_KEPT = f"{STAGES}/{_HELD_OUT}"
_MOST_SAMPLES = 32
_MOST_BYTES = 1 << 28
"""In the outputs of one file; a language model's are 100 MB a sample."""
Outputs = dict[str, Array]


def write_held_out(
    model: OpenedModel, batches: Sequence[BatchFile], factors: Array, folder: Path
) -> None:
    """Write the first held-out samples, in batches that the model takes."""
    inputs = onnx_inputs(model.path, model.inputs)
    arrays: dict[str, Array] = {}
    for number, batch in enumerate(cut_batches(inputs, _picked(batches, factors), _MOST_SAMPLES)):
        arrays |= {f"{number}:{name}": array for name, array in batch.arrays.items()}
    if arrays:
        save_arrays(folder / _HELD_OUT, arrays)


def _picked(batches: Sequence[BatchFile], factors: Array) -> Iterator[Batch]:
    for batch in batches:
        own = factors[batch.first : batch.first + batch.samples]
        (rows,) = np.nonzero(own < 0)
        if rows.size:
            arrays = {
                name: array[rows] if array.shape[:1] == own.shape else array
                for name, array in stored_arrays(batch.path).items()
            }
            yield Batch(arrays=arrays, samples=len(rows))


def keep_held_out(run: Run) -> tuple[str, ...]:
    """Remove what calibration kept, but for the held-out samples; the name of their file."""
    written, kept = run.file(CALIBRATION) / _HELD_OUT, run.file(_KEPT)
    kept.unlink(missing_ok=True)
    if written.is_file():
        written.replace(kept)
    shutil.rmtree(run.file(CALIBRATION), ignore_errors=True)
    return (_KEPT,) if kept.is_file() else ()


def files_to_compare(run: Run) -> tuple[str, ...]:
    """The samples and the files that are run on them; () where nothing is held out.

    Training may have seen all calibration samples.
    """
    if not run.file(_KEPT).is_file() or run.model.weights(run) == (FINETUNED,):
        return ()
    files = [onnx_files(run.file(onnx_name(v))) for v in (run.options.dense_variant, SPARSE)]
    return (_KEPT, *files[0], *files[1])


def outputs_on_held_out(run: Run) -> tuple[Outputs, Outputs, int]:
    """Outputs of the dense and the sparse file on held-out samples, and how many these are.

    None of each where a file does not take them, as one whose sizes are fixed may not.
    """
    batches: dict[str, dict[str, Array]] = defaultdict(dict)
    for key, array in stored_arrays(run.file(_KEPT)).items():
        number, _, name = key.partition(":")
        batches[number][name] = array
    inputs = [*batches.values()]
    try:
        sparse = _outputs(run, onnx_name(SPARSE), inputs)  # its session is open already
        dense = _outputs(run, onnx_name(run.options.dense_variant), inputs[: len(sparse)])
    except (BuildFailedError, BadInputError) as error:
        run.progress.note(f"not measured on held-out calibration samples: {error.message}")
        return {}, {}, 0
    samples = sum(len(next(iter(batch.values()))) for batch in inputs[: len(sparse)])
    return _together(dense), _together(sparse), samples


def _outputs(run: Run, file: str, inputs: Iterable[Mapping[str, Array]]) -> list[Outputs]:
    session, found, size = run.sessions.open(run.file(file)), [], 0
    for batch in inputs:
        found.append(session.outputs(batch))
        size += sum(array.nbytes for array in found[-1].values())
        if size > _MOST_BYTES:
            break
    return found


def _together(batches: Sequence[Outputs]) -> Outputs:
    return {name: _joined([outputs[name] for outputs in batches]) for name in batches[0]}


def _joined(outputs: Sequence[Array]) -> Array:
    """One output of all batches as one array; where sizes differ, a row is filled with zeros."""
    rows = [np.atleast_1d(array) for array in outputs]
    if len({array.shape[1:] for array in rows}) == 1:
        return np.concatenate(rows)
    flat = [array.reshape(len(array), -1) for array in rows]
    width = max(array.shape[1] for array in flat)
    return np.concatenate([np.pad(a, ((0, 0), (0, width - a.shape[1]))) for a in flat])
