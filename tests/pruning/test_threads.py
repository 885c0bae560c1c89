"""The same bits whatever the number of threads, of ours and of BLAS."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
from support.matrix_problem import matrix_problem, solve_layer
from threadpoolctl import threadpool_info

from twofour.pruning.layer_problem import LayerProblem
from twofour.pruning.methods import METHODS
from twofour.pruning.resources import one_blas_thread, side_by_side
from twofour.pruning.solve import LayerSolver
from twofour.records.options import MethodOptions


def problem(inputs: int = 576, rows: int = 160) -> LayerProblem:
    """Wider than a tile of the Gram matrix, and of several tiles of rows."""
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(rows, inputs)).astype(np.float32)
    x = generator.normal(size=(600, inputs)).astype(np.float32)
    x += np.roll(x, 1, 1)
    return matrix_problem(weight, x)


def digest(threads: int) -> str:
    found = hashlib.sha256()
    layer = problem()
    found.update(layer.statistics.seen.gram.tobytes())
    for method in ("wanda", "sparsegpt", "admm"):
        solved = solve_layer(layer, METHODS[method], MethodOptions(), threads=threads)
        found.update(solved.weight.tobytes())
        found.update(repr(solved.output_error).encode())
    return found.hexdigest()


def test_any_number_of_threads_of_ours_and_of_libraries_gives_the_same_bits() -> None:
    """In a process of its own, as libraries read their settings when they are loaded."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    own = {**dict.fromkeys(names, "4"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", f"import {__name__} as t; print(t.digest(4))"]
    found = subprocess.check_output(command, env={**os.environ, **own}, text=True)
    assert found.strip() == digest(1)


def test_layers_with_the_same_inputs_are_prepared_once() -> None:
    calls = []
    admm = METHODS["admm"]
    assert admm.prepare is not None
    prepare = admm.prepare

    def counted(one: object) -> object:
        calls.append(one)
        return prepare(one)  # type: ignore[arg-type]  # it is handed on as it came

    layer = problem(64, 32)
    other = replace(layer, stored=layer.stored[::-1].copy())
    solver = LayerSolver(replace(admm, prepare=counted), MethodOptions(), threads=1)
    solved = list(map(solver.solve, [layer, other]))
    assert len(calls) == 1
    for one, found in zip((layer, other), solved, strict=True):
        alone = solve_layer(replace(one), admm, MethodOptions())
        assert np.array_equal(found.weight, alone.weight)
    solver.solve(problem(64, 32))
    assert len(calls) == 2


def test_results_come_in_order_and_the_first_error_is_raised() -> None:
    def work(piece: int) -> int:
        time.sleep(0.01 * (5 - piece))
        if piece > 3:
            raise ValueError(piece)
        return piece

    assert side_by_side(work, [0, 1, 2, 3], threads=4) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="4"):
        side_by_side(work, [0, 4, 5], threads=3)


def test_blas_has_one_thread_until_the_last_one_leaves() -> None:
    def threads() -> set[int]:
        return {lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"}

    before, seen = threads(), []

    def nested() -> None:
        with one_blas_thread():
            time.sleep(0.02)
        seen.append(threads())

    with one_blas_thread():
        thread = Thread(target=nested)
        thread.start()
        thread.join()
        assert threads() == {1}
    assert seen == [{1}]
    assert threads() == before
