"""From a dense model to a 2:4-sparse TensorRT engine, with a reason for every layer.

The Python API is these four functions: `run` is the command prune-export-build, `prune` takes a
module in memory, `validate` and `compare` are the commands of these names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.version import __version__

if TYPE_CHECKING:
    from torch import nn

    from twofour.latency_records import CompareOptions, LatencyComparison
    from twofour.records import PruneResult, RunOptions, RunResult, Validation

__all__ = ["__version__", "compare", "prune", "run", "validate"]


def prune(
    model: nn.Module,
    pattern: str = "2:4",
    *,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    all_layers: bool = False,
) -> PruneResult:
    """Prune a torch module in place to N:M by magnitude, and say what was done to each weight.

    `include` and `exclude` are globs over layer names. Raises BadInputError for a bad pattern, a
    glob that matches nothing, NaN or infinity in a weight, and a weight that two layers need
    along different axes; nothing is changed then.
    """
    from twofour.pruning.module_prune import prune_module
    from twofour.records import Pattern, Selection

    selection = Selection(all_layers=all_layers, include=_globs(include), exclude=_globs(exclude))
    return prune_module(model, Pattern.parse(pattern), selection)


def validate(
    path: str | Path,
    pattern: str | None = None,
    *,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
) -> Validation:
    """Judge the weights in a saved file or folder; its `broken` names those that fail.

    Without a pattern a run folder is held to its own, everything else to 2:4. Raises BadInputError
    for what cannot be read, and where there is nothing to check.
    """
    from twofour.pipeline.validating import validate_path
    from twofour.records import Pattern, Selection

    selection = Selection(include=_globs(include), exclude=_globs(exclude))
    chosen = None if pattern is None else Pattern.parse(pattern)
    return validate_path(Path(path), chosen, selection)


def run(
    model: str | Path, out: str | Path | None = None, options: RunOptions | None = None
) -> RunResult:
    """Prune, validate, export, build and report into a run folder, resuming what is there.

    `model` is a model source as on the command line. Raises the kinds of TwofourError.
    """
    from twofour.pipeline.run import run_all
    from twofour.records import RunOptions

    folder = None if out is None else Path(out)
    return run_all(str(model), folder, options or RunOptions())


def compare(
    *paths: str | Path, out: str | Path | None = None, options: CompareOptions | None = None
) -> LatencyComparison:
    """Time the variants of a run folder, or of ONNX files and engines, in interleaved rounds.

    Writes latency.json and its pages into `out` (default: the run folder, or runs/compare-...).
    Raises the kinds of TwofourError.
    """
    from twofour.latency_records import CompareOptions
    from twofour.pipeline.comparing.compare import compare as run_comparison

    folder = None if out is None else Path(out)
    return run_comparison([Path(p) for p in paths], folder, options or CompareOptions())[1]


def _globs(text: str | Sequence[str]) -> tuple[str, ...]:
    """One glob, or several: a text alone is not a sequence of letters here."""
    return (text,) if isinstance(text, str) else tuple(text)
