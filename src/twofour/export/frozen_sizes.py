"""Why torch.export made a size constant: the condition, and the line of the model that asks it."""

from __future__ import annotations

import linecache
import logging
import re
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from twofour.errors import BadInputError
from twofour.export.dynamic_axes import dynamic_shapes, in_words, tensor_names
from twofour.export.example_inputs import Call
from twofour.export.quiet import quiet
from twofour.records.options import DynamicAxis

_LOGGER = "torch.fx.experimental.symbolic_shapes"
_SYMBOL = re.compile(r"create_symbol (\w+) = \d+ for (\S+\.size\(\)\[\d+\])")
_GUARD = re.compile(r"(?:eval|runtime_assert) (?:\(\w+\) )?(Eq\(.*\)) \[guard added\]")
_FIX = re.compile(r"^ +(\w+) = (\w+)$", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
_NOT_THE_MODELS = (
    Path(str(torch.__file__)).parent,
    Path(__file__).parents[1],
    Path(sysconfig.get_path("stdlib")),
)
_PACKAGES = Path(sysconfig.get_path("purelib"))


class FrozenSizeError(BadInputError):
    """Sizes that were to be free and are constant in what torch traced."""

    def __init__(self, message: str, *, names: tuple[str, ...], hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.names = names


class _Conditions(logging.Handler):
    """Equations that torch assumes while it traces, each with the model's line that asked."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.symbols: dict[str, str] = {}
        """Symbol -> the size it stands for, in torch's words: L['x'].size()[1]."""
        self.found: list[tuple[str, str | None]] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if symbol := _SYMBOL.match(text):
            self.symbols[symbol[1]] = symbol[2]
        elif guard := _GUARD.match(text):
            frames = traceback.extract_stack()
            self.found.append((guard[1], model_line([(f.filename, f.lineno or 0) for f in frames])))


def why_frozen(
    module: nn.Module, call: Call, axes: Sequence[DynamicAxis], lost: Mapping[str, str]
) -> FrozenSizeError:
    """The error that says which sizes are constant and why; traces the module once more for it."""
    conditions = _conditions(module, call, axes)
    sources = _sources(call)
    parts = []
    for name, instead in lost.items():
        own = [axis for axis in axes if axis.name == name]
        symbols = {s for s, text in conditions.symbols.items() if text in _texts(own, sources)}
        line = next((ln for eq, ln in conditions.found if _about(eq, symbols) and ln), None)
        because = f", by {line}" if line else ""
        parts.append(f"{name} ({', '.join(map(in_words, own))}) is always {instead}{because}")
    options = " ".join(f"--dynamic {a.input}:{a.axis}={a.name}" for a in axes if a.name in lost)
    equal = next((f"{n} {o}" for n, o in lost.items() if not o.isdigit()), None)
    hint = f"leave {options} out, or rewrite that line"
    if equal is not None:
        hint = f"give {' and '.join(equal.split())} the same name: they are one size"
    return FrozenSizeError(
        f"{type(module).__name__} does not let every size free: {'; '.join(parts)}",
        names=tuple(lost),
        hint=hint,
    )


def suggested_sizes(text: str, axes: Sequence[DynamicAxis]) -> dict[str, str]:
    """Names that torch says are constant, or of one size with another, with what they are."""
    names = {axis.name for axis in axes}
    return {name: value for name, value in _FIX.findall(text) if name in names}


def model_line(frames: Sequence[tuple[str, int]]) -> str | None:
    """The innermost frame of the model's code: of the user's own, else of an installed package."""
    paths = [(Path(file), line) for file, line in frames if Path(file).is_file()]
    models = [(p, n) for p, n in paths if not any(p.is_relative_to(d) for d in _without_site(p))]
    own = [(p, n) for p, n in models if not p.is_relative_to(_PACKAGES)]
    if not models:
        return None
    path, number = (own or models)[-1]
    return f"{path.name}, line {number}: {linecache.getline(str(path), number).strip()}"


def line_in(text: str) -> str | None:
    """The model's line that a message of torch quotes from a traceback."""
    return model_line([(match[1], int(match[2])) for match in _FRAME.finditer(text)])


def _without_site(path: Path) -> tuple[Path, ...]:
    """site-packages lies in the folder of the standard library."""
    return _NOT_THE_MODELS[:2] if path.is_relative_to(_PACKAGES) else _NOT_THE_MODELS


def _conditions(module: nn.Module, call: Call, axes: Sequence[DynamicAxis]) -> _Conditions:
    handler, logger = _Conditions(), logging.getLogger(_LOGGER)
    level, handlers, propagate = logger.level, logger.handlers, logger.propagate
    try:
        # as torch.onnx does; the module sets its functions when it is imported
        patched = torch.fx.experimental._config.patch(  # type: ignore[attr-defined]  # ditto
            backed_size_oblivious=True
        )
        with quiet(), patched:
            logger.handlers, logger.propagate = [handler], False
            logger.setLevel(logging.INFO)
            torch.export.export(
                module,
                call.args,
                kwargs=call.kwargs,
                dynamic_shapes=dynamic_shapes(call, axes, {}),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
    except Exception:  # noqa: BLE001, S110 - it fails by the very condition that is looked for
        pass
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
    return handler


def _sources(call: Call) -> dict[str, str]:
    """Input name -> how torch writes it: L['x'], L['states'][0]."""
    leaves: list[tuple[Any, Any]] = pytree.tree_leaves_with_path(call.by_parameter)
    texts = ["L" + pytree.keystr(p) for p, leaf in leaves if isinstance(leaf, torch.Tensor)]
    return dict(zip(tensor_names(call), texts, strict=True))


def _texts(axes: Sequence[DynamicAxis], sources: Mapping[str, str]) -> set[str]:
    return {f"{sources.get(axis.input)}.size()[{axis.axis}]" for axis in axes}


def _about(equation: str, symbols: set[str]) -> bool:
    return not symbols.isdisjoint(re.findall(r"\w+", equation))
