"""Which engine a run gets: the one asked for, or for `auto` the best that really runs here."""

from __future__ import annotations

from collections.abc import Sequence

from twofour.engines.onnxruntime import OnnxRuntimeEngine
from twofour.engines.protocol import Engine
from twofour.engines.tensorrt.engine import TensorRtEngine
from twofour.errors import BadInputError, MissingToolError
from twofour.records import EngineName, EngineStatus

AUTO = "auto"


def known_engines() -> tuple[Engine, ...]:
    """Every engine, the preferred one first."""
    return TensorRtEngine(), OnnxRuntimeEngine()


def choose_engine(
    asked: str, engines: Sequence[Engine] | None = None
) -> tuple[Engine, EngineStatus, tuple[EngineStatus, ...]]:
    """The engine, its status, and the status of those that were preferred and cannot run here.

    `asked` is auto, tensorrt or onnxruntime. Raises BadInputError for another word and
    MissingToolError, with the reason and what to install, when no engine that was asked for runs.
    """
    names = [name.value for name in EngineName]
    if asked not in {AUTO, *names}:
        raise BadInputError(
            f"there is no engine {asked!r}", hint=f"choose one of {AUTO}, {', '.join(names)}"
        )
    not_used: list[EngineStatus] = []
    for engine in known_engines() if engines is None else engines:
        if asked in {AUTO, engine.name.value}:
            status = engine.status()
            if status.can_run:
                return engine, status, tuple(not_used)
            not_used.append(status)
    raise MissingToolError(
        "; ".join(f"{status.engine.value} cannot run here: {status.why_not}" for status in not_used)
        or f"no engine {asked!r} to try",
        hint=not_used[-1].hint if not_used else None,
    )


def all_statuses(engines: Sequence[Engine] | None = None) -> tuple[EngineStatus, ...]:
    """What `doctor` shows: each engine tried once."""
    return tuple(engine.status() for engine in (known_engines() if engines is None else engines))
