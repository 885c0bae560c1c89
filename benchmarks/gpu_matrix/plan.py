"""What is measured, in which order, and within which budget."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from gpu_matrix.rows import Row

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class KernelCase:
    """One product: (rows, inputs) by the transposed 2:4 weight (outputs, inputs)."""

    section: str
    dtype: str
    inputs: int
    outputs: int
    rows: int

    def row(self) -> Row:
        """Its part of the JSON."""
        return dict(vars(self))


@dataclass(frozen=True)
class ModelCase:
    """One model at one shape."""

    section: str
    model: str
    shape: str
    batch: int
    dtype: str

    def row(self) -> Row:
        """Its part of the JSON."""
        return dict(vars(self))


Case = KernelCase | ModelCase

# the part of the budget that is spent when a section must end; what is left over goes to whatever
# was skipped until then
SECTIONS = {"layers": 0.38, "models": 0.8, "squares": 0.95, "models bfloat16": 1.0}
LAYERS = ((768, 3072), (4096, 11008), (3072, 768), (11008, 4096), (4096, 4096), (768, 768))
SHAPES = (
    ("vit-base", "image 224"),
    ("bert-base", "sequence 128"),
    ("bert-base", "sequence 512"),
    ("llama-7b-block", "prefill 512"),
    ("llama-7b-block", "decode 512"),
)


def full_plan() -> tuple[Case, ...]:
    """Every case, the most telling first within a section."""
    plan: list[Case] = [
        KernelCase("layers", dtype, inputs, outputs, rows)
        for dtype in DTYPES
        for rows in (512, 1, 8192, 64, 2048, 16, 128)
        for inputs, outputs in LAYERS
    ]
    for section, dtype in (("models", "float16"), ("models bfloat16", "bfloat16")):
        plan += [
            ModelCase(section, model, shape, batch, dtype)
            for model, shape in SHAPES
            for batch in ((1, 8, 64, 32, 16, 4, 2) if dtype == "float16" else (1, 8, 64))
        ]
    plan += [
        KernelCase("squares", dtype, side, side, rows)
        for rows in (8192, 512, 1, 2048, 64)
        for dtype in DTYPES
        for side in (4096, 1024, 2048, 8192)
    ]
    return tuple(sorted(plan, key=lambda case: list(SECTIONS).index(case.section)))


def smoke_plan() -> tuple[Case, ...]:
    """A case of every kind, tiny."""
    kernels = (KernelCase("layers", dtype, 64, 96, 32) for dtype in DTYPES)
    models = (ModelCase("models", model, shape, 2, "bfloat16") for model, shape in SHAPES[::2])
    return (*kernels, *models)


@dataclass(frozen=True)
class Order:
    """What the child is to do."""

    plan: tuple[Case, ...]
    budget_s: float
    started: float
    """By time.monotonic(), which parent and child share."""
    seed: int
    smoke: bool
    done: frozenset[int] = frozenset()
    banned: frozenset[str] = frozenset()
    uncapturable: tuple[tuple[str, str], ...] = ()

    def left_s(self, part: float = 1.0) -> float:
        """Of a part of the budget."""
        return part * self.budget_s - (time.monotonic() - self.started)


def settled(order: Order, index: int) -> Order:
    return replace(order, done=order.done | {index})
