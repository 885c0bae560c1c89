"""Writing an ONNX model with its external data: both files whole, or none."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import onnx
import onnx_ir as ir

from twofour.errors import BadInputError


def save(model: ir.Model, target: Path) -> None:
    """Write and check `<target name>.data` and `target`; the model appears last.

    Raises BadInputError when the file system refuses, or onnx.checker finds the model invalid.
    """
    data_name = f"{target.name}.data"
    try:
        with tempfile.TemporaryDirectory(
            dir=target.parent, prefix=f".{target.name}.", suffix=".part"
        ) as folder:
            written = Path(folder, target.name)
            ir.save(model, written, external_data=data_name)
            data = Path(folder, data_name)
            data.touch()  # tensors of a few bytes stay in the model; the pair is there all the same
            _check(written, target)
            for part in (data, written):
                _sync(part)
                part.replace(target.parent / part.name)
    except OSError as error:
        raise BadInputError(
            f"cannot write {target}: {error.strerror or error}",
            hint="free some space or choose another folder with --out; "
            "nothing half-written was left",
        ) from error


def _check(written: Path, target: Path) -> None:
    try:
        onnx.checker.check_model(written, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        first = str(error).strip().splitlines()[0]
        raise BadInputError(
            f"{target.name}: torch exported an invalid ONNX model: {first}",
            hint="try another --opset; in half precision try --precision float32: the forward must "
            "not make float32 tensors of its own then",
        ) from error


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
