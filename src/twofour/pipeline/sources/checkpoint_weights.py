"""Weight files, tried before anything is built: whole, and safe to read."""

from __future__ import annotations

import pickle
import pickletools
import re
import warnings
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from twofour.errors import BadInputError

_REFUSED = re.compile(r"GLOBAL (\S+)")
"""In torch's message: the name its restricted unpickler did not allow."""
_TENSOR_MODULES = ("torch.", "collections.")


def check_weight_file(path: Path) -> None:
    """Read the header of a .safetensors file, or a .bin file without running anything in it.

    Raises BadInputError for a damaged file, and for a pickle that is more than tensors.
    """
    if path.suffix == ".safetensors":
        _check_safetensors(path)
    else:
        _check_pickle(path)


def load_pickle(path: Path) -> object:
    """What a .bin or .pt file holds, read as `check_weight_file` does and into memory.

    Raises BadInputError: the check maps the file, which does not show every damage.
    """
    _check_pickle(path)
    try:
        content: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # as above
        raise _damaged(path, error) from error
    return content


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
        zipped = zipfile.is_zipfile(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols
            torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        refused = _REFUSED.search(str(error))
        called = refused[1] if refused else _foreign_global(path)
        if called is None:
            raise _damaged(path, error) from error
        raise BadInputError(
            f"{path} is a pickle that wants to call {called}: reading it would run code that "
            "came with the file, so it is refused",
            hint="where you trust its author, load it yourself and save it again with "
            "model.save_pretrained(folder), which writes .safetensors",
        ) from error
    except Exception as error:  # a damaged pickle ends in whatever its next opcode meets
        raise _damaged(path, error) from error


def _foreign_global(path: Path) -> str | None:
    """First function or class outside torch that a bare pickle names; nothing is run.

    torch stops at opcodes of newer pickle protocols before it comes to the name.
    """
    strings: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(path.read_bytes()):
            if opcode.name == "GLOBAL":
                strings.extend(str(argument).split(" ", 1))
            elif isinstance(argument, str):
                strings.append(argument)
            if opcode.name in ("GLOBAL", "STACK_GLOBAL") and len(strings) >= 2:
                name = ".".join(strings[-2:])
                if not name.startswith(_TENSOR_MODULES):
                    return name
    except (ValueError, OSError, RecursionError):
        return None
    return None


def _damaged(path: Path, error: Exception) -> BadInputError:
    first_line = str(error).strip().partition("\n")[0][:200]
    return BadInputError(
        f"{path} is no whole file of weights: {type(error).__name__}: {first_line}",
        hint="copy or download it again",
    )
