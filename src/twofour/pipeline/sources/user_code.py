"""Import and run user code: its folders on the path, its prints on stderr, its errors as ours."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from twofour.errors import BadInputError, TwofourError
from twofour.pipeline.sources.blame import describe
from twofour.pipeline.sources.reference import CodeReference, missing_module


def import_attribute(reference: CodeReference) -> object:
    """Import the user's module and give what the reference names in it.

    A file is run anew on every call, so an edited one is never stale. Raises BadInputError.
    """
    with user_code(reference, "cannot be imported:"):
        module = _import(reference)
    found: object = module
    for part in reference.attribute.split("."):
        if not hasattr(found, part):
            raise _missing_attribute(reference, module)
        found = getattr(found, part)
    return found


@contextlib.contextmanager
def user_code(reference: CodeReference, doing: str) -> Iterator[None]:
    """Run a block of user code.

    What it prints goes to stderr, for stdout may carry our JSON. Whatever it raises, SystemExit
    included and KeyboardInterrupt not, becomes a BadInputError: "REFERENCE DOING error (line)".
    """
    with _on_path(reference.folders), contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except TwofourError:
            raise
        except (Exception, SystemExit) as error:
            raise BadInputError(
                f"{reference.text} {doing} {describe(error, reference.folders)}"
            ) from error


def seed_everything(seed: int) -> None:
    """Seed the random numbers of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # user code draws from the global state
    torch.manual_seed(seed)


def required_arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """Parameters without a default; () for a builtin that does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(p.name for p in parameters if p.default is p.empty and p.kind not in variadic)


def _import(reference: CodeReference) -> ModuleType:
    if reference.file is not None:
        return _import_file(reference.file)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(reference.target)
    except ModuleNotFoundError as error:
        if error.name and f"{reference.target}.".startswith(f"{error.name}."):
            raise missing_module(reference, error.name) from error
        raise


def _import_file(file: Path) -> ModuleType:
    """Compile the source itself: a .pyc of the same second and size would pass for current."""
    name = _module_name(file)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    code = compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    try:
        exec(code, module.__dict__)  # noqa: S102  # the user asked for this file to be run
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module_name(file: Path) -> str:
    """The file's stem, unless another module is or may be known by that name."""
    loaded = sys.modules.get(file.stem)
    same = loaded is not None and getattr(loaded, "__file__", None) == str(file)
    if same or (loaded is None and file.stem not in sys.stdlib_module_names):
        return file.stem
    return f"user_{file.stem}"


@contextlib.contextmanager
def _on_path(folders: tuple[Path, ...]) -> Iterator[None]:
    """Put the folders first while user code is imported, and last afterwards.

    Last, not gone: forward may still import something. Not first: a folder of the user's that is
    called like one of our packages must not be what we import next.
    """
    names = [str(folder) for folder in folders]
    before = list(sys.path)
    sys.path[:] = [*names, *(entry for entry in before if entry not in names)]
    try:
        yield
    finally:
        sys.path[:] = [*before, *(entry for entry in sys.path if entry not in before)]


def _missing_attribute(reference: CodeReference, module: ModuleType) -> BadInputError:
    names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
    own = [n for n in names if getattr(vars(module)[n], "__module__", None) == module.__name__]
    close = difflib.get_close_matches(reference.attribute, names, n=3) or sorted(own)[:10]
    return BadInputError(
        f"{reference.target} has no {reference.attribute!r}",
        hint=f"it has {', '.join(close)}" if close else "it defines no callable at all",
    )
