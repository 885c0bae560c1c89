"""Weights, checks and contexts as the stages before the report would hand them over."""

from __future__ import annotations

from math import prod
from typing import Any

from twofour.eligibility.build_facts import BuildFacts, ReportContext
from twofour.eligibility.predict import predict
from twofour.records.eligibility import EligibilityReport, EligibilityTotals, Verdict
from twofour.records.export import Gpu
from twofour.records.weights import (
    Pattern,
    PrunedWeight,
    PruneResult,
    Reason,
    ReasonCode,
    Selection,
    Validation,
    Weight,
    WeightCheck,
)

TWO_FOUR = Pattern(2, 4)


def context(*, tensorrt_version: str | None = None, **changes: Any) -> ReportContext:
    given: dict[str, Any] = {
        "model": "digits.py:make",
        "pattern": TWO_FOUR,
        "engine": "onnxruntime 1.23.2 on CPU",
        "gpu": None,
        "activation_products": 0,
        "build": BuildFacts(tensorrt_version=tensorrt_version),
    }
    return ReportContext(**{**given, **changes})


def gpu(name: str, major: int, minor: int) -> Gpu:
    return Gpu(name=name, compute_capability=(major, minor), memory_bytes=1 << 34, driver=None)


def conv(
    layer: str, c: int, k: int, kernel: tuple[int, ...] = (3, 3), groups: int = 1, **changes: Any
) -> Weight:
    given: dict[str, Any] = {
        "layer": layer,
        "node": f"node_{layer}",
        "weight": f"{layer}.weight",
        "op": "Conv",
        "shape": (k, c // groups, *kernel),
        "axis": 1,
        "groups": groups,
        "in_channels": c,
        "out_channels": k,
        "kernel": kernel,
        "dtype": "float16",
        "math_dtype": "float16",
    }
    return Weight(**{**given, **changes})


def big(name: str = "a", **changes: Any) -> Weight:
    """A layer against which the rules have nothing."""
    return conv(name, 512, 512, **{"node": name, **changes})


def broken(name: str) -> tuple[Weight, WeightCheck]:
    """The same, not pruned."""
    return big(name), check(big(name), violations=7)


def grouped(name: str = "g") -> Weight:
    """A layer that no sparse kernel takes."""
    return conv(name, 128, 128, groups=32, node=name)


def matmul(layer: str, c: int, k: int, **changes: Any) -> Weight:
    return conv(layer, c, k, (), **{"op": "MatMul", "shape": (c, k), "axis": 0, **changes})


def linear(layer: str, c: int, k: int, **changes: Any) -> Weight:
    """A Linear of a module, in float32."""
    float32 = {"dtype": "float32", "math_dtype": "float32"}
    given = {"op": "Linear", "shape": (k, c), "axis": 1, "node": None, **float32}
    return matmul(layer, c, k, **{**given, **changes})


def int8(*, output: bool | None = None) -> dict[str, Any]:
    return {"dtype": "int8", "math_dtype": "int8", "output_quantized": output}


def reason(code: ReasonCode, message: str = "noted before") -> Reason:
    return Reason(code=code, message=message)


def check(weight: Weight, violations: int = 0, holds_along: int | None = None) -> WeightCheck:
    assert weight.weight is not None
    assert weight.axis is not None
    width = weight.shape[weight.axis]
    return WeightCheck(
        layer=weight.layer,
        node=weight.node,
        weight=weight.weight,
        op=weight.op,
        shape=weight.shape,
        axis=weight.axis,
        groups_checked=prod(weight.shape) // width * -(-width // 4),
        violations=violations,
        first_violation=(0,) * len(weight.shape) if violations else None,
        holds_along=holds_along,
        required=True,
    )


def validation(*checks: WeightCheck, pattern: Pattern = TWO_FOUR) -> Validation:
    return Validation(files=("sparse.onnx",), pattern=pattern, checks=checks)


def report(*judged: Weight | tuple[Weight, WeightCheck], **changes: Any) -> EligibilityReport:
    """A report on weights that hold the pattern, or on weights with the check that is given."""
    pairs = [w if isinstance(w, tuple) else (w, check(w)) for w in judged]
    checks = validation(*(c for _, c in pairs))
    return predict([w for w, _ in pairs], checks, context(**changes))


def totals_of(found: EligibilityReport) -> EligibilityTotals:
    assert found.totals is not None
    return found.totals


def verdict(weight: Weight, weight_check: WeightCheck | None = None, **changes: Any) -> Verdict:
    """The one verdict of a report on one weight; it holds the pattern where no check is given."""
    known = weight.weight is not None and weight.axis is not None
    checks = [weight_check or check(weight)] if known else []
    (found,) = predict([weight], validation(*checks), context(**changes)).verdicts
    return found


def pruned_row(weight: Weight, **changes: Any) -> PrunedWeight:
    """What pruning did to a weight."""
    given: dict[str, Any] = {"pruned": True, "zeros": 9, "kept_magnitude": 0.8, "reasons": ()}
    return PrunedWeight(weight=weight, **{**given, **changes})


def prune_result(*rows: PrunedWeight, **changes: Any) -> PruneResult:
    """A model pruned by magnitude, unless another method is named."""
    given: dict[str, Any] = {"source": "m", "method": "magnitude", "selection": Selection()}
    return PruneResult(weights=rows, pattern=TWO_FOUR, **{**given, **changes})


def codes(found: Verdict) -> list[str]:
    return [r.code.value for r in found.reasons]
