"""`twofour export`: a torch model as ONNX, with the layer map."""

from __future__ import annotations

from twofour.cli import options as opt
from twofour.cli.console import show_result
from twofour.cli.guard import guarded, running
from twofour.records.options import RunOptions


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
    from twofour.cli.views import export_view
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
    show_result(exported, lambda: export_view(exported, checked), folder, json=json, quiet=quiet)
