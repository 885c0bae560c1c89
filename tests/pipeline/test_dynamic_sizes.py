"""Free sizes of torch models: asked for, checked at two others, or refused with the line."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from support.small_run import Recorder

from twofour.cli.options import parse_dynamic
from twofour.errors import BadInputError
from twofour.graph.opened import open_onnx
from twofour.inputs.fits import stored_arrays
from twofour.jobs import run_export
from twofour.pipeline.emitting import emit_trtexec
from twofour.records.options import DynamicAxis, RunOptions, SizeRange
from twofour.records.run import ExportedVariant, VariantCheck

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
    exported, checked = export("image", tmp_path, "image:2=height", "image:3=width", opset=17)
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
    exported, checked = export("ids", tmp_path, "ids:1=length", "mask:-1=length")
    assert [i.shape for i in exported.inputs] == [("batch", "length")] * 2
    assert [o.shape for o in exported.outputs] == [("batch", "length", 32), ("batch", 32)]
    assert [check.sizes["length"] for check in checked.sizes] == [3, 12]
    emitted = emit_trtexec(tmp_path / "dense.onnx", tmp_path / "out", RunOptions(), "10")
    assert {(p.min, p.opt, p.max) for p in emitted.options.shapes} == {((1, 3), (2, 6), (8, 12))}
    script = (tmp_path / "out" / "build.sh").read_text()
    assert script.count("--minShapes=ids:1x3,mask:1x3") == 2
    assert script.count("--maxShapes=ids:8x12,mask:8x12") == 2


def test_a_size_that_the_module_does_not_run_at_is_refused_with_its_line(tmp_path: Path) -> None:
    error = refusal("flat", tmp_path, "x:2=height")
    assert error.message.startswith("Flat runs with one")
    assert "free_nets.py, line" in error.message
    assert "self.linear(x.flatten(1))" in error.message
    assert error.hint == "leave --dynamic x:2=height out"


def test_a_module_that_other_sizes_change_is_exported_as_it_was(tmp_path: Path) -> None:
    exported, checked = export("window", tmp_path, "x:2=height")
    outputs = stored_arrays(tmp_path / "stages" / "reference-dense.npz")
    assert outputs[exported.outputs[0].name].shape[2] == 1
    assert checked.agreement[0].max_abs_error < 0.01


def test_a_size_that_torch_makes_constant_is_refused(tmp_path: Path) -> None:
    error = refusal("compares", tmp_path, "x:1=length")
    assert error.message.endswith("is always 6")


def test_two_names_for_what_must_be_one_size_are_refused(tmp_path: Path) -> None:
    error = refusal("square", tmp_path, "x:2=height", "x:3=width")
    assert "is always height" in error.message
    assert "give width and height" in (error.hint or "")
    exported, checked = export("square", tmp_path / "n", "x:2=n", "x:3=n")
    assert exported.inputs[0].shape == ("batch", 16, "n", "n")
    assert all(check.holds for check in checked.sizes)


def test_control_flow_on_data_is_refused_with_the_users_line(tmp_path: Path) -> None:
    error = refusal("depends", tmp_path)
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
    assert words in refusal("ids", tmp_path, dynamic).message


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


BERT = """
import torch, transformers
def make():
    torch.manual_seed(0)
    config = transformers.{config}
    return transformers.{model}(config).eval()
"""
MODELS = {
    "roberta": (
        "RobertaModel",
        "RobertaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, "
        "intermediate_size=128, vocab_size=100, max_position_embeddings=66)",
        64,
    ),
    "t5": (
        "T5EncoderModel",
        "T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=100)",
        None,
    ),
}


def test_an_image_size_that_the_architecture_fixes_is_let_go_and_said(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = (
        "ViTConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, "
        "intermediate_size=128, image_size=64, patch_size=16)"
    )
    (tmp_path / "net.py").write_text(BERT.format(model="ViTModel", config=config))
    recorder = Recorder()
    _, exported, _ = run_export(
        f"{tmp_path / 'net.py'}:make", tmp_path / "o", RunOptions(), recorder
    )
    assert exported.inputs[0].shape == ("batch", 3, 64, 64)
    assert "at 128 instead of" in exported.notes[0]
    assert exported.notes[1].startswith("width stays")
