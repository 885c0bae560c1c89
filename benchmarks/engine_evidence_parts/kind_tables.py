"""What was chosen of the listed layers, as tables: rules, counts, ratios, exceptions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from engine_evidence_parts.cells import (
    LAYER_TITLES,
    builder_cell,
    figure,
    kernel_cell,
    layer_cells,
    ratio_cell,
)
from engine_evidence_parts.records import Answer, Fit, Kind, KindFinding, Layer
from engine_evidence_parts.thresholds import FEWEST_LAYERS
from twofour.reports.text import escaped, markdown_table
from twofour.words import count

_ABOUT = (
    f"c0 and k0 are sizes that occur; no rule for fewer than {FEWEST_LAYERS} layers or one outcome "
    "alone. Balanced accuracy is the mean of the shares right among chosen and among dense layers, "
    "0.5 for a rule that knows nothing. SMALL_CHANNELS is right where a small layer runs dense or "
    "another one sparse. Sparse / dense: fastest tactics of one build's autotuning, "
    "with the number of layers that have both; how far they repeat is not known."
)
_COUNTS = ("op", "kernel", "dtype", "batch", "listed", "chosen", "in fit (sizes)")
_JUDGED = ("rule", "right", "balanced", "always or never right", "SMALL_CHANNELS right")
_TIMES = ("sparse / dense, chosen", "sparse / dense, dense", "no sparse tactic", "set aside")
_WORDS = {
    Answer.ALWAYS: "always: no thresholds agree better",
    Answer.NEVER: "never: no thresholds agree better",
    Answer.ALL_CHOSEN: "all chosen",
    Answer.NONE_CHOSEN: "none chosen",
    Answer.TOO_FEW: "too few layers for a rule",
}


def kind_sections(kinds: Sequence[KindFinding]) -> Iterator[str]:
    """The rules and what they have wrong; a sentence where no layer is listed."""
    yield "### Which listed layers get a sparse kernel"
    if not kinds:
        yield "No layer is known to be listed."
        return
    several = len({(k.kind.gpu, k.kind.tensorrt) for k in kinds}) > 1
    first = ("built by",) if several else ()
    rows = [(*((_builder(k.kind),) if several else ()), *_row(k)) for k in kinds]
    yield markdown_table((*first, *_COUNTS, *_JUDGED, *_TIMES), rows)
    yield _ABOUT
    yield from _exceptions(kinds)


def rule_words(fit: Fit) -> str:
    """The rule as one would say it."""
    if fit.answer is not Answer.THRESHOLDS:
        return _WORDS[fit.answer]
    words = f"C >= {fit.least_in_channels} and K >= {fit.least_out_channels}"
    return f"{words}{_equals(fit)}"


def _equals(fit: Fit) -> str:
    """How far c0 and k0 can be moved without agreeing worse."""
    spans = (("c0", fit.equal_in_channels), ("k0", fit.equal_out_channels))
    wide = [f"{name} {s[0]} to {s[1]}" for name, s in spans if s is not None and s[0] != s[1]]
    return f" (as good: {', '.join(wide)})" if wide else ""


def _row(found: KindFinding) -> tuple[str, ...]:
    fit = found.fit
    return (
        *_kind_cells(found.kind),
        f"{found.listed:,}",
        f"{found.chosen:,}",
        f"{fit.layers:,} ({fit.sizes:,})",
        rule_words(fit),
        *_judged(found),
        ratio_cell(found.ratios_chosen),
        ratio_cell(found.ratios_dense),
        f"{found.no_sparse_tactic:,}",
        _set_aside(found),
    )


def _kind_cells(kind: Kind) -> tuple[str, ...]:
    batch = "?" if kind.batch is None else str(kind.batch)
    is_odd = kind.op.startswith("Conv") and not kind.kernel
    return escaped(kind.op), "?" if is_odd else kernel_cell(kind.kernel), escaped(kind.dtype), batch


def _judged(found: KindFinding) -> tuple[str, ...]:
    fit = found.fit
    in_use = f"{found.in_use_right:,}" if fit.layers else "-"
    if fit.right is None or fit.wrong is None or fit.balanced_accuracy is None:
        return "-", "-", "-", in_use
    best = max(fit.chosen, fit.layers - fit.chosen)
    mixed = f", {count(fit.mixed_sizes, 'size')} of both outcomes" if fit.mixed_sizes else ""
    right = f"{fit.right:,}, wrong {fit.wrong:,}{mixed}"
    return right, f"{fit.balanced_accuracy:.3f}", f"{best:,}", in_use


def _set_aside(found: KindFinding) -> str:
    whys = (
        ("choice not known", found.not_known),
        ("tactics skipped", found.skipped),
        ("no sizes", found.no_size),
    )
    return ", ".join(f"{why} {number:,}" for why, number in whys if number) or "-"


def _exceptions(kinds: Iterable[KindFinding]) -> Iterator[str]:
    rows = [_exception(found, layer) for found in kinds for layer in found.exceptions]
    if rows:
        yield "Exceptions to these rules:"
        titles = ("rule", "is", "dense ms", "sparse ms", "sparse / dense")
        yield markdown_table((*LAYER_TITLES, *titles), rows)


def _exception(found: KindFinding, layer: Layer) -> tuple[str, ...]:
    return (
        *layer_cells(layer),
        rule_words(found.fit),
        "chosen" if layer.chosen else "dense",
        figure(layer.best_dense_ms),
        figure(layer.best_sparse_ms),
        figure(layer.sparse_over_dense),
    )


def _builder(kind: Kind) -> str:
    return escaped(builder_cell(kind.gpu, kind.tensorrt))
