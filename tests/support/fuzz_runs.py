"""Many changed inputs, one after the other: what is answered badly is told of and kept.

Answered well is what ends in a record, or in an error of ours that names the file, in time and
within memory.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from support import fuzzing
from twofour.errors import BadInputError, TwofourError

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
"""How long `make fuzz` goes on with every kind; 0: a bounded sample, the same each time."""
SAMPLE = 40
_LONGEST_S = 10.0
"""Of this process's own time: other programs may be at work."""
_MOST_BYTES = 512 << 20
_ADDRESSES = 6 << 30
"""More than this process has already may not be asked for: a bomb ends in a MemoryError."""
_KEPT = Path("build/fuzz")


@dataclass(frozen=True)
class Kind:
    """One kind of file: valid examples, how to change them, and everything that reads them."""

    suffix: str
    seeds: tuple[bytes, ...]
    mutate: fuzzing.Mutate
    read: Callable[[Path], object]
    sample: int = SAMPLE


def read_all(readers: Sequence[Callable[[], object]], path: Path) -> None:
    """Each may refuse, and must name the file then."""
    for read in readers:
        try:
            read()
        except TwofourError as error:
            if isinstance(error, BadInputError) and path.name not in str(error):
                raise AssertionError(f"the file is not named: {error}") from error


def try_kind(name: str, kind: Kind, folder: Path) -> None:
    """A sample of one kind of file, or as many as the time allows."""

    def once(rng: random.Random) -> Path:
        path = folder / f"m{kind.suffix}"
        path.write_bytes(kind.mutate(rng, rng.choice(kind.seeds)))
        return path

    try_many(name, once, kind.read, sample=kind.sample)


def try_many(
    name: str,
    once: Callable[[random.Random], Path],
    read: Callable[[Path], object],
    sample: int = SAMPLE,
) -> None:
    """A sample, or as many as the time allows; what fails is kept and told of at the end."""
    first = time.time_ns() if SECONDS else 0
    ends = time.monotonic() + SECONDS
    failures: dict[str, str] = {}
    number = 0
    while time.monotonic() < ends if SECONDS else number < sample:
        path = once(random.Random(first + number))
        number += 1
        problem = _problem(read, path)
        if problem is not None and problem not in failures:
            failures[problem] = _keep(path, f"{name}-{first + number}")
    told = "\n".join(f"{problem}: {kept}" for problem, kept in failures.items())
    assert not failures, f"{len(failures)} kinds of failure in {number} {name} files:\n{told}"


def _problem(read: Callable[[Path], object], path: Path) -> str | None:
    """What is wrong with how the file was read: where in our code, for telling kinds apart."""
    started, before = time.process_time(), _peak_bytes()
    try:
        with _bounded_memory():
            read(path)
    except TwofourError as error:
        if path.name not in str(error):
            return f"the file is not named: {str(error)[:80]}"
    except Exception as error:  # noqa: BLE001  # the point of this test
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "twofour" in f.filename] or frames
        return f"{type(error).__name__} in {ours[-1].filename}:{ours[-1].lineno} {str(error)[:80]}"
    took, grown = time.process_time() - started, _peak_bytes() - before
    if took > _LONGEST_S:
        return f"over {_LONGEST_S} s"
    return f"over {_MOST_BYTES} bytes" if grown > _MOST_BYTES else None


def _keep(path: Path, name: str) -> str:
    _KEPT.mkdir(parents=True, exist_ok=True)
    target = _KEPT / f"{name}{path.suffix}"
    if path.is_dir():
        shutil.copytree(path, target, dirs_exist_ok=True)
    else:
        shutil.copyfile(path, target)
    return str(target)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ADDRESSES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
