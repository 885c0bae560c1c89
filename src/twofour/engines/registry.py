"""Which engine a run gets: the one asked for, or for `auto` the best that really runs here."""

from __future__ import annotations

from collections.abc import Callable

from twofour.engines.onnxruntime.engine import OnnxRuntimeEngine
from twofour.engines.protocol import Engine
from twofour.engines.tensorrt.engine import TensorRtEngine
from twofour.errors import BadInputError, MissingToolError
from twofour.records.build import EngineStatus
from twofour.records.options import EngineName

AUTO = "auto"
PREFERRED = (EngineName.TENSORRT, EngineName.ONNXRUNTIME)
"""Every engine, the preferred one first."""


def known_engines() -> dict[EngineName, Engine]:
    """Every engine by name."""
    return {engine.name: engine for engine in (TensorRtEngine(), OnnxRuntimeEngine())}


def choose_engine(
    asked: str, status_of: Callable[[EngineName], EngineStatus]
) -> tuple[EngineStatus, tuple[EngineStatus, ...]]:
    """The status of the engine to use, and of those that were preferred and cannot run here.

    `asked` is auto, tensorrt or onnxruntime; `status_of` tries one. Raises BadInputError for
    another word and MissingToolError, with the reason and what to install, when no engine that was
    asked for runs.
    """
    names = [name.value for name in EngineName]
    if asked not in {AUTO, *names}:
        raise BadInputError(
            f"there is no engine {asked!r}", hint=f"choose one of {AUTO}, {', '.join(names)}"
        )
    not_used: list[EngineStatus] = []
    for name in PREFERRED:
        if asked in {AUTO, name.value}:
            status = status_of(name)
            if status.can_run:
                return status, tuple(not_used)
            not_used.append(status)
    raise MissingToolError(
        "; ".join(f"{status.engine.value} cannot run here: {status.why_not}" for status in not_used)
        or f"no engine {asked!r} to try",
        hint=not_used[-1].hint if not_used else None,
    )
