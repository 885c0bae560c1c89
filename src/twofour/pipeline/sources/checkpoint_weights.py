"""Weight files, tried before anything is built: whole, and safe to read."""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from twofour.errors import BadInputError

_CALLED = re.compile(r"(?:Unsupported global: )?GLOBAL (\S+)")


def check_weight_file(path: Path) -> None:
    """Read the header of a .safetensors file, or a .bin file without running anything in it.

    Raises BadInputError for a damaged file, and for a pickle that is more than tensors.
    """
    if path.suffix == ".safetensors":
        _check_safetensors(path)
    else:
        _check_pickle(path)


def _check_safetensors(path: Path) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise BadInputError(
            f"{path} is no whole .safetensors file: {error}", hint="copy or download it again"
        ) from error
    if not names:
        raise BadInputError(f"{path} holds no tensors")


def _check_pickle(path: Path) -> None:
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        called = _CALLED.search(str(error))
        if called is None:
            raise _damaged(path, error) from error
        raise BadInputError(
            f"{path} is a pickle that wants to call {called[1]}: reading it would run code that "
            "came with the file, so it is refused",
            hint="where you trust its author, load it yourself and save it again with "
            "model.save_pretrained(folder), which writes .safetensors",
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> BadInputError:
    first_line = str(error).strip().partition("\n")[0][:200]
    return BadInputError(
        f"{path} is no whole file of weights: {type(error).__name__}: {first_line}",
        hint="copy or download it again",
    )
