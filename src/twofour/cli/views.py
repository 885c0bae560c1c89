"""What the commands show at their end, put together from the reports' pieces."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from twofour.records.export import ExportResult
from twofour.records.options import SizeRange
from twofour.records.run import BuildResult, ExportedVariant, RunResult, VariantCheck
from twofour.reports.document import Lines, Role
from twofour.reports.eligibility_document import eligibility_document, engine_lines
from twofour.reports.eligibility_words import drift_lines
from twofour.reports.latency_document import build_times
from twofour.reports.terminal import draw, render
from twofour.reports.weights_document import holding_words

_MB = 1e6


def run_view(result: RunResult) -> RenderableType:
    """The whole run: verdicts first, then what pruning cost, the engines and the files."""
    return Group(
        render(eligibility_document(result.report)),
        Text(),
        *map(Text, drift_lines(result.accuracy)),
        Text(),
        build_view(result.build),
        Text(),
        *_files(result.export),
    )


def build_view(built: BuildResult) -> RenderableType:
    """Engine, why not another, and the times of its variants."""
    engine = Lines(lines=(f"engine: {built.engine.in_words}",), role=Role.TEXT)
    return draw((engine, engine_lines(built, Role.TEXT), *build_times(built.times)))


def export_view(exported: ExportedVariant, checked: VariantCheck) -> RenderableType:
    """The file, its types and how well it agrees with the module."""
    types = "its own types" if exported.precision is None else exported.precision.value
    lines = [
        f"{exported.onnx.file}: {exported.onnx.size_bytes / _MB:.1f} MB, {types}, "
        f"opset {exported.opset}, {len(exported.layers.layers)} weights with a layer name"
    ]
    lines += [
        f"output {row.output}: differs from its source by at most {row.max_abs_error:.3g} "
        f"(allowed {row.bound:.3g}), cosine {row.cosine:.6f}"
        for row in checked.agreement
        if row.bound is not None
    ]
    lines += [_free_size(size, checked) for size in exported.ranges]
    if checked.not_compared:
        lines.append(f"not compared with a module: {checked.not_compared}")
    return Group(*(Text(line) for line in lines))


def _free_size(size: SizeRange, checked: VariantCheck) -> str:
    """Its range, and where the file was run beside the example."""
    largest = "no limit known" if size.max is None else size.max
    run_at = [str(c.sizes[size.name]) for c in checked.sizes if c.holds and size.name in c.sizes]
    also = f", agrees with the module at {' and '.join(run_at)} too" if run_at else ""
    return f"size {size.name}: {size.min} to {largest}{also}"


def _files(exported: ExportResult) -> list[Text]:
    found = exported.pattern
    lines = [f"{holding_words(found)} of {found.files[0]}, read back from the file"]
    lines += [f"{file.file}: {file.size_bytes / _MB:.1f} MB" for file in exported.files]
    return [Text(line) for line in lines]
