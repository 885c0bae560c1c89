"""What is worth keeping of the run folders, gzipped file by file, in archives of a bounded size."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

KEPT = (
    *("run.json", "prune.json", "validate.json", "build.json", "eligibility.json"),
    *("latency.json", "report.md"),
    *(f"{v}.{s}" for v in ("dense", "sparse") for s in ("log", "layers.json", "profile.json")),
)
"""Records, logs and reports; no weights, no plans."""


def pack(engines: Path, target: Path, limit_bytes: int) -> list[Path]:
    """Write `target`-0.tar and so on, each closed once it has reached the limit."""
    archives: list[Path] = []
    files = list(_kept(engines))
    target.parent.mkdir(parents=True, exist_ok=True)
    while files:
        archives.append(target.with_name(f"{target.name}-{len(archives)}.tar"))
        size_bytes = 0
        with tarfile.open(archives[-1], "w") as archive:
            while files and size_bytes < limit_bytes:
                path = files.pop(0)
                content = gzip.compress(path.read_bytes(), mtime=0)
                member = tarfile.TarInfo(f"{path.relative_to(engines)}.gz")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
                size_bytes += member.size
    return archives


def _kept(engines: Path) -> Iterator[Path]:
    yield from sorted(engines.glob("outcomes.jsonl"))
    for folder in sorted(path for path in engines.glob("*") if path.is_dir()):
        yield from (folder / name for name in KEPT if (folder / name).is_file())
