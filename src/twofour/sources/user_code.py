"""Code of the user: named and imported; and evaluations, `file.py:evaluate`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import math
import numbers
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from uuid import uuid4

import numpy as np

from twofour.errors import BadInputError
from twofour.export.model_code import described
from twofour.inputs.fits import Arrays
from twofour.records import frozen
from twofour.sources.source import key_of, path_of
from twofour.store import sha256_file
from twofour.words import count

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_NAMES_TORCH = re.compile(rb"^\s*(?:import|from) torch\b", re.MULTILINE)


class Held(str):
    """The name of a value in memory, where options name code or data."""

    value: object
    key: str
    """Every one is new: with --resume what depends on it is done again."""


def held(name: str, value: object) -> Held:
    """The name that holds this value."""
    named = Held(name)
    named.value = value
    named.key = uuid4().hex
    return named


@frozen
class CodeReference:
    """Where a name of the user's code is to be found."""

    text: str
    """What the user wrote."""
    target: str
    """The file as written, or the dotted module."""
    attribute: str
    file: Path | None
    """Absolute path for `file.py:name`; None for a module."""
    folders: tuple[Path, ...]
    """To be first on the import path: the file's own folder and the current one."""
    held: Held | None = None
    """The object itself, where it is in memory."""


def parse_reference(text: str) -> CodeReference:
    """Read `file.py:name` or `package.module:name`; raises BadInputError."""
    if isinstance(text, Held):
        return CodeReference(text=text, target="", attribute=text, file=None, folders=(), held=text)
    target, _, attribute = text.rpartition(":")
    is_file = target.endswith(".py")
    if not _DOTTED.fullmatch(attribute) or not (is_file or _DOTTED.fullmatch(target)):
        raise BadInputError(
            f"{text!r} names no callable", hint="write file.py:callable or package.module:callable"
        )
    folders: tuple[Path, ...] = (Path.cwd(),)
    file = None
    if is_file:
        file = path_of(target).absolute()
        if not file.is_file():
            raise BadInputError(
                f"{target} is not a file", hint="the part before the colon is a Python file"
            )
        folders = (file.parent, *folders)
    return CodeReference(text=text, target=target, attribute=attribute, file=file, folders=folders)


def code_key(reference: CodeReference) -> str:
    """sha256 over the name and the file that it is in, not what that imports or reads."""
    if reference.held is not None:
        return reference.held.key
    return key_of(reference.attribute, sha256_file(_code_file(reference)))


def _code_file(reference: CodeReference) -> Path:
    """The file of the reference; that of a module is found as an import finds it."""
    if reference.file is not None:
        return reference.file
    importlib.invalidate_caches()
    spec = None
    # packages that the module is in are imported; one that is not there leaves None
    with user_code(reference, "cannot be found:"), contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec(reference.target)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise BadInputError(
            f"there is no Python file of {reference.target!r} in {Path.cwd()} or among the "
            "installed packages",
            hint="run the command from the folder of the package, or name a file.py:callable",
        )
    return Path(spec.origin)


def import_attribute(reference: CodeReference) -> object:
    """What the reference names; a file is run anew on every call. Raises BadInputError."""
    if reference.held is not None:
        return reference.held.value
    with user_code(reference, "cannot be imported:"):
        if _NAMES_TORCH.search(_code_file(reference).read_bytes()):
            importlib.import_module("torch")  # now: what is seeded before a call must be there
        if reference.file is not None:
            module = _import_file(reference.file)
        else:
            module = importlib.import_module(reference.target)
    attribute: object = module
    for part in reference.attribute.split("."):
        if not hasattr(attribute, part):
            raise BadInputError(
                f"{reference.target} has no {reference.attribute!r}", hint=_names_in(module)
            )
        attribute = getattr(attribute, part)
    return attribute


def _names_in(module: ModuleType) -> str:
    own = []
    for name, value in vars(module).items():
        if getattr(value, "__module__", "") == module.__name__:
            own.append(name)
    return f"it has {', '.join(sorted(own)[:10])}" if own else "it defines no callable"


@contextlib.contextmanager
def user_code(reference: CodeReference, doing: str) -> Iterator[None]:
    """Run a block of user code, whose prints go to stderr.

    Whatever it raises, SystemExit too, becomes a BadInputError: "REFERENCE DOING error (line)".
    """
    failing = described(f"{reference.text} {doing}", folders=reference.folders)
    with _on_path(reference.folders), contextlib.redirect_stdout(sys.stderr), failing:
        yield


def call(
    reference: CodeReference, target: Callable[..., object], seed: int, *, hint: str
) -> object:
    """What the user's function returns, with all random numbers seeded; raises BadInputError."""
    _check_takes(target, f"{reference.text} needs arguments", hint)
    seed_everything(seed)
    with user_code(reference, "raised"):
        return target()


def _check_takes(
    function: Callable[..., object], otherwise: str, hint: str, *arguments: object
) -> None:
    with contextlib.suppress(ValueError):  # a builtin has no signature
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            raise BadInputError(f"{otherwise}: {error}", hint=hint) from error


def _import_file(file: Path) -> ModuleType:
    """Compile the source itself: a .pyc of the same second and size would pass for current."""
    loaded = sys.modules.get(file.stem)
    same = loaded is not None and getattr(loaded, "__file__", None) == str(file)
    free = loaded is None and file.stem not in sys.stdlib_module_names
    name = file.stem if same or free else f"user_{file.stem}"
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


@contextlib.contextmanager
def _on_path(folders: tuple[Path, ...]) -> Iterator[None]:
    """Put the folders first while user code is imported, then last: forward may still import."""
    names = [str(folder) for folder in folders]
    before = list(sys.path)
    sys.path[:] = [*names, *(entry for entry in before if entry not in names)]
    try:
        yield
    finally:
        sys.path[:] = [*before, *(entry for entry in sys.path if entry not in before)]


def seed_everything(seed: int) -> None:
    """Seed the random numbers of Python and numpy, and of torch where it is imported."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # user code draws from the global state
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


_METRIC_HINT = "write def evaluate(predict): ... that returns a number, or numbers by name"


Metric = Callable[[Callable[..., tuple[np.ndarray, ...]]], object]


def load_metric(text: str) -> Metric:
    """Import `file.py:evaluate` or `package.module:evaluate`; raises BadInputError."""
    function = import_attribute(parse_reference(text))
    if not callable(function):
        raise BadInputError(
            f"{text} is of type {type(function).__name__}, not a function", hint=_METRIC_HINT
        )
    _check_takes(function, f"{text} cannot be called with predict", _METRIC_HINT, None)
    return function


def run_metric(
    text: str, names: Sequence[str], outputs: Callable[[Arrays], Arrays], *, seed: int = 0
) -> dict[str, float]:
    """Figures by name for one variant; a lone number has the name of the function.

    The function is given `predict`: arrays in the order of the inputs' `names` -> the model's
    outputs in order. Random numbers are seeded, so that two variants see the same samples. Raises
    BadInputError for a metric that fails or returns anything else than finite numbers.
    """

    def predict(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        if len(arrays) != len(names):
            given = count(len(arrays), "array")
            raise BadInputError(
                f"{text}: predict was given {given}, the model takes {len(names)}",
                hint=f"call predict({', '.join(names)})",
            )
        return tuple(outputs(dict(zip(names, arrays, strict=True))).values())

    function = load_metric(text)
    reference = parse_reference(text)
    seed_everything(seed)
    with user_code(reference, "raised"):
        value = function(predict)
    if isinstance(value, Mapping) and value:
        return {str(name): _number(reference, str(name), figure) for name, figure in value.items()}
    name = reference.attribute.rpartition(".")[2]
    return {name: _number(reference, name, value)}


def _number(reference: CodeReference, name: str, value: object) -> float:
    item = getattr(value, "item", None)
    if callable(item):  # a numpy scalar, or a tensor of one element
        with user_code(reference, f"returned no single number for {name!r}:"):
            value = item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        what = f"of type {type(value).__name__}, not a number"
        raise BadInputError(f"{reference.text} returned {name} {what}", hint=_METRIC_HINT)
    if not math.isfinite(value):
        raise BadInputError(f"{reference.text} returned {name} = {value}", hint=_METRIC_HINT)
    return float(value)
