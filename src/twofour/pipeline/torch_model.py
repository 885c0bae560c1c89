"""The torch model of a run: loaded once, pruned in place, its weights saved and read back."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.eligibility.predict import not_covered_lines
from twofour.errors import BadInputError
from twofour.pipeline.sources.user_code import files_read
from twofour.pipeline.weights_file import load_weights, save_weights
from twofour.records.options import Selection
from twofour.records.pruning import PruneResult
from twofour.records.weights import Pattern
from twofour.store import atomic_file

if TYPE_CHECKING:
    from twofour.pipeline.sources.loaded import LoadedModule
    from twofour.pipeline.sources.source import TorchSource


class TorchModel:
    """Gives the module dense or pruned, loading it only when a stage needs it.

    Only one copy of the weights is ever held: pruning is in place, and asking for the dense
    module after that loads the source again.
    """

    def __init__(self, source: TorchSource, note: Callable[[str], None]) -> None:
        self._source = source
        self._note = note
        self._loaded: LoadedModule | None = None
        self._pruned = False
        self.data_files: Sequence[Path] = ()
        """What the source read when it was loaded last, its own code apart."""

    def dense(self) -> LoadedModule:
        """The module with the weights of the source."""
        if self._loaded is None or self._pruned:
            from twofour.pruning.torch_module import make_permanent

            self._loaded = None
            with files_read() as self.data_files:
                self._loaded = self._source.load()
            make_permanent(self._loaded.module)
            for text in self._loaded.notes:
                self._note(text)
            self._pruned = False
        return self._loaded

    def prune(self, pattern: Pattern, selection: Selection, target: Path) -> PruneResult:
        """Prune in place and save the whole state_dict to `target` (safetensors)."""
        from twofour.pruning.torch_module import prune_module

        loaded = self.dense()
        result = prune_module(loaded.module, pattern, selection, source=self._source.text)
        refuse_nothing_pruned(result)
        self._pruned = True
        with atomic_file(target) as temporary:
            save_weights(loaded.module, temporary, first=_names(result))
        return result

    def pruned(self, weights: Path) -> LoadedModule:
        """The module with the weights that were saved, read back unless they are at hand."""
        if self._loaded is None or not self._pruned:
            loaded = self.dense()
            load_weights(loaded.module, weights)
            self._pruned = True
        assert self._loaded is not None
        return self._loaded

    def release(self) -> None:
        """Let go of the module and its memory, which the engines' process needs next."""
        self._loaded = None
        self._pruned = False
        if sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):  # other C libraries than glibc
                ctypes.CDLL(None).malloc_trim(0)


def refuse_nothing_pruned(result: PruneResult) -> None:
    """Raise BadInputError where no weight was pruned: what follows would be a dense model."""
    if any(row.pruned for row in result.weights):
        return
    if not result.weights:
        raise BadInputError(
            "; ".join(
                (
                    f"{result.source} has no layer that could be pruned",
                    *not_covered_lines(result.not_covered),
                )
            ),
            hint="layers are Linear, Conv, ConvTranspose, MultiheadAttention and their sub-classes "
            "(in ONNX: Conv, ConvTranspose, Gemm, MatMul and Einsum with a constant weight)",
        )
    codes = Counter(row.reasons[0].code.value for row in result.weights if row.reasons)
    why = ", ".join(f"{code} {count}" for code, count in codes.most_common())
    raise BadInputError(
        f"none of the {len(result.weights)} weights of {result.source} is pruned: {why}",
        hint="--include GLOB or --all-layers prunes what sparse math cannot use",
    )


def _names(result: PruneResult) -> frozenset[str]:
    return frozenset(row.weight.weight for row in result.weights if row.weight.weight is not None)
