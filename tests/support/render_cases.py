"""Reports for the renderers: one with every status, one with hostile names, one large."""

from __future__ import annotations

from dataclasses import replace

from support import comparison_cases
from support.report_cases import check, conv, gpu, int8, matmul, reason, report
from twofour.eligibility.predict import summarize
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict, VerdictName
from twofour.records.export import EngineStatus
from twofour.records.latency import LatencyComparison
from twofour.records.options import BuildOptions
from twofour.records.run import BuildResult
from twofour.records.weights import ReasonCode, Weight, WeightCheck

HOSTILE = (
    *comparison_cases.HOSTILE,
    "line\u2028separator\u2029\u202eright-to-left",
    '=HYPERLINK("http://x","y")',
    "{% raw %}",
    "",
)


def predicted() -> EligibilityReport:
    """Layers that can run sparse, doubtful, broken and grouped ones."""
    stem, wrong = conv("stem", 3, 64, (7, 7)), conv("flattened", 256, 512, (1, 1))
    return report(
        (stem, check(stem, violations=3136)),
        conv("resnext", 128, 128, groups=32),
        (wrong, check(wrong, violations=30000, holds_along=0)),
        conv("small", 160, 160, (1, 1)),
        conv("large", 512, 512),
        *(matmul(f"encoder.{i}.fc", 768, 3072) for i in (0, 1, 2, 10)),
        matmul("decoder.fc", 1024, 4096, **int8(output=None)),
        conv("folded", 512, 512, (1, 1)),
        gpu=gpu("NVIDIA H200", 9, 0),
        engine="tensorrt 10.14.1 on NVIDIA H200",
        activation_products=24,
    )


def every_status() -> EligibilityReport:
    """These as a build measured them: chosen and dense with times, absent, as foretold or not."""
    made = predicted()
    changed = {
        "large": (VerdictName.CHOSEN, 0.031, 0.042),
        "encoder.0.fc": (VerdictName.CHOSEN, 0.0105, 0.0171),
        "encoder.1.fc": (VerdictName.CHOSEN, 0.0107, 0.0169),
        "small": (VerdictName.ELIGIBLE, 0.0091, 0.0064),
        "folded": (VerdictName.NOT_IN_ENGINE, None, None),
        "resnext": (VerdictName.ELIGIBLE, None, 0.02),
    }
    verdicts = tuple(
        _measured(v, *changed[v.layer]) if v.layer in changed else v for v in made.verdicts
    )
    return replace(
        made,
        verdicts=verdicts,
        summary=summarize(verdicts, 24),
        unmatched_engine_layers=(
            "Reformatting CopyNode for Input Tensor 0",
            "{ForeignNode[a...b]}",
        ),
    )


def hostile() -> EligibilityReport:
    """Every text that comes from a model or a log is hostile."""
    made = report(*(matmul(name, 512, 512, weight=f"w{i}") for i, name in enumerate(HOSTILE)))
    verdicts = tuple(
        replace(
            v,
            node=name,
            weight=f"{i}{name}",
            op=name or "MatMul",
            engine_layer=name,
            reasons=(reason(ReasonCode.DENSE_FASTER, name), *v.reasons),
            remedy=name or None,
        )
        for i, (name, v) in enumerate(zip(HOSTILE, made.verdicts, strict=True))
    )
    return replace(made, model=HOSTILE[0], verdicts=verdicts, unmatched_engine_layers=HOSTILE)


def large(layers: int = 2000) -> EligibilityReport:
    """Layers of a few sizes, some of them broken, grouped or small."""
    sizes = (3, 64, 128, 256, 320, 512, 768, 1024)
    judged: list[Weight | tuple[Weight, WeightCheck]] = []
    for i in range(layers):
        name = f"backbone.stages.{i // 100}.blocks.{i % 100}.attention.output"
        c, k = sizes[i % 8], sizes[(i // 8) % 7 + 1]
        weight = conv(name, c, k) if i % 3 else matmul(name, c, k)
        judged.append((weight, check(weight, violations=9 if i % 10 == 0 else 0)))
    return report(*judged)


def _measured(
    verdict: Verdict, name: VerdictName, sparse_ms: float | None, dense_ms: float | None
) -> Verdict:
    said = {
        VerdictName.CHOSEN: (reason(ReasonCode.QUALIFIES, "a sparse kernel was taken"),),
        VerdictName.ELIGIBLE: (reason(ReasonCode.DENSE_FASTER, "the dense tactic was faster"),),
        VerdictName.NOT_IN_ENGINE: (reason(ReasonCode.NOT_CONSTANT, "folded into large"),),
    }
    foretold = name in (verdict.predicted, VerdictName.CHOSEN)
    return replace(
        verdict,
        verdict=name,
        refuted=None if foretold else verdict.reasons[0],
        evidence=Evidence.MEASURED,
        engine_layer=f"{verdict.layer} + relu",
        reasons=said[name],
        sparse_ms=sparse_ms,
        dense_ms=dense_ms,
    )


def build_result(times: LatencyComparison) -> BuildResult:
    """A build with these times and a note, by the one engine of two that could run."""
    used, absent = (
        EngineStatus(engine=engine, version=None, can_run=why is None, why_not=why)
        for engine, why in (("onnxruntime", None), ("tensorrt", "<b>not installed</b>"))
    )
    return BuildResult(
        engine=used,
        asked_for="auto",
        not_used=(absent,),
        gpu=None,
        options=BuildOptions(),
        variants=(),
        times=times,
        notes=("a note & more",),
    )
