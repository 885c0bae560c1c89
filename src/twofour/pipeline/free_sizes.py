"""Which sizes a module really takes: run at others than the example's before it is exported."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofour.errors import BadInputError
from twofour.export.example_inputs import Call
from twofour.export.model_code import described
from twofour.export.sizes import BATCH, checked_axes, in_words, resized, sizes_of, with_batch
from twofour.export.torch_export import in_eval_mode
from twofour.records.options import DynamicAxis, SizeRange

if TYPE_CHECKING:
    from torch import nn

_CHECKED_LENGTH = 128
"""Greater size that a sequence is run at, where the model allows it: cheap, and long enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeSizes:
    """What stays free in the file, and two calls of other sizes that the module runs."""

    axes: tuple[DynamicAxis, ...]
    """Those of the batch apart, which torch_stages asks for by a flag."""
    ranges: tuple[SizeRange, ...]
    others: tuple[dict[str, int], ...]
    """Sizes by name; as many as there are, two where the module runs shorter and longer ones."""
    fixed: dict[str, str]
    """Name -> why the module does not run at another size."""

    def without(self, names: Sequence[str] | None) -> FreeSizes:
        """With these sizes no longer free; None: with none but the batch."""
        kept = tuple(a for a in self.axes if names is not None and a.name not in names)
        left = {axis.name for axis in kept}
        if len(kept) == len(self.axes):
            return NOTHING_FREE
        return FreeSizes(
            axes=kept,
            ranges=tuple(size for size in self.ranges if size.name in left),
            others=tuple(
                {n: size for n, size in sizes.items() if n in left or n == BATCH}
                for sizes in self.others
            ),
            fixed=self.fixed,
        )


NOTHING_FREE = FreeSizes(axes=(), ranges=(), others=(), fixed={})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """One free size: its name, as it is in the example, and the greatest that is known."""

    name: str
    example: int
    longest: int | None
    is_known: bool
    """The model's configuration says how long it may be, if only that there is no limit."""

    @property
    def longer(self) -> tuple[int, ...]:
        """What to try, the most telling first; a step may have to be a power of two."""
        if self.name == BATCH:
            return (2 if self.example != 2 else 3,)
        wanted = max(2 * self.example, _CHECKED_LENGTH if self.is_known else 0)
        steps = (self.example + 2**power for power in range(7))
        limit = wanted if self.longest is None else self.longest
        return tuple(n for n in (min(wanted, limit), *steps) if self.example < n <= limit)

    @property
    def shorter(self) -> tuple[int, ...]:
        """Likewise."""
        if self.name == BATCH:
            return (1 if self.example != 1 else 3,)
        steps = (self.example - 2**power for power in range(7))
        first = (1, 2) if self.is_known else ()
        return tuple(n for n in (*first, self.example // 2, *steps) if 0 < n < self.example)


def find_free_sizes(
    module: nn.Module,
    call: Call,
    axes: Sequence[DynamicAxis],
    longest: Mapping[str, int | None],
    *,
    batch: bool,
) -> FreeSizes:
    """Run the module at shorter and longer sizes than the example's, in float32.

    `longest` has the sizes that the configuration tells of. Raises BadInputError for an axis that
    the call does not have, and for two axes of one name and different sizes.
    """
    asked = checked_axes(call, axes)
    run = _Runner(module=module, call=call, axes=with_batch(call, asked) if batch else asked)
    sizes = [
        _Size(name=n, example=size, longest=longest.get(n), is_known=n in longest)
        for n, size in sizes_of(call, run.axes).items()
    ]
    free = [size for size in sizes if size.name != BATCH]
    long = _sizes_that_run(run, sizes, {s.name: s.longer for s in sizes})
    short = _sizes_that_run(run, sizes, {s.name: s.shorter for s in sizes})
    fixed = {s.name: _why(run, s) for s in free if s.name not in long and s.name not in short}
    return FreeSizes(
        axes=tuple(axis for axis in asked if axis.name not in fixed),
        ranges=tuple(_range(s, short, long) for s in free if s.name not in fixed),
        others=tuple(
            {name: size for name, size in found.items() if name not in fixed}
            for found in (short, long)
            if any(s.name in found for s in free)
        ),
        fixed=fixed,
    )


def refuse_fixed(module: nn.Module, axes: Sequence[DynamicAxis], fixed: Mapping[str, str]) -> None:
    """Raise BadInputError for sizes that were asked to be free and cannot be."""
    if not fixed:
        return
    name, why = next(iter(fixed.items()))
    own = [axis for axis in axes if axis.name == name]
    options = " ".join(f"--dynamic {axis.input}:{axis.axis}={axis.name}" for axis in own)
    raise BadInputError(
        f"{type(module).__name__} runs with one {name} only "
        f"({', '.join(map(in_words, own))}): {why}",
        hint=f"leave {options} out",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runner:
    module: nn.Module
    call: Call
    axes: tuple[DynamicAxis, ...]

    def failure(self, sizes: Mapping[str, int]) -> Exception | SystemExit | None:
        """None where the module runs at these sizes."""
        call = resized(self.call, self.axes, sizes)
        with in_eval_mode(self.module), contextlib.redirect_stdout(sys.stderr):
            try:
                self.module(*call.args, **call.kwargs)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - anything can be raised
                return error
        return None


def _sizes_that_run(
    run: _Runner, sizes: Sequence[_Size], candidates: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """All at their first candidate where that runs, else each at the first that does by itself."""
    first = {name: tried[0] for name, tried in candidates.items() if tried}
    if first and run.failure(first) is None:
        return first
    batch = {BATCH: first[BATCH]} if BATCH in first else {}
    if batch and run.failure(batch) is not None:
        batch = {}
    found = dict(batch)
    for size in sizes:
        for tried in candidates[size.name] if size.name != BATCH else ():
            if run.failure({**batch, size.name: tried}) is None:
                found[size.name] = tried
                break
    return found if run.failure(found) is None else _one_alone(found)


def _one_alone(found: Mapping[str, int]) -> dict[str, int]:
    """Sizes that run one by one and not together: the first is as good as any."""
    return dict(list(found.items())[:2])


def _why(run: _Runner, size: _Size) -> str:
    tried = next(iter((*size.longer, *size.shorter)), None)
    if tried is None:
        return f"{size.example} is all that it may be"
    error = run.failure({size.name: tried})
    what = "it fails" if error is None else described(error)
    return f"at {tried} in place of {size.example}: {what}"


def _range(size: _Size, short: Mapping[str, int], long: Mapping[str, int]) -> SizeRange:
    """What was run; for a sequence to the limit of its configuration, or without one."""
    longest = size.longest if size.is_known else long.get(size.name, size.example)
    return SizeRange(name=size.name, min=short.get(size.name, size.example), max=longest)
