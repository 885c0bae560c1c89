"""What another order of channels does to output errors after the real method.

Of a layer no forward is needed: where the inputs change places by P, the Gram matrix becomes PᵀGP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.pruning.layer_problem import LayerProblem
from twofour.pruning.matrices import Layout, from_stack, to_stack
from twofour.pruning.methods import Method
from twofour.pruning.onnx_storage import StoredView
from twofour.pruning.permutation.search import kept_score
from twofour.pruning.solve import solve_layers
from twofour.pruning.statistics import Inputs, Statistics
from twofour.records.options import MethodOptions
from twofour.records.pruning import Permutation, Repair
from twofour.records.weights import Pattern

Array = NDArray[Any]
Reorder = Callable[[Array], Array]
Places = NDArray[np.int64]
"""(parts, inputs): the flat index, among all inputs of all parts, of what comes to each place."""

_JUDGED_ROWS = 256
"""Of each part, spread evenly: rows do not hang on each other, and their mean has settled then."""


def input_places(view: StoredView, layout: Layout, reorder: Reorder) -> Places:
    """Where the inputs of a layer's matrices come from, for an order of its stored weight."""
    parts, _, inputs = layout.stack_shape
    own = np.arange(parts * inputs).reshape(parts, inputs)
    numbers = from_stack(np.broadcast_to(own[:, None] + 1, layout.stack_shape), layout)
    stored = np.zeros(view.shape, np.int64)
    stored.reshape(-1)[view.places().reshape(-1)] = numbers.reshape(-1)
    moved = to_stack(view.moved(reorder(stored)), layout)[:, 0]
    places: Places = np.where(moved > 0, moved - 1, own)  # 0: what fills a run up, which stays
    assert (np.sort(places, axis=None) == own.reshape(-1)).all(), "an order of these inputs"
    return places


def judged_rows(problem: LayerProblem) -> LayerProblem:
    """Some rows of the layer, as a stack of plain matrices."""
    stack = to_stack(problem.stored, problem.layout)
    some = stack[:, :: -(-stack.shape[1] // _JUDGED_ROWS)]
    layout = Layout(shape=some.shape, axis=2, m=problem.layout.m)
    return replace(problem, stored=np.ascontiguousarray(some), layout=layout, rounded=None)


def reordered(problem: LayerProblem, places: Places) -> LayerProblem:
    """What `judged_rows` gave, with its inputs in another order."""
    known = problem.statistics
    part, place = np.divmod(places, places.shape[1])
    return replace(
        problem,
        stored=np.stack([problem.stored[p[0]][:, i] for p, i in zip(part, place, strict=True)]),
        statistics=Statistics(
            seen=_moved(known.seen, part, place),
            held_out=None if known.held_out is None else _moved(known.held_out, part, place),
        ),
    )


def _moved(inputs: Inputs, part: Places, place: Places) -> Inputs:
    pairs = list(zip(part[:, 0], place, strict=True))
    return replace(
        inputs,
        gram=np.stack([inputs.gram[p][np.ix_(i, i)] for p, i in pairs]),
        total=np.stack([inputs.total[p][i] for p, i in pairs]),
    )


def error_of(problem: LayerProblem, method: Method, options: MethodOptions) -> float:
    """Output error after the method: on held-out inputs, where there are some."""
    return solve_layers([problem], method, options)[0].output_error.judged


def judged_whole(
    about: Permutation, permuted: Repair | None, unpermuted: Repair | None
) -> Permutation:
    """The record with what became of the model pruned in this order, and in the one it came in.

    The sum of what each layer gains need not be a gain: refused where the outputs of the whole are
    farther from the dense ones with it. As it is where either was not measured.
    """
    known = [None if each is None else each.error_after for each in (permuted, unpermuted)]
    if known[0] is None or known[1] is None:
        return about
    about = replace(about, error_permuted=known[0], error_unpermuted=known[1])
    if known[0] <= known[1]:
        return about
    return replace(
        about,
        classes=tuple(replace(each, taken=False) for each in about.classes),
        refused="the outputs of the pruned model are nearer to the dense ones without it",
    )


def lost_energy(stored: Array, axis: int, pattern: Pattern) -> float:
    """Share of the sum of w² that magnitude takes: the output error for inputs of one size."""
    squares = np.square(np.moveaxis(stored, axis, -1).astype(np.float64))
    whole = float(squares.sum())
    flat = squares.reshape(-1, stored.shape[axis])
    return 1 - kept_score(flat, pattern) / whole if whole else 0.0


def input_scales(view: StoredView, layout: Layout, statistics: Statistics) -> Array:
    """Root mean squares of a layer's inputs, in the shape of the stored weight."""
    diagonal = np.diagonal(statistics.seen.mean_gram, axis1=1, axis2=2)
    sizes = np.sqrt(np.maximum(diagonal, 0)).astype(np.float32)
    full = from_stack(np.broadcast_to(sizes[:, None], layout.stack_shape), layout)
    stored = np.zeros(view.shape, np.float32)
    stored.reshape(-1)[view.places().reshape(-1)] = full.reshape(-1)
    return stored
