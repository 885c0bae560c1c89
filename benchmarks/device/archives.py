"""What is worth keeping of run folders, gzipped file by file, in archives of a bounded size.

The standard library alone: it works where nothing else does.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

KEPT = (
    *("run.json", "prune.json", "validate.json", "build.json", "eligibility.json"),
    *("latency.json", "report.md"),
    *(f"{v}.{s}" for v in ("dense", "sparse") for s in ("log", "layers.json", "profile.json")),
)
"""Records, logs and reports; no weights, no plans."""
_HEADERS_BYTES = 3 * tarfile.BLOCKSIZE
"""Of a member; a name above 100 characters takes three blocks."""
_END_BYTES = 2 * tarfile.RECORDSIZE
_GZIP_LEVEL = 6


def kept(engines: Path) -> Iterator[tuple[str, Path]]:
    """Names and files of the run folders, the newest folder first."""
    outcomes = engines / "outcomes.jsonl"
    if outcomes.is_file():
        yield outcomes.name, outcomes
    folders = [path for path in sorted(engines.glob("*")) if path.is_dir()]
    for folder in sorted(folders, key=lambda path: -path.stat().st_mtime):
        for name in KEPT:
            if (folder / name).is_file():
                yield f"{folder.name}/{name}", folder / name


def archive(files: Iterable[tuple[str, Path]], target: Path, limit_bytes: int) -> list[Path]:
    """Write `target`-0.tar and so on, none larger than the limit.

    A file that is too large for one archive is cut: `cat x.log.gz.*` joins its pieces.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    room_bytes = limit_bytes - _END_BYTES
    archives: list[Path] = []
    members: list[tuple[str, bytes]] = []
    used_bytes = 0
    for name, content in _pieces(files, room_bytes - _HEADERS_BYTES - tarfile.BLOCKSIZE):
        size_bytes = _HEADERS_BYTES + -(-len(content) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        if members and used_bytes + size_bytes > room_bytes:
            archives.append(_write(target, len(archives), members))
            members = []
            used_bytes = 0
        members.append((name, content))
        used_bytes += size_bytes
    if members:
        archives.append(_write(target, len(archives), members))
    assert all(path.stat().st_size <= limit_bytes for path in archives)
    return archives


def _pieces(files: Iterable[tuple[str, Path]], most_bytes: int) -> Iterator[tuple[str, bytes]]:
    for name, path in files:
        content = gzip.compress(path.read_bytes(), _GZIP_LEVEL, mtime=0)
        if len(content) <= most_bytes:
            yield f"{name}.gz", content
            continue
        for number, start in enumerate(range(0, len(content), most_bytes)):
            yield f"{name}.gz.{number:02}", content[start : start + most_bytes]


def _write(target: Path, number: int, members: Iterable[tuple[str, bytes]]) -> Path:
    path = target.with_name(f"{target.name}-{number}.tar")
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path
