"""`twofour export`: a torch model as ONNX, with the layer map."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twofour.cli import options as opt
from twofour.cli.console import show_result
from twofour.cli.guard import guarded, running
from twofour.records.options import RunOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from twofour.records.options import SizeRange
    from twofour.records.run import ExportedVariant, VariantCheck

_MB = 1e6


@guarded
def export(
    model: opt.Model,
    *,
    out: opt.Out = None,
    precision: opt.PrecisionOption = None,
    keep_float32: opt.KeepFloat32 = None,
    opset: opt.Opset = None,
    static_batch: opt.StaticBatch = False,
    dynamic: opt.Dynamic = None,
    inputs: opt.Inputs = None,
    input_shape: opt.InputShapes = None,
    seed: opt.Seed = 0,
    json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Export a model as it is to dense.onnx, and compare the file with the module.

    Example: twofour export model.py:make --precision float16 --out runs/model
    """
    from twofour.pipeline.run import run_export

    asked_shapes, asked_names = opt.parse_input_shapes(input_shape)
    options = RunOptions(
        precision=precision,
        keep_float32=tuple(keep_float32 or ()),
        opset=opset,
        dynamic_batch=not static_batch,
        dynamic=opt.parse_dynamic(dynamic),
        inputs=None if inputs is None else str(inputs),
        input_shapes=asked_shapes,
        input_shape_names=asked_names,
        seed=seed,
    )
    with running(out, quiet=quiet) as progress:
        folder, exported, checked = run_export(model, out, options, progress)
    show_result(exported, lambda: _view(exported, checked), folder, json=json, quiet=quiet)


def _view(exported: ExportedVariant, checked: VariantCheck) -> RenderableType:
    """The file, its types and how well it agrees with the module."""
    from rich.console import Group
    from rich.text import Text

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
