"""The seed of all random numbers that the user's code may draw."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np


def seed_everything(seed: int) -> None:
    """Seed the random numbers of Python and numpy, and of torch once something imports it.

    To import it here would take seconds and hundreds of megabytes in each process, mostly for code
    that does without.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # user code draws from the global state
    _finder.seed = seed
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _SeedsTorch(MetaPathFinder):
    """Looks on while torch is imported, and seeds it then."""

    seed = 0

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Of torch what the others find, its loader told to seed; None of everything else."""
        if fullname != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_seed(module: ModuleType) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            module.manual_seed(self.seed)

        spec.loader.exec_module = execute_and_seed  # type: ignore[method-assign]  # of this one
        return spec


_finder = _SeedsTorch()
