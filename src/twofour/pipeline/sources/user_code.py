"""Code of the user: named, imported, watched for changes, and told apart from ours."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from twofour.errors import BadInputError, TwofourError
from twofour.export.model_code import described
from twofour.pipeline.sources.seeding import seed_everything
from twofour.pipeline.sources.source import key_of, path_of
from twofour.store import sha256_file

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_MOST_FILES = 10_000
"""Files that are kept: a training set of single files is watched by its first ones."""
_CODE = (".py", ".pyc", ".pyi", ".so", ".pth")
_opened: dict[str, None] | None = None


def _with_local_imports(starts: Sequence[Path], folders: Sequence[Path]) -> tuple[Path, ...]:
    """The files and all they import, directly or not, from the folders; sorted.

    A file that cannot be parsed is in the answer and leads no further.
    """
    found: set[Path] = set()
    waiting = list(starts)
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting.extend(_imported(file, folders))
    return tuple(sorted(found))


def _imported(file: Path, folders: Sequence[Path]) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            roots = folders
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
            roots = (file.parents[node.level - 1],) if _is_relative(file, node) else folders
        else:
            continue
        for root in roots:
            for parts in names:
                yield from _files(root, parts)


def _is_relative(file: Path, node: ast.ImportFrom) -> bool:
    return 0 < node.level <= len(file.parents)


def _files(root: Path, parts: Sequence[str]) -> Iterator[Path]:
    place = root
    for part in parts:
        for candidate in (place / f"{part}.py", place / part / "__init__.py"):
            if candidate.is_file():
                yield candidate
        place = place / part


@dataclass(frozen=True, slots=True, kw_only=True)
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


def parse_reference(text: str) -> CodeReference:
    """Read `file.py:name` or `package.module:name`.

    Raises BadInputError when it has neither form, or the file does not exist.
    """
    target, _, attribute = text.rpartition(":")
    is_file = target.endswith(".py")
    if not _DOTTED.fullmatch(attribute) or not (is_file or _DOTTED.fullmatch(target)):
        raise BadInputError(
            f"{text!r} names no callable", hint="write file.py:callable or package.module:callable"
        )
    if not is_file:
        return CodeReference(
            text=text, target=target, attribute=attribute, file=None, folders=(Path.cwd(),)
        )
    file = path_of(target).absolute()
    if not file.is_file():
        raise BadInputError(
            f"{target} is no file", hint="the part before the colon is a Python file"
        )
    folders = tuple(dict.fromkeys((file.parent, Path.cwd())))
    return CodeReference(text=text, target=target, attribute=attribute, file=file, folders=folders)


def reference_key(reference: CodeReference) -> str:
    """sha256 over the code: the file, and what it imports from its own and the current folder.

    Installed packages and files read at run time are not in it. Raises BadInputError when the
    module is nowhere on the path.
    """
    files = code_files(reference)
    return key_of(
        reference.attribute, *(part for file in files for part in (file.name, sha256_file(file)))
    )


def code_files(reference: CodeReference) -> tuple[Path, ...]:
    """The Python files of the user that the reference leads to, sorted; none of them is run.

    Raises BadInputError when the module is nowhere on the path.
    """
    if reference.file is not None:
        return _with_local_imports((reference.file,), reference.folders)
    own = tuple(_files(Path.cwd(), reference.target.split(".")))
    last = reference.target.rpartition(".")[2]
    if any(last in (f.stem, f.parent.name) for f in own):
        return _with_local_imports(own, reference.folders)
    return (_installed_file(reference),)


def _installed_file(reference: CodeReference) -> Path:
    """File of an installed module, found as an import would, but without running its parents."""
    importlib.invalidate_caches()
    search: list[str] | None = None
    name, spec = "", None
    for part in reference.target.split("."):
        name = f"{name}.{part}" if name else part
        spec = _spec(name, search)
        if spec is None:
            raise _missing_module(reference, name)
        search = list(spec.submodule_search_locations or ())
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise BadInputError(f"{reference.target} has no Python file that could be read")
    return Path(spec.origin)


def _spec(name: str, search: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, search)
        if spec is not None:
            return spec
    return None


def _missing_module(reference: CodeReference, name: str) -> BadInputError:
    """The error for a module that is neither installed nor in the current folder."""
    return BadInputError(
        f"there is no module {name!r} (of {reference.text}) in {Path.cwd()} or among the "
        "installed packages",
        hint="run the command from the folder that holds the package, or name a file.py:callable",
    )


@contextlib.contextmanager
def files_read() -> Iterator[list[Path]]:
    """A list that holds, once the block has ended, the data files that were read inside."""
    global _opened  # an audit hook belongs to the process and cannot be removed
    _install_hook()
    found: list[Path] = []
    outer, _opened = _opened, {}
    try:
        yield found
    finally:
        inner, _opened = _opened, outer
        found.extend(path for name in inner if _is_data(path := Path(name)))


def state_of(path: Path) -> str:
    """Size and time of change: cheap, and wrong only for who restores both."""
    try:
        status = path.stat()
    except OSError:
        return "missing"
    return f"{status.st_size} bytes, {status.st_mtime_ns}"


@cache
def _install_hook() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open" or _opened is None or len(_opened) >= _MOST_FILES:
        return
    name, mode, flags = arguments
    writes = isinstance(mode, str) and mode[:1] in "wax"
    writes |= mode is None and isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))
    if not writes and isinstance(name, str):
        _opened[os.path.abspath(name)] = None  # noqa: PTH100  # resolve would follow links


def _is_data(path: Path) -> bool:
    if path.suffix in _CODE or not path.is_file():
        return False
    return not any(path.is_relative_to(folder) for folder in _not_data())


@cache
def _not_data() -> tuple[Path, ...]:
    """The interpreter, installed packages and the system's own folders."""
    names = [sys.prefix, sys.base_prefix, *site.getsitepackages(), *sysconfig.get_paths().values()]
    return tuple(Path(name) for name in (*names, "/proc", "/sys", "/dev", "/etc", "/usr"))


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
                f"{reference.text} {doing} {described(error, reference.folders)}"
            ) from error


def names_code(text: str, path: Path) -> bool:
    """Whether a text that names no file or folder has the colon of a callable."""
    return ":" in text and not path.exists()


def call(
    reference: CodeReference, target: Callable[..., object], seed: int, *, hint: str
) -> object:
    """What the user's function gives, with all random numbers seeded.

    Raises BadInputError for one that fails, or, with the `hint`, needs arguments.
    """
    needed = required_arguments(target)
    if needed:
        raise BadInputError(f"{reference.text} needs arguments: {', '.join(needed)}", hint=hint)
    seed_everything(seed)
    with user_code(reference, "raised"):
        return target()


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
            raise _missing_module(reference, error.name) from error
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
