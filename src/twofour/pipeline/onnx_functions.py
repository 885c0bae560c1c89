"""Functions of an ONNX model taken apart before anything else is done with it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twofour.graph.inlined import inlined
from twofour.graph.opened import OpenedModel, open_onnx
from twofour.pruning.onnx_file import copy_onnx
from twofour.words import count


@contextmanager
def within_reach(
    opened: OpenedModel, folder: Path
) -> Iterator[tuple[OpenedModel, tuple[str, ...]]]:
    """The model with all weights that pruning can reach, and what is to be said of it.

    As it is, where no function holds a weight or is given one; else a copy in the folder, which
    goes with the context.
    """
    model = inlined(opened)
    if model is None:
        yield opened, ()
        return
    functions = count(len(opened.proto.functions), "function")
    note = f"{functions} of the model taken apart, as TensorRT does: there are weights in them"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        path = Path(own, opened.path.name)
        copy_onnx(opened, path, model)
        yield open_onnx(path), (note,)
