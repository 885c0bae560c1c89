"""Folders in, nets out: names of folders, eligibility.json, and what build.json or a log add."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from engine_evidence_parts.records import LeftOut, Net
from twofour.errors import BadInputError
from twofour.logs.read import read_build_log
from twofour.records.eligibility import EligibilityReport
from twofour.records.options import ShapeProfile
from twofour.records.run import BuildResult
from twofour.store import read_record
from twofour.words import times

T = TypeVar("T")
REPORT, BUILD, LOG = "eligibility.json", "build.json", "sparse.log"
_NAME = re.compile(r"(?P<net>.+)-(?P<precision>[^-]+)-b(?P<batch>\d+)")
_VERSION = re.compile(r"tensorrt (\d[\w.]*)")
_NO_NAME = ("a GPU", "None")
"""What a report says in the place of a GPU's name."""
_GPU = re.compile(r" on (.+?)(?: \(compute capability [^)]*\))?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Which GPU and TensorRT built an engine."""

    gpu: str | None = None
    tensorrt: str | None = None


def read_nets(folder: Path) -> tuple[tuple[Net, ...], tuple[LeftOut, ...]]:
    """The nets in the sub-folders, by name, and the sub-folders that are none.

    Raises BadInputError for what is no folder, and one without any report in its sub-folders.
    """
    if not folder.is_dir():
        raise BadInputError(f"{folder} is no folder", hint="name the folder that holds the nets")
    nets: list[Net] = []
    left_out: list[LeftOut] = []
    for place in sorted(p for p in folder.iterdir() if p.is_dir() and p.name[0] != "."):
        try:
            nets.append(_read_net(place))
        except BadInputError as error:
            left_out.append(LeftOut(folder=place.name, why=error.message))
    if not nets:
        is_net = (folder / REPORT).is_file()
        hint = "name the folder above it" if is_net else f"each net's sub-folder needs {REPORT}"
        why = "".join(f"; {lost.folder}: {lost.why}" for lost in left_out[:1])
        raise BadInputError(f"{folder} has no sub-folder with a report{why}", hint=hint)
    return tuple(nets), tuple(left_out)


def named(folder: str) -> tuple[str, str | None, int | None]:
    """Net, precision and batch of a folder's name; any other name is that of a net."""
    match = _NAME.fullmatch(folder)
    if match is None:
        return folder, None, None
    return match["net"], match["precision"], int(match["batch"])


def builder_in_words(engine: str) -> Builder:
    """What a report says of its engine: "tensorrt 8.6.1 (trtexec) on NAME (compute ...)"."""
    version = _VERSION.match(engine)
    gpu = _GPU.search(engine) if engine.startswith("tensorrt") else None
    name = gpu[1] if gpu is not None and gpu[1] not in _NO_NAME else None
    return Builder(gpu=name, tensorrt=version and version[1])


def _read_net(place: Path) -> Net:
    path = place / REPORT
    if not path.is_file():
        raise BadInputError(f"no {REPORT}")
    report = read_record(EligibilityReport, path)
    net, precision, batch = named(place.name)
    built, notes = _build(place)
    builder = _builder(place, report, built)
    shapes = built.options.shapes if built is not None else ()
    return Net(
        folder=place.name,
        net=net,
        precision=precision,
        batch=batch,
        gpu=builder.gpu,
        tensorrt=builder.tensorrt,
        input_shapes=", ".join(f"{s.input}={times(s.opt)}" for s in shapes) or None,
        report=report,
        notes=(*notes, *_other_batch(place.name, batch, shapes)),
    )


def _build(place: Path) -> tuple[BuildResult | None, tuple[str, ...]]:
    path = place / BUILD
    if not path.is_file():
        return None, ()
    try:
        return read_record(BuildResult, path), ()
    except BadInputError as error:
        return None, (f"{place.name}: not read: {error.message}",)


def _builder(place: Path, report: EligibilityReport, built: BuildResult | None) -> Builder:
    """build.json before the report's words before the log; the log is read only if need be."""
    known = [*_of_build(built), _of_report(report)]
    if any(_first(getattr(b, key) for b in known) is None for key in ("gpu", "tensorrt")):
        known += _of_log(place / LOG)
    return Builder(gpu=_first(b.gpu for b in known), tensorrt=_first(b.tensorrt for b in known))


def _of_build(built: BuildResult | None) -> tuple[Builder, ...]:
    if built is None or built.engine.engine != "tensorrt":
        return ()
    gpu = built.gpu.name if built.gpu is not None else built.engine.device
    return (Builder(gpu=gpu, tensorrt=built.engine.version),)


def _of_report(report: EligibilityReport) -> Builder:
    said = builder_in_words(report.engine)
    return said if report.gpu is None else Builder(gpu=report.gpu.name, tensorrt=said.tensorrt)


def _of_log(path: Path) -> tuple[Builder, ...]:
    """What all builds of the log say alike."""
    builds = read_build_log(path).builds if path.is_file() else ()
    gpu = _only(b.gpu for b in builds)
    return (Builder(gpu=gpu, tensorrt=_only(b.tensorrt_version for b in builds)),)


def _other_batch(folder: str, batch: int | None, shapes: tuple[ShapeProfile, ...]) -> Iterator[str]:
    first = _only(s.opt[0] for s in shapes if s.opt)
    if batch is not None and first is not None and first != batch:
        yield f"{folder}: the name says b{batch}, the inputs were built for {first} first of all"


def _first(values: Iterable[T | None]) -> T | None:
    return next((v for v in values if v is not None), None)


def _only(values: Iterable[T | None]) -> T | None:
    """The one value that is there, however often; None where there is none or more than one."""
    found = {v for v in values if v is not None}
    return found.pop() if len(found) == 1 else None
