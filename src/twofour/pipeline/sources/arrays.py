"""Example inputs as the user keeps them in files: arrays in .npz, sentences in .txt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import BadInputError

_BUILT_IN_SENTENCES = Path(__file__).with_name("sentences.txt")


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file by name, in the order of the file.

    Object arrays are refused: numpy reads them with pickle, which runs code. Raises BadInputError.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise BadInputError(f"{path} holds one array without a name", hint=_NPZ_HINT)
            arrays = {name: archive[name] for name in archive.files}
    except BadInputError:
        raise
    except Exception as error:  # zipfile, zlib and numpy each have their own for damage
        raise BadInputError(f"{path} is no readable .npz file: {error}", hint=_NPZ_HINT) from error
    if not arrays:
        raise BadInputError(f"{path} holds no array", hint=_NPZ_HINT)
    return arrays


def read_sentences(path: Path | None) -> tuple[str, ...]:
    """The lines of a text file that are not blank; for None the 20 sentences that come along.

    Raises BadInputError when the file cannot be read, is not UTF-8 or has no such line.
    """
    path = path or _BUILT_IN_SENTENCES
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read sentences from {path}: {error}") from error
    sentences = tuple(line.strip() for line in lines if line.strip())
    if not sentences:
        raise BadInputError(f"{path} holds no sentence", hint="write one sentence on each line")
    return sentences


_NPZ_HINT = "write it with numpy.savez('inputs.npz', input_ids=..., attention_mask=...)"
