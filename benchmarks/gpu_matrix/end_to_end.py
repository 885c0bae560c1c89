"""One model at one shape, dense and with the layers of every backend."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor

from gpu_matrix.families import Family, sparse_model, tune
from gpu_matrix.figures import AGAIN, DENSE
from gpu_matrix.judge import Judge
from gpu_matrix.lab import MODEL_LIMITS, SMOKE_LIMITS, Builders, Lab, Variant, free_memory
from gpu_matrix.models import Model, linears, make_inputs, make_model, parameters
from gpu_matrix.plan import DTYPES, ModelCase
from gpu_matrix.rounds import measure
from gpu_matrix.rows import Row
from gpu_matrix.weights import two_four


def make_family(name: str, dtype: str, lab: Lab) -> Family:
    torch.manual_seed(lab.seed)
    with torch.device(lab.device):
        reference = make_model(name, smoke=lab.smoke).eval()
    for linear in linears(reference):
        linear.weight.copy_(two_four(linear.weight))
    dense = copy.deepcopy(reference).to(DTYPES[dtype])
    # the reference is to differ by the arithmetic alone, not by the rounding of the weights
    for wide, narrow in zip(reference.parameters(), dense.parameters(), strict=True):
        wide.copy_(narrow.float())
    return Family(reference, dense)


def family_of(case: ModelCase, lab: Lab) -> Family:
    """The models of a case, kept until another model is asked for."""
    key = (case.model, case.dtype)
    if lab.family is None or lab.family[0] != key:
        lab.family = None
        free_memory()
        lab.family = key, make_family(*key, lab)
    return lab.family[1]


def model_builders(family: Family, inputs: tuple[Tensor, ...]) -> Builders:
    """Dense, dense again, and the model with the layers of each backend."""

    def run(model: Model, note: str | None = None) -> Variant:
        return Variant(partial(model, *inputs), lambda outputs: outputs[0], note)

    def again() -> Variant:
        if AGAIN not in family.sparse:
            family.sparse[AGAIN] = copy.deepcopy(family.dense)
        return run(family.sparse[AGAIN])

    def sparse(name: str) -> Variant:
        model = sparse_model(family, name, name)
        return run(model, family.notes[name])

    def tuned() -> Variant:
        name = "cusparselt searched row-major"
        model = sparse_model(family, name, "cusparselt", fused=True)
        return run(model, f"{family.notes[name]}; {tune(model, inputs)} shapes searched")

    return {
        DENSE: lambda: run(family.dense),
        AGAIN: again,
        "cusparselt": lambda: sparse("cusparselt"),
        "cutlass": lambda: sparse("cutlass"),
        "cusparselt searched row-major": tuned,
    }


def model_row(case: ModelCase, lab: Lab) -> Row:
    """Measure one model at one shape; the reference runs for the first four of the batch."""
    family = family_of(case, lab)
    inputs = make_inputs(family.dense, case, DTYPES[case.dtype])
    few = [x[:4].float() if x.is_floating_point() else x[:4] for x in inputs]
    judge = Judge(family.reference(*few)[0], by_norm=True)
    figures = measure(
        model_builders(family, inputs), judge, lab, SMOKE_LIMITS if lab.smoke else MODEL_LIMITS
    )
    return case.row() | {"parameters": parameters(family.dense)} | figures
