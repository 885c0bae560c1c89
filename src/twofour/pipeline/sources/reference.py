"""References to user code, `file.py:name` and `package.module:name`, read without running it."""

from __future__ import annotations

import importlib.machinery
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from twofour.errors import BadInputError
from twofour.pipeline.sources.imports import module_files, with_local_imports
from twofour.pipeline.sources.source import key_of
from twofour.store import sha256_file

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


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
    file = Path(target).expanduser().absolute()
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
        return with_local_imports((reference.file,), reference.folders)
    own = module_files(Path.cwd(), reference.target)
    last = reference.target.rpartition(".")[2]
    if any(last in (f.stem, f.parent.name) for f in own):
        return with_local_imports(own, reference.folders)
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
            raise missing_module(reference, name)
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


def missing_module(reference: CodeReference, name: str) -> BadInputError:
    """The error for a module that is neither installed nor in the current folder."""
    return BadInputError(
        f"there is no module {name!r} (of {reference.text}) in {Path.cwd()} or among the "
        "installed packages",
        hint="run the command from the folder that holds the package, or name a file.py:callable",
    )
