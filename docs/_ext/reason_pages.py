"""A page for every reason code, from the table of reasons and the cases that test it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from math import prod
from pathlib import Path

from command_pages import index
from reason_cases import MAKERS
from support.report_cases import big, report

from twofour import product_times
from twofour.eligibility.build_evidence import BuildEvidence
from twofour.eligibility.reasons import REASONS, leaves_dense
from twofour.eligibility.remedies import LeftDense, Origin, ReasonRow
from twofour.eligibility.rules import GUIDE
from twofour.records.eligibility import Verdict
from twofour.reports.explain import layer_story
from twofour.reports.terminal import plain_text

_NVIDIA = "https://docs.nvidia.com/deeplearning/tensorrt/latest"
_GUIDE = f"{_NVIDIA}/inference-library/io-formats-sparsity.html"
_ISSUES = re.compile(r"([\w-]+/[\w-]+) issues? (\d+(?:, \d+)*)")
_COMMIT = re.compile(r"([\w-]+/[\w-]+) commit (\w+)")
_GPUS = ("A100", "RTX4090", "H100")
_ROWS = 4096
_PRECISIONS = {"int8": "INT8", "float16": "FP16"}


def pages() -> Mapping[str, str]:
    """The page of each code by its name, and `index`."""
    made = {row.code.value: "\n".join(page(row)) + "\n" for row in REASONS.values()}
    return made | {"index": index("Reason codes", [*_table()], [*made])}


def _table() -> Iterator[str]:
    yield "Why a layer does not run sparse, or may not: what each code means, and what to do."
    yield "The best verdict is the best that a layer with this reason can have."
    for origin, rows in groupby(REASONS.values(), key=lambda row: row.origin):
        yield from ("", f"## Found by {origin.value}", "")
        yield from ("| code | meaning | best verdict |", "|---|---|---|")
        for row in rows:
            code = row.code.value
            yield f"| [{code}]({code}.md) | {row.sentence} | `{row.best.value}` |"


def page(row: ReasonRow) -> Iterator[str]:
    """The lines of the page of one reason."""
    words = row.code.value.lower().replace("_", " ")  # a search for `small channels` ends here
    yield from (f"# {row.code.value}", "", f"<!-- index: {words} -->", "")
    yield from (f"{row.sentence} {row.documentation}", "")
    yield f"- Best verdict: `{row.best.value}`."
    yield from _facts(row)
    yield from ("", "## How it is found", "", f"The layer gets it from {row.origin.value}.")
    for rule in row.found_by:
        yield from ("", f"`{rule.__name__}` (`{rule.__module__.replace('.', '/')}.py`)")
        yield f": {' '.join((rule.__doc__ or '').split())}"
    yield from ("", "## What to do", "")
    yield from _remedies(row)
    with tempfile.TemporaryDirectory() as folder:
        verdict = MAKERS[row.code](Path(folder))
    yield from ("", "## What it gains", "", *_gain(row, verdict))
    story = layer_story(replace(report(big()), verdicts=(verdict,)), BuildEvidence(), verdict.layer)
    yield from ("", "## An example", "", f"`twofour explain {verdict.layer}` says:", "")
    yield from ("```text", plain_text(story, width=96).rstrip(), "```")
    if row.source is not None:
        yield from ("", "## Source", "", linked(row.source))


def _facts(row: ReasonRow) -> Iterator[str]:
    from_build, depends = row.origin is Origin.EVIDENCE, not row.refutes_rules
    facts = {
        f"Left dense by pruning: {row.left_dense.value}.": row.left_dense is not LeftDense.NO,
        "If the weight already is 2:4, this reason does not matter.": row.explains_dense,
        "This follows from the file alone; if a log disagrees, it belongs to another model.": (
            row.builder_obeys
        ),
        "It is found only in build logs and never predicted.": depends and from_build,
        "It depends on the build.": depends and not from_build,
        "It is a doubt: a layer with no other reason is eligible.": row.is_doubt,
    }
    yield from (f"- {text}" for text, holds in facts.items() if holds)


def _remedies(row: ReasonRow) -> Iterator[str]:
    if not row.remedies:
        yield "Nothing needs to be done, or nothing can be done."
    for remedy in row.remedies:
        text = remedy.text[0].upper() + remedy.text[1:]
        known = remedy.headline in (None, remedy.text)
        yield f"- {text}" if known else f"- {text} (“change first: {remedy.headline}”)"


def _gain(row: ReasonRow, verdict: Verdict) -> Iterator[str]:
    """The forecast for the layer of the example, where a remedy lets it run sparse."""
    if row.in_favour or not row.remedies:
        yield "Nothing: there is nothing to change."
    elif any(remedy.headline for remedy in row.remedies):
        shape = verdict.shape if prod(verdict.shape) > 1 else (512, 512)
        yield from _forecast(shape, "int8" if "int8" in verdict.dtype.lower() else "float16")
    elif any(leaves_dense(remedy.text) for remedy in row.remedies):
        yield "Nothing: such a layer is best left dense."
    else:
        yield "Only certainty: it changes what is known of the layer, not how fast it runs."


def _forecast(shape: tuple[int, ...], dtype: str) -> Iterator[str]:
    is_product = len(shape) == 2
    outputs, reduction = (shape[1], shape[0]) if is_product else (shape[0], prod(shape[1:]))
    yield "The layer may then run sparse. The forecast for a layer of this size"
    yield f"({outputs:,} outputs of {reduction:,} weights each) in {dtype}, with {_ROWS:,} rows"
    yield "(images times positions, or tokens):"
    yield from ("", "| GPU | dense | 2:4 | gain (80 % interval) |", "|---|---|---|---|")
    for gpu in _GPUS:
        t = product_times(gpu, _PRECISIONS[dtype], _ROWS, outputs, reduction)
        yield (
            f"| {gpu} | {t.dense_us:.0f} µs | {t.sparse_us:.0f} µs "
            f"| {t.gain:.2f} ({t.low:.2f} to {t.high:.2f}) |"
        )
    yield from ("", "Below 1 the sparse kernel is slower, and TensorRT keeps the dense one.")
    yield "[How the forecast knows](../kernel_model.md)."


def linked(source: str) -> str:
    """The source with links to the guide, and to the threads and commits that it names."""

    def threads(named: re.Match[str]) -> str:
        at = f"https://github.com/{named[1]}/issues"
        return f"{named[1]} " + ", ".join(f"[{n}]({at}/{n})" for n in named[2].split(", "))

    source = source.replace(GUIDE, f"[{GUIDE}]({_GUIDE})")
    source = _COMMIT.sub(r"[\g<0>](https://github.com/\1/commit/\2)", source)
    return _ISSUES.sub(threads, source)
