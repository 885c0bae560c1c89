"""The engines there are, a row each, and which of them a run gets.

A row is what has to be known of an engine before it is loaded, in this process or another.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from twofour.errors import BadInputError, MissingToolError
from twofour.packages import with_parts

if TYPE_CHECKING:
    from twofour.engines.protocol import Engine
    from twofour.records.export import EngineStatus

AUTO = "auto"


class Takes(str, Enum):
    """What an engine opens in a comparison."""

    ONNX = "an ONNX file"
    PLAN = "a plan"
    """Built from an ONNX file where there is none."""
    MODULE = "a torch module"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One engine."""

    name: str
    """As --engine and --engines take it, and records keep it."""
    title: str
    code: str
    """`package.module:Class` of what meets the Engine Protocol, imported when it is used."""
    takes: Takes
    is_tensorrt: bool = False
    """Its builder is TensorRT: both variants are built from the sparse file and differ in the
    sparsity flag alone, and opsets, types and rules are those of its version."""
    is_reference: bool = False
    """Its sessions check the files of a run: the one that is open is timed, not a second one."""
    packages: tuple[str, ...] = ()
    """What its times and results depend on: names of `twofour.packages`."""
    leaves: tuple[str, ...] = ()
    """Suffixes of the files of a build, after the name of the variant."""

    @property
    def builds(self) -> bool:
        """Whether it can be the engine of a run, whose models are ONNX files."""
        return self.takes is not Takes.MODULE

    def engine(self) -> Engine:
        """The engine itself, one in a process."""
        return _engine(self.code)


@functools.cache
def _engine(code: str) -> Engine:
    module, _, name = code.partition(":")
    made: Engine = getattr(importlib.import_module(module), name)()
    return made


ENGINES: dict[str, EngineRow] = {
    row.name: row
    for row in (
        EngineRow(
            name="tensorrt",
            title="TensorRT",
            code="twofour.engines.tensorrt.engine:TensorRtEngine",
            takes=Takes.PLAN,
            is_tensorrt=True,
            packages=with_parts("tensorrt", "polygraphy"),
            leaves=(".plan", ".log", ".layers.json", ".profile.json"),
        ),
        EngineRow(
            name="onnxruntime",
            title="ONNX Runtime",
            code="twofour.engines.onnxruntime.engine:OnnxRuntimeEngine",
            takes=Takes.ONNX,
            is_reference=True,
            packages=with_parts("onnxruntime", "onnxruntime-gpu"),
        ),
        EngineRow(
            name="torch",
            title="torch",
            code="twofour.engines.torch.engine:TorchEngine",
            takes=Takes.MODULE,
            packages=with_parts("torch"),
        ),
        EngineRow(
            name="torch-tensorrt",
            title="torch-tensorrt",
            code="twofour.engines.torch.engine:TorchTensorRtEngine",
            takes=Takes.MODULE,
            packages=with_parts("torch-tensorrt"),
        ),
    )
}
"""By name, in the order of preference: `auto` takes the first that runs, and a comparison its
baseline from it."""


def builders() -> tuple[EngineRow, ...]:
    """The engines that a run can have, the preferred one first."""
    return tuple(row for row in ENGINES.values() if row.builds)


def choose_engine(
    asked: str, status_of: Callable[[EngineRow], EngineStatus]
) -> tuple[EngineStatus, tuple[EngineStatus, ...]]:
    """The status of the engine to use, and of those that were preferred and cannot run here.

    `asked` is auto or the name of a builder; `status_of` tries one. Raises BadInputError for
    another word and MissingToolError, with the reason and what to install, when no engine that was
    asked for runs.
    """
    names = [row.name for row in builders()]
    if asked not in {AUTO, *names}:
        raise BadInputError(
            f"there is no engine {asked!r}", hint=f"choose one of {AUTO}, {', '.join(names)}"
        )
    not_used: list[EngineStatus] = []
    for row in builders():
        if asked in {AUTO, row.name}:
            status = status_of(row)
            if status.can_run:
                return status, tuple(not_used)
            not_used.append(status)
    raise MissingToolError(
        "; ".join(f"{status.engine} cannot run here: {status.why_not}" for status in not_used),
        hint=not_used[-1].hint,
    )
