"""Writing an ONNX model with its external data: both files whole, or none."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir

from twofour.errors import BadInputError
from twofour.store import sync


def save(
    model: ir.Model, target: Path, on_invalid: Callable[[Path, str], None] | None = None
) -> None:
    """Write and check `<target name>.data` and `target`; the model appears last.

    `on_invalid` is given the target and what onnx.checker says of an invalid model, and raises;
    without it that is an error of torch's export. Raises BadInputError when the file system
    refuses.
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
            invalid = what_is_invalid(written)
            if invalid is not None:
                (on_invalid or _refuse_export)(target, invalid)
            for part in (data, written):
                sync(part)
                part.replace(target.parent / part.name)
    except OSError as error:
        raise BadInputError(
            f"cannot write {target}: {error.strerror or error}",
            hint="free some space or choose another folder with --out; "
            "nothing half-written was left",
        ) from error


def what_is_invalid(path: Path) -> str | None:
    """What onnx.checker finds wrong with a file, types of all tensors included, in one line."""
    try:
        onnx.checker.check_model(path, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return str(error).strip().splitlines()[0]
    return None


def _refuse_export(target: Path, invalid: str) -> None:
    raise BadInputError(
        f"{target.name}: torch exported an invalid ONNX model: {invalid}",
        hint="try another --opset; in half precision try --precision float32: the forward must "
        "not make float32 tensors of its own then",
    )
