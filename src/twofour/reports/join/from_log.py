"""A report on a build log alone: engine layers, without the model they come from."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

from twofour.eligibility.findings import Remark
from twofour.eligibility.predict import summarize
from twofour.eligibility.reasons import REASONS
from twofour.eligibility.remedies import LEAVE_GROUPED_ENGINE
from twofour.eligibility.rules import groups_in_words
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict, VerdictName
from twofour.records.log import Build, EngineLayer
from twofour.records.weights import HARDWARE_PATTERN, Reason, ReasonCode
from twofour.reports.join.engine_words import NO_ENGINE
from twofour.reports.join.evidence import BuildEvidence, engine_layers
from twofour.reports.join.joined import join_report
from twofour.reports.join.name_parts import PROFILE, KnownNames, split_name

_PRODUCT = re.compile(r"conv|gemm|matmul|matrix.?multiply|fully.?connected", re.IGNORECASE)
_COPIES = re.compile(r"Reformatting CopyNode|Optimizer Reformat|ONNXTRT_")
_KINDS = (
    (re.compile(r"deconv|convtranspose|conv_transpose", re.IGNORECASE), "ConvTranspose"),
    (re.compile(r"conv", re.IGNORECASE), "Conv"),
    (re.compile(r"gemm|fully.?connected", re.IGNORECASE), "Gemm"),
    (re.compile(r"mat(?:rix)?.?mul", re.IGNORECASE), "MatMul"),
)
_UNKNOWN_OP = "unknown"
_NO_MODEL = Reason(code=ReasonCode.NOT_CHECKED, message="there is no model to check")


def report_from_log(build: Build) -> EligibilityReport:
    """What a log says of the engine's own layers; nothing is predicted, for there is no model.

    Rows are the layers on the (Sparsity) lines and those that are convolutions or matrix products
    by their type, runner or kernel, under the names that the builder gives them.
    """
    return report_from_engine(BuildEvidence(build=build))


def report_from_engine(evidence: BuildEvidence) -> EligibilityReport:
    """The same with layer information and profiles beside the log, or in its place."""
    build = evidence.build
    layers, file = engine_layers(evidence)
    known = {layer.name: layer for layer in layers or ()}
    kinds = _kinds(build, layers or ())
    rows = tuple(
        _row(name, known.get(name), " ".join((kind, *sorted(kinds[part] for part in _parts(name)))))
        for name, kind in _names(build, layers or ())
    )
    model = build.model or build.file if build is not None else file or "an engine"
    predicted = EligibilityReport(
        model=model,
        pattern=HARDWARE_PATTERN,
        engine=NO_ENGINE,
        gpu=None,
        verdicts=rows,
        summary=summarize(rows, 0),
    )
    # the engine's other layers are no surprise where there is no model they could belong to
    return replace(join_report(predicted, evidence), unmatched_engine_layers=())


def _names(build: Build | None, engine: tuple[EngineLayer, ...]) -> Iterator[tuple[str, str]]:
    """Names of the rows, each layer once, with what tells its kind."""
    lines = build.sparsity_lines if build is not None else ()
    listed = dict.fromkeys(chain.from_iterable(line.constituents or () for line in lines))
    seen: set[str] = set()
    for name in listed:
        if seen.isdisjoint(parts := _parts(name)):
            yield name, name
        seen.update(parts)
    others = [
        (x.name, f"{x.parameter_type or ''} {x.layer_type or ''} {x.kernel or ''}") for x in engine
    ]
    if build is not None and not engine:
        others += [(x.name, " ".join(x.runners)) for x in build.layers]
    for name, kind in others:
        parts = _parts(name)
        is_product = _PRODUCT.search(kind) is not None and not _COPIES.match(name)
        if is_product and seen.isdisjoint(parts):
            yield name, f"{kind} {name}"
            seen.update(parts)


def _kinds(build: Build | None, engine: tuple[EngineLayer, ...]) -> Mapping[str, str]:
    """What type, runners and kernels tell of the kind of each layer that a name is made of."""
    found: dict[str, str] = defaultdict(str)
    tuned = build.layers if build is not None else ()
    said = [(x.name, f"{x.parameter_type or ''} {x.layer_type or ''}") for x in engine]
    for name, kind in (*said, *((x.name, " ".join(x.runners)) for x in tuned)):
        parts = _parts(name)
        if sum(_PRODUCT.search(part) is not None for part in parts) <= 1:
            found.update(dict.fromkeys(parts, kind))
    return found


_NO_NAMES = KnownNames.of(())


def _parts(name: str) -> set[str]:
    """What a name is made of, to tell that two names are of one layer."""
    plain = PROFILE.sub("", name)
    return {re.sub(r"_myl\d+_\d+$", "", part.text) for part in split_name(plain, _NO_NAMES)}


def _row(name: str, layer: EngineLayer | None, kind: str) -> Verdict:
    op = next((op for pattern, op in _KINDS if pattern.search(kind)), _UNKNOWN_OP)
    groups = (layer.groups if layer is not None else None) or 1
    if groups > 1:
        said, remedy, verdict = (
            _grouped(groups),
            LEAVE_GROUPED_ENGINE.text,
            VerdictName.NOT_ELIGIBLE,
        )
    else:
        said, remedy, verdict = _NO_MODEL, None, VerdictName.UNKNOWN
    out = layer.out_maps if layer is not None else None
    return Verdict(
        layer=name,
        node=name,
        op=op,
        engine_layer=None,
        shape=(),
        axis=None,
        groups=groups,
        in_channels=0,
        out_channels=out or 0,
        kernel=(layer.kernel_shape if layer is not None else None) or (),
        dtype=(layer.weights_type if layer is not None else None) or "unknown",
        pattern_holds=None,
        verdict=verdict,
        evidence=None if verdict is VerdictName.UNKNOWN else Evidence.PREDICTED,
        predicted=verdict,
        reasons=(said,),
        remedy=remedy,
        required=False if groups > 1 else None,
    )


def _grouped(groups: int) -> Reason:
    """The rule about groups, from what layer information states of the convolution."""
    row = REASONS[ReasonCode.GROUPED_CONV]
    return row.finding(Remark(message=groups_in_words(groups, 0))).reason
