"""The plan of the GPU benchmark: what is in it, and what comes first when time is short."""

from __future__ import annotations

import time

from gpu_matrix.child import due
from gpu_matrix.plan import SHAPES, KernelCase, ModelCase, Order, full_plan


def test_no_case_is_planned_twice() -> None:
    assert len(set(full_plan())) == len(full_plan())


def test_every_model_is_planned_at_batch_1_to_64() -> None:
    models = [case for case in full_plan() if isinstance(case, ModelCase)]
    batches = {(c.model, c.shape, c.batch) for c in models if c.section == "models"}
    assert batches == {(*s, b) for s in SHAPES for b in (1, 2, 4, 8, 16, 32, 64)}


def test_every_type_is_planned_at_rows_1_to_8192() -> None:
    kernels = [case for case in full_plan() if isinstance(case, KernelCase)]
    layers = {(c.dtype, c.inputs, c.outputs, c.rows) for c in kernels if c.section == "layers"}
    for dtype in ("float16", "bfloat16", "int8"):
        assert {(dtype, 768, 3072, 1), (dtype, 11008, 4096, 8192)} <= layers
    assert {c.inputs for c in kernels if c.section == "squares"} == {1024, 2048, 4096, 8192}


def test_a_section_over_its_share_comes_last_and_nothing_is_forgotten() -> None:
    plan = (KernelCase("layers", "int8", 1, 1, 1), KernelCase("squares", "int8", 2, 2, 2))
    # half of the budget is gone: more than the share of the layers, less than that of the squares
    order = Order(plan, 100.0, time.monotonic() - 50, 0, True)
    assert list(due(order, lambda _message: None)) == [1, 0]
