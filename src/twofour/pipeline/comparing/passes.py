"""Times that came back in an emitted folder: of rounds, or of one run for each engine."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twofour.engines.trtexec_times import read_times
from twofour.errors import BadInputError
from twofour.pipeline.emitting import failed_variants
from twofour.records.build import TrtexecFolder, TrtexecRounds, TrtexecVariant

Passes = Mapping[int, tuple[float, ...]]
"""Round -> milliseconds of the single runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """What there is of one engine."""

    engine: str
    """Name of a variant, with "-again" behind it where its plan was timed a second time."""
    samples_ms: tuple[float, ...]
    """In rounds the median of each; else every run."""
    runs_ms: tuple[float, ...]
    """Every run."""
    error: str | None = None
    """Why there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmittedTimes:
    """All times of a folder."""

    engines: tuple[EngineTimes, ...]
    rounds: int | None
    """In which every engine was timed; None: one run for each engine, one after the other."""
    notes: tuple[str, ...] = ()


def read_emitted_times(folder: Path, emitted: TrtexecFolder) -> EmittedTimes:
    """Of the rounds where both variants were timed in one; else of the runs behind the builds.

    Raises BadInputError where there are no times at all.
    """
    notes: tuple[str, ...] = ()
    if emitted.rounds is not None:
        found = _read_rounds(folder, emitted.rounds)
        needed = {variant.variant for variant in emitted.variants}
        if found.rounds and needed <= {e.engine for e in found.engines if e.samples_ms}:
            return found
        notes = found.notes
    dense_first = sorted(emitted.variants, key=lambda variant: variant.sparse_weights)
    engines = tuple(_read_single(folder, variant) for variant in dense_first)
    if not any(engine.samples_ms for engine in engines):
        raise BadInputError(
            f"{folder} holds no times: " + "; ".join(str(e.error) for e in engines),
            hint=f"run {emitted.script} in it on a machine with TensorRT {emitted.tensorrt}, and "
            "copy the whole folder back (only the .plan files may stay)",
        )
    return EmittedTimes(engines=engines, rounds=None, notes=(*notes, _unpaired(emitted)))


def _unpaired(emitted: TrtexecFolder) -> str:
    remedy = (
        "make the folder again with this twofour to time in rounds"
        if emitted.rounds is None
        else f"{emitted.script} times in rounds unless ROUNDS is 0"
    )
    return (
        "each engine was timed in one run, right behind its build: what changed between the two "
        "runs (clocks, heat, other work) is in the ratio and not in its interval, and no noise is "
        f"known; {remedy}"
    )


def _read_rounds(folder: Path, rounds: TrtexecRounds) -> EmittedTimes:
    """The rounds in which every engine was timed that was timed at all."""
    place = folder / rounds.folder
    numbers = _round_numbers(place, rounds.engines)
    passes = {engine: _read_passes(place, engine, numbers, rounds) for engine in rounds.engines}
    timed = [engine for engine in rounds.engines if passes[engine]]
    whole = [n for n in numbers if timed and all(n in passes[engine] for engine in timed)]
    return EmittedTimes(
        engines=tuple(_engine_times(name, passes[name], whole) for name in rounds.engines),
        rounds=len(whole),
        notes=tuple(
            _missing(rounds.folder, engine, missing)
            for engine in rounds.engines
            if (missing := [n for n in numbers if n not in passes[engine]])
        ),
    )


def _round_numbers(place: Path, engines: Sequence[str]) -> list[int]:
    """Rounds that were begun: a pass that failed has left its log."""
    names = re.compile(f"(?:{'|'.join(map(re.escape, engines))})\\.([0-9]{{1,3}})\\.(?:json|log)")
    entries = place.iterdir() if place.is_dir() else ()
    found = (names.fullmatch(entry.name) for entry in entries)
    return sorted({int(match[1]) for match in found if match is not None})


def _read_passes(
    place: Path, engine: str, numbers: Sequence[int], rounds: TrtexecRounds
) -> dict[int, tuple[float, ...]]:
    passes: dict[int, tuple[float, ...]] = {}
    for number in numbers:
        try:
            file = place / f"{engine}.{number}.json"
            passes[number] = read_times(file, warmup_ms=rounds.warmup_ms)
        except BadInputError:
            continue
    return passes


def _engine_times(engine: str, passes: Passes, whole: Sequence[int]) -> EngineTimes:
    if not passes:
        return EngineTimes(
            engine=engine, samples_ms=(), runs_ms=(), error="no timing pass of it left its times"
        )
    return EngineTimes(
        engine=engine,
        samples_ms=tuple(statistics.median(passes[number]) for number in whole),
        runs_ms=tuple(ms for number in whole for ms in passes[number]),
    )


def _missing(folder: str, engine: str, numbers: Sequence[int]) -> str:
    which = ("round " if len(numbers) == 1 else "rounds ") + ", ".join(map(str, numbers))
    return (
        f"{engine} has no times of {which}, left out for all engines: "
        f"see {folder}/{engine}.{numbers[0]}.log"
    )


def _read_single(folder: Path, variant: TrtexecVariant) -> EngineTimes:
    try:
        times = read_times(folder / variant.times)
    except BadInputError as error:
        failed = variant.variant in failed_variants(folder)
        why = f"trtexec failed: {variant.log} says why" if failed else error.message
        return EngineTimes(engine=variant.variant, samples_ms=(), runs_ms=(), error=why)
    return EngineTimes(engine=variant.variant, samples_ms=times, runs_ms=times)
