"""Free sizes of torch models: asked for, checked at two others, or refused with the line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from support.small_run import Recorder

from twofour.cli.options import parse_dynamic
from twofour.errors import BadInputError, BuildFailedError, PatternBrokenError
from twofour.graph.opened import open_onnx
from twofour.inputs.fits import save_arrays, stored_arrays
from twofour.jobs import run_export
from twofour.pipeline.checks import at_other_sizes
from twofour.pipeline.emitting import emit_trtexec
from twofour.records.export import LayerMap, OnnxFile
from twofour.records.options import DynamicAxis, Precision, RunOptions, SizeRange, Variant
from twofour.records.run import ExportedVariant, OtherSizes, SizeCheck, VariantCheck

NETS = Path(__file__).parents[1] / "support" / "free_nets.py"


def options(*dynamic: str, opset: int | None = None) -> RunOptions:
    return RunOptions(dynamic=parse_dynamic(list(dynamic)) if dynamic else None, opset=opset)


def export(
    name: str, out: Path, *dynamic: str, opset: int | None = None
) -> tuple[ExportedVariant, VariantCheck]:
    made = run_export(f"{NETS}:{name}", out, options(*dynamic, opset=opset), Recorder())
    return made[1], made[2]


def refusal(name: str, out: Path, *dynamic: str) -> BadInputError:
    with pytest.raises(BadInputError) as failure:
        export(name, out, *dynamic)
    return failure.value


def test_height_and_width_stay_free_and_the_file_is_run_smaller_and_larger(tmp_path: Path) -> None:
    exported, checked = export("Image", tmp_path, "image:2=height", "image:3=width", opset=17)
    assert exported.inputs[0].shape == ("batch", 16, "height", "width")
    assert exported.outputs[0].name == "output_0"
    assert [check.sizes for check in checked.sizes] == [
        {"height": 8, "width": 8, "batch": 3},
        {"height": 32, "width": 32, "batch": 2},
    ]
    assert all(check.holds and check.agreement for check in checked.sizes)
    expected = SizeRange(name="height", min=8, max=32)
    assert open_onnx(tmp_path / "dense.onnx").size_ranges["height"] == expected
    onnx.checker.check_model(tmp_path / "dense.onnx", full_check=True)


def test_one_name_is_one_size_over_all_inputs_and_its_profile_follows_the_range(
    tmp_path: Path,
) -> None:
    exported, checked = export("Ids", tmp_path, "ids:1=length", "mask:-1=length")
    assert [i.shape for i in exported.inputs] == [("batch", "length")] * 2
    assert [o.shape for o in exported.outputs] == [("batch", "length", 32), ("batch", 32)]
    assert [check.sizes["length"] for check in checked.sizes] == [3, 12]
    emitted = emit_trtexec(tmp_path / "dense.onnx", tmp_path / "out", RunOptions(), "10")
    assert {(p.min, p.opt, p.max) for p in emitted.options.shapes} == {((1, 3), (2, 6), (8, 12))}
    script = (tmp_path / "out" / "build.sh").read_text()
    assert script.count("--minShapes=ids:1x3,mask:1x3") == 2
    assert script.count("--maxShapes=ids:8x12,mask:8x12") == 2


def test_a_size_that_the_module_does_not_run_at_is_refused_with_its_line(tmp_path: Path) -> None:
    error = refusal("Flat", tmp_path, "x:2=height")
    assert error.message.startswith("Flat runs with one")
    assert "free_nets.py, line" in error.message
    assert "self.linear(x.flatten(1))" in error.message
    assert error.hint == "leave --dynamic x:2=height out"


def test_a_module_that_other_sizes_change_is_exported_as_it_was(tmp_path: Path) -> None:
    exported, checked = export("Window", tmp_path, "x:2=height")
    outputs = stored_arrays(tmp_path / "stages" / "reference-dense.npz")
    assert outputs[exported.outputs[0].name].shape[2] == 1
    assert checked.agreement[0].max_abs_error < 0.01


def test_a_size_that_torch_makes_constant_is_refused(tmp_path: Path) -> None:
    error = refusal("Compares", tmp_path, "x:1=length")
    assert error.message.endswith("is always 6")


def test_two_names_for_what_must_be_one_size_are_refused(tmp_path: Path) -> None:
    error = refusal("Square", tmp_path, "x:2=height", "x:3=width")
    assert "is always height" in error.message
    assert "give width and height" in (error.hint or "")
    exported, checked = export("Square", tmp_path / "n", "x:2=n", "x:3=n")
    assert exported.inputs[0].shape == ("batch", 16, "n", "n")
    assert all(check.holds for check in checked.sizes)


def test_control_flow_on_data_is_refused_with_the_users_line(tmp_path: Path) -> None:
    error = refusal("DependsOnData", tmp_path)
    assert "free_nets.py, line" in error.message
    assert "if y.sum() > 0:" in error.message


@pytest.mark.parametrize(
    ("dynamic", "words"),
    [
        ("y:1=length", "there is no input 'y'"),
        ("ids:2=length", "'ids' is 2x6, and has no such axis"),
        ("ids:1=a,ids:-1=b", "that axis is 'a' already"),
        ("ids:0=n,ids:1=n", "'n' is 2 in ids (dimension 0) and 6 in ids (dimension 1)"),
    ],
)
def test_an_axis_that_is_not_there_is_refused(tmp_path: Path, dynamic: str, words: str) -> None:
    assert words in refusal("Ids", tmp_path, dynamic).message


@pytest.mark.parametrize("text", ["x", "x:a=n", ":1=n", "x:1=", "x:1=2"])
def test_an_axis_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="--dynamic: cannot read"):
        parse_dynamic([text])


def test_axes_are_read_one_by_one_or_separated_by_commas() -> None:
    wanted = (DynamicAxis(input="x", axis=2, name="h"), DynamicAxis(input="a:b", axis=-1, name="w"))
    assert parse_dynamic(["x:2=h,a:b:-1=w"]) == wanted == parse_dynamic(["x:2=h", "a:b:-1=w"])
    assert parse_dynamic(["none"]) == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (options("x:1=n"), "--dynamic is for torch models"),
        (RunOptions(dynamic_batch=False), "--static-batch is for torch models"),
        (RunOptions(opset=17), "ONNX already"),
    ],
)
def test_an_option_that_an_onnx_file_would_pass_over_is_refused(
    tmp_path: Path, given: RunOptions, words: str
) -> None:
    (tmp_path / "m.onnx").write_bytes(b"")
    with pytest.raises(BadInputError, match=words):
        run_export(str(tmp_path / "m.onnx"), tmp_path / "o", given, Recorder())


VIT = """
from transformers import ViTConfig, ViTModel
def make():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "image_size": 64, "patch_size": 16}
    return ViTModel(ViTConfig(num_hidden_layers=1, num_attention_heads=4, **sizes)).eval()
"""


def test_an_image_size_that_the_architecture_fixes_is_let_go_and_said(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(VIT)
    recorder = Recorder()
    _, exported, _ = run_export(
        f"{tmp_path / 'net.py'}:make", tmp_path / "o", RunOptions(), recorder
    )
    assert exported.inputs[0].shape == ("batch", 3, 64, 64)
    assert "at 128 instead of" in exported.notes[0]
    assert exported.notes[1].startswith("width stays")


# --- a file that is wrong at other sizes ----------------------------------------------------------

HEIGHT = DynamicAxis(input="x", axis=1, name="height")


def checks(
    folder: Path, options: RunOptions, off: float | BuildFailedError, notes: list[str]
) -> list[SizeCheck]:
    """Of a module that gives its input back, at a height of 8, and a file that adds `off`."""

    def outputs(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if isinstance(off, BuildFailedError):
            raise off
        return {"y": inputs["x"] + np.float32(off)}

    progress = SimpleNamespace(note=notes.append)
    run: Any = SimpleNamespace(options=options, file=folder.joinpath, progress=progress)
    session: Any = SimpleNamespace(outputs=outputs)
    x = np.ones((1, 8), np.float32)
    save_arrays(folder / "sizes.npz", {"input:x": x, "output:y": x})
    exported = ExportedVariant(
        onnx=OnnxFile(variant=Variant.DENSE, file="dense.onnx", size_bytes=1),
        reference=None,
        precision=Precision.FLOAT16,
        opset=20,
        inputs=(),
        outputs=(),
        layers=LayerMap(layers=()),
        other_sizes=(OtherSizes(sizes={"height": 8}, file="sizes.npz"),),
    )
    return list(at_other_sizes(run, session, exported))


@pytest.mark.parametrize(
    ("off", "why"),
    [
        (0.5, r"output 'y' differs from that of the module by 0\.5 .*; 0\.02 is allowed"),
        (np.nan, "output 'y' has 8 NaN or infinite values"),
        (BuildFailedError("it does not run"), "it does not run"),
    ],
)
def test_a_file_that_is_wrong_is_refused_where_the_size_was_asked_for(
    tmp_path: Path, off: float | BuildFailedError, why: str
) -> None:
    with pytest.raises(PatternBrokenError, match=f"at height 8: {why}") as raised:
        checks(tmp_path, RunOptions(dynamic=(HEIGHT,)), off, [])
    assert raised.value.hint == "leave out a --dynamic of height"


def test_it_is_only_said_where_nobody_asked_for_the_size(tmp_path: Path) -> None:
    notes: list[str] = []
    assert [c.holds for c in checks(tmp_path, RunOptions(), 0.5, notes)] == [False]
    assert notes[0].startswith("WARNING: dense.onnx does not compute what the module does")
    assert notes[0].endswith("--dynamic none keeps the example's sizes")
