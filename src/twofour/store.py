"""Records to JSON and back, sha256, and writes that are whole or not there.

Source of the JSON mapping: pydantic's TypeAdapter over the dataclasses of records/.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from twofour.errors import BadInputError, naming, system_errors
from twofour.records.weights import SCHEMA_VERSION

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from twofour.records.options import RunOptions

T = TypeVar("T")
WRITTEN_AGAIN = "the command that wrote the file writes it again"
_CHUNK_BYTES = 1 << 20
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}
_NO_LINE_KEPT = re.compile(r',\n *"raw": null')
"""A field that is left out: of the hundreds of tactics of a layer, two have their line. A text in
JSON contains no line break, so this is always a field."""
_KEY = re.compile(r'"(\w+)": ')
_NOT_ASCII = re.compile(r"[^\n\x20-\x7e]")


def _adapter(kind: type[T]) -> TypeAdapter[T]:
    """The adapter of a record, made once: making it takes longer than writing most records."""
    from pydantic import TypeAdapter  # workers write no records

    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def to_json(record: object) -> str:
    """The record as indented JSON with a final newline; NaN and infinity become null.

    Characters that a terminal might obey are written as JSON escapes.
    """
    text = _adapter(type(record)).dump_json(record, indent=2).decode()
    if not text.replace("\n", "").isprintable():  # U+009B begins a command on some terminals
        text = _NOT_ASCII.sub(lambda c: c[0] if c[0].isprintable() else _escape(c), text)
    return _NO_LINE_KEPT.sub("", text) + "\n"


def json_in_ascii(text: str) -> str:
    """The JSON text for a stream that can only write ASCII."""
    return _NOT_ASCII.sub(_escape, text)


def _escape(character: re.Match[str]) -> str:
    return json.dumps(character[0])[1:-1]


def from_json(kind: type[T], text: str | bytes) -> T:
    """Parse JSON into a record.

    Raises BadInputError naming the first field that does not fit, and for a record of a version
    later than this one knows.
    """
    from pydantic import ValidationError

    try:
        record = _adapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the document"
        raise BadInputError(f"not a {kind.__name__}: {place}: {first['msg']}") from error
    version = getattr(record, "schema_version", SCHEMA_VERSION)
    if version > SCHEMA_VERSION:  # the same fields may mean other things there
        raise BadInputError(
            f"{kind.__name__} has version {version}, and this twofour reads versions up to "
            f"{SCHEMA_VERSION}",
            hint="a newer twofour wrote it: use that one",
        )
    return record


def checked(kind: type[T], value: object) -> T:
    """A record made in Python, each field checked and of the right type.

    Texts of enums and lists for tuples are converted. Raises BadInputError for another kind of
    object, and naming the first field that does not fit and what was found in it.
    """
    from pydantic import ValidationError

    if type(value) is not kind:
        raise BadInputError(
            f"expected {kind.__name__}, found {value!r:.200} of type {type(value).__name__}"
        )
    try:
        return _adapter(kind).validate_python(_plain(value))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in (kind.__name__, *first["loc"]))
        wrong = first["input"]
        raise BadInputError(
            f"{place}: {first['msg']}, found {wrong!r:.200} of type {type(wrong).__name__}"
        ) from error


def read_options(path: Path) -> RunOptions:
    """Options from a TOML file; raises BadInputError naming the file and the field."""
    from twofour.records.options import RunOptions

    try:
        toml = importlib.import_module("tomllib")
    except ModuleNotFoundError:  # Python 3.10
        toml = importlib.import_module("tomli")
    with system_errors(f"cannot read {path}"), naming(path):
        try:
            given = toml.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise BadInputError(f"not TOML: {error}") from error
        return from_json(RunOptions, json.dumps(given, default=str))


def write_options(path: Path, options: RunOptions) -> None:
    """Write the options as TOML, a line for each that is set, as `read_options` reads it."""
    write_text(path, "".join(_lines(json.loads(to_json(options)), "")))


def _lines(values: dict[str, Any], place: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{place}{name}.")
        elif value is not None and name.isidentifier():  # who said a glob has no name in TOML
            # [{"input": "x", "axis": 2}] is [{input = "x", axis = 2}]; all else is alike in both
            text = _KEY.sub(r"\1 = ", json.dumps(value, ensure_ascii=False))
            yield f"{place}{name} = {text}\n"


def _plain(value: object) -> object:
    """The value with records as dicts, which pydantic checks inside, and paths as texts."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def write_record(path: Path, record: object) -> None:
    """Write a record atomically; raises BadInputError where the file system refuses."""
    write_text(path, to_json(record))


def write_text(path: Path, text: str) -> None:
    """Write a text file (UTF-8) atomically; raises BadInputError like `atomic_file`."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def record_if_there(kind: type[T], path: Path) -> T | None:
    """The record of a file; None where there is no such file."""
    return read_record(kind, path) if path.is_file() else None


def read_record(kind: type[T], path: Path, hint: str = WRITTEN_AGAIN) -> T:
    """Read a record back; raises BadInputError when the file is missing or of another shape.

    The error has this hint if it has no better one.
    """
    try:
        with system_errors(f"cannot read {path}"), naming(path):
            return from_json(kind, path.read_bytes())
    except BadInputError as error:
        error.hint = error.hint or hint
        raise


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; on success it is renamed to `path`, else removed.

    Raises BadInputError for a full disk, a read-only folder and the like (OSError).
    """
    with writing(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            sync(temporary)
            temporary.chmod(0o666 & ~_umask())  # mkstemp's file is for its owner alone
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def link_or_copy(there: Path, here: Path) -> None:
    """Make `here` a link to `there`, or a copy where the file system has no links.

    Raises BadInputError where it refuses.
    """
    with writing(here):
        if here.exists() and here.samefile(there):
            return
        here.unlink(missing_ok=True)
        try:
            os.link(there, here)
        except OSError:  # another file system, or one without links
            shutil.copyfile(there, here)


def sha256_bytes(*parts: bytes) -> str:
    """sha256 over the parts, each preceded by its length, as hex."""
    digest = hashlib.sha256()
    for part in parts:
        # without the length ("ab", "c") and ("a", "bc") would be one
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def sha256_file(path: Path) -> str:
    """sha256 of a file's content, as hex; raises BadInputError when it cannot be read."""
    digest = hashlib.sha256()
    with system_errors(f"cannot read {path}"), path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def writing(path: Path) -> contextlib.AbstractContextManager[None]:
    """Raise BadInputError where the file system refuses a file, and nothing of it is left."""
    return system_errors(
        f"cannot write {path}",
        "free some space or choose another folder; nothing half-written was left",
    )


def sync(path: Path) -> None:
    """Wait until a file is on the disk, before it is renamed to what others look for."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@cache
def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
