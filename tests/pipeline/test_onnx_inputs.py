"""Free sizes of ONNX files: what is asked for, what follows, what is refused, what a batch is."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from support import onnx_models as om
from support.small_run import Recorder
from typer.testing import CliRunner, Result

from twofour.cli import application
from twofour.cli.options import with_input_shapes
from twofour.errors import BadInputError
from twofour.inputs.examples import (
    asked_shapes,
    example_shapes,
    load_exact_inputs,
    load_inputs,
    parse_shapes,
    random_inputs,
)
from twofour.jobs import open_run
from twofour.records.export import TensorShape
from twofour.records.options import CalibrationOptions, Precision, RunOptions

Shape = Sequence[int | str]
ORT = "onnxruntime"


def tensors(**shapes: Shape) -> tuple[TensorShape, ...]:
    return tuple(TensorShape(name=n, dtype="float32", shape=tuple(s)) for n, s in shapes.items())


def sizes(inputs: Sequence[TensorShape], *texts: str) -> Mapping[str, tuple[int, ...]]:
    options = with_input_shapes(RunOptions(), list(texts))
    return example_shapes(inputs, asked_shapes(inputs, options, ()), "m.onnx")


IMAGE = tensors(x=("batch", 3, "height", "width"))
TEXT = tensors(input_ids=("b", "s"), attention_mask=("b", "s"), token_type_ids=("b", "s"))


@pytest.mark.parametrize(
    ("inputs", "listed", "options"),
    [
        (IMAGE, ["x dimension 2 (height)", "x dimension 3 (width)"], "x=8x3x224x224"),
        (TEXT, ["input_ids dimension 1 (s)", "token_type_ids dimension 1 (s)"], "input_ids=8x128"),
        (tensors(x=(1, "?")), ["x dimension 1 (?)"], "x=1x128"),
        (tensors(x=("n", 4), y=("m", 4)), ["x dimension 0 (n)", "y dimension 0 (m)"], "x=8x4"),
    ],
)
def test_a_free_size_that_is_no_batch_is_asked_for_with_the_option_to_add(
    inputs: Sequence[TensorShape], listed: Sequence[str], options: str
) -> None:
    with pytest.raises(BadInputError) as failure:
        sizes(inputs)
    assert failure.value.message.startswith("m.onnx leaves sizes of its inputs free")
    assert all(words in failure.value.message for words in listed)
    assert f"--input-shape {options}" in (failure.value.hint or "")
    assert "--inputs FILE.npz" in (failure.value.hint or "")


@pytest.mark.parametrize("inputs", [IMAGE, TEXT, tensors(a=("?", "?"), b=("?", "?"), c=("n", 4))])
def test_the_options_that_an_error_suggests_are_enough(inputs: Sequence[TensorShape]) -> None:
    with pytest.raises(BadInputError) as failure:
        sizes(inputs)
    words = (failure.value.hint or "").replace(",", " ").split()
    options = [words[at + 1] for at, word in enumerate(words) if word == "--input-shape"]
    assert set(sizes(inputs, *options)) == {tensor.name for tensor in inputs}


def test_one_name_is_one_size_and_shapes_by_position_are_for_all_inputs() -> None:
    found = sizes(TEXT, "input_ids=2x64")
    assert found == dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (2, 64))
    assert sizes(IMAGE, "1x3x64x48") == {"x": (1, 3, 64, 48)}


def test_a_batch_alone_is_eight_or_that_of_the_other_inputs() -> None:
    assert sizes(tensors(x=("batch", 3), y=("batch",))) == {"x": (8, 3), "y": (8,)}
    assert sizes(tensors(x=("?", 3), y=("?", 4)), "x=5x3") == {"x": (5, 3), "y": (5, 4)}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["x=1x4x8x8"], "x (batch x 3 x height x width) cannot be 1x4x8x8"),
        (["x=3x8x8"], "cannot be 3x8x8"),
        (["image=1x3x8x8"], "no input 'image'"),
        (["1x3x8x8", "1x3x8x8"], "2 shapes for the 1 inputs"),
        (["x=1x2", "3x4"], "every shape with its input's name, or none"),
        (["=1x2"], "every shape with its input's name, or none"),
        (["x=1x2", "x=1x3"], "names an input twice"),
        (["x=1xtwo"], "'1xtwo' is not a shape"),
        (["x="], "'' is not a shape"),
    ],
)
def test_shapes_that_cannot_be_read_or_do_not_fit_are_refused(
    texts: Sequence[str], words: str
) -> None:
    with pytest.raises(BadInputError) as failure:
        sizes(IMAGE, *texts)
    assert words in failure.value.message


def test_a_name_may_hold_an_equals_sign() -> None:
    options = with_input_shapes(RunOptions(), ["a=b:0=1x2"])
    assert (options.input_shapes, options.input_shape_names) == (((1, 2),), ("a=b:0",))


@pytest.mark.parametrize(
    "shape", [(2**31, 4), (2**62, 2**62), (1,) * 3 + (2**16,) * 4, (1 << 20, 1 << 9)]
)
def test_examples_that_no_memory_holds_are_refused_at_once(shape: Shape) -> None:
    started = time.process_time()
    with pytest.raises(BadInputError, match="are made up of") as failure:
        random_inputs(tensors(x=shape), 0, None, "m.onnx")
    assert time.process_time() - started < 1
    assert failure.value.message.startswith("m.onnx: no example inputs")
    assert "--input-shape" in (failure.value.hint or "")


def test_integers_are_zero_or_one_and_floats_of_their_type() -> None:
    inputs = (
        TensorShape(name="ids", dtype="int64", shape=(2, 50)),
        TensorShape(name="x", dtype="float16", shape=(2, 50)),
        TensorShape(name="d", dtype="float64", shape=(2,)),
    )
    made = random_inputs(inputs, 0)
    assert set(np.unique(made["ids"])) == {0, 1}
    assert [made[n].dtype.name for n in ("ids", "x", "d")] == ["int64", "float16", "float64"]


def save(path: Path) -> Path:
    """Image of free height and width -> Conv -> mean over both -> [batch, 16]."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["c"], ["y"], name="pool"),
    ]
    inputs: dict[str, Shape] = {"x": ["batch", 16, "height", "width"]}
    return om.save(om.model(nodes, {"w": om.weights(16, 16, 3, 3)}, inputs=inputs), path)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(application(), [str(a) for a in arguments])


@pytest.mark.parametrize("command", ["prune-export-build", "compare"])
def test_no_command_runs_a_file_on_sizes_that_nobody_gave(tmp_path: Path, command: str) -> None:
    path = save(tmp_path / "m.onnx")
    result = invoke(command, path, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "x dimension 2 (height), x dimension 3 (width)" in " ".join(result.stderr.split())
    assert "--input-shape x=8x16x224x224" in " ".join(result.stderr.split())


def test_prune_needs_no_example_and_the_run_goes_on_with_a_shape_by_name(tmp_path: Path) -> None:
    path, out = save(tmp_path / "m.onnx"), tmp_path / "out"
    assert invoke("prune", path, "--out", out, "--quiet").exit_code == 0
    shape = ("--input-shape", "x=2x16x12x20")
    result = invoke("prune-export-build", path, "--out", out, "--quiet", *shape)
    assert result.exit_code == 0, result.output
    with np.load(out / "inputs.npz") as made:
        assert made["x"].shape == (2, 16, 12, 20)
    assert json.loads((out / "run.json").read_text())["input_shape_names"] == ["x"]


def test_the_opt_shape_of_an_engine_is_an_example_shape() -> None:
    profiles = parse_shapes(["x=1x3x8x8:2x3x10x12:4x3x16x16"])
    assert asked_shapes(IMAGE, RunOptions(), profiles) == {"x": (2, 3, 10, 12)}


def test_a_model_that_cannot_run_on_inputs_that_were_made_up_asks_for_real_ones(
    tmp_path: Path,
) -> None:
    """Its second input is a size, which is made up as 0 or 1."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="fc"),
        helper.make_node("Reshape", ["a", "size"], ["y"]),
    ]
    model = om.model(nodes, {"w": om.weights(128, 256)}, inputs={"x": [2, 128]})
    model.graph.input.append(helper.make_tensor_value_info("size", TensorProto.INT64, [1]))
    path = om.save(model, tmp_path / "m.onnx")
    arguments = ["prune-export-build", str(path), "--out", str(tmp_path / "r"), "--engine", ORT]
    failed = CliRunner().invoke(application(), arguments)
    assert failed.exit_code == 5
    note, error = failed.stderr.split("\nerror: ")
    assert "--inputs FILE.npz" in note
    assert "--inputs FILE.npz" in error.partition("hint: ")[2]
    np.savez(tmp_path / "real.npz", x=np.zeros((2, 128), np.float32), size=np.array([512]))
    given = [*arguments, "--inputs", str(tmp_path / "real.npz")]
    assert CliRunner().invoke(application(), given).exit_code == 0


def test_a_batch_that_was_taken_is_said(tmp_path: Path) -> None:
    weight = om.weights(16, 16)
    node = helper.make_node("Gemm", ["x", "w"], ["y"], name="fc", transB=1)
    om.save(om.model([node], {"w": weight}, inputs={"x": ["batch", 16]}), tmp_path / "fc.onnx")
    result = invoke("build", tmp_path / "fc.onnx", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "the batch of x is free in the file; 8 is taken (choose another with --in" in said


SPEECH = tensors(text=("b", "time"), audio=("b", "time", 2), cache=("b", "past"))


@pytest.mark.parametrize(
    ("text", "audio", "words"),
    [
        ((1, 5), (1, 6, 2), "'time' is 5 in text .dimension 1. and 6 in audio"),
        ((1, 5), (1, 5, 3), "audio.* cannot be 1x5x3"),
        ((5,), (1, 5, 2), "text.* cannot be 5"),
        ((0, 5), (0, 5, 2), "text.* has 0 rows"),
    ],
)
def test_arrays_of_a_file_that_do_not_fit_are_refused_by_the_name_of_the_file(
    tmp_path: Path, text: tuple[int, ...], audio: tuple[int, ...], words: str
) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, text=np.ones(text), audio=np.ones(audio), cache=np.ones((1, 0)))
    with pytest.raises(BadInputError, match=f"x.npz: .*{words}"):
        load_inputs(path, SPEECH)


def test_an_empty_cache_fits_and_an_array_that_no_input_takes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    arrays = {"text": np.ones((1, 5)), "audio": np.ones((1, 5, 2)), "cache": np.ones((1, 0))}
    np.savez(path, **arrays)  # type: ignore[arg-type]  # numpy's stub takes them for its options
    load_exact_inputs(path, SPEECH)
    np.savez(path, **arrays, mask=np.ones(1))  # type: ignore[arg-type]  # as above
    with pytest.raises(BadInputError, match=r"contains \['mask'\], which the model does not take"):
        load_exact_inputs(path, SPEECH)


def test_inputs_that_nobody_gives_are_calibration_samples(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    weights = {"w": om.weights(16, 4)}
    inputs: dict[str, list[int | str]] = {"x": ["n", "length", 16]}
    path = om.save(om.model([node], weights, inputs=inputs), tmp_path / "m.onnx")
    data = tmp_path / "data.npz"
    samples = np.arange(1600, dtype=np.float32).reshape(20, 5, 16)
    np.savez(data, x=samples)
    calibration = CalibrationOptions(data=str(data))
    by_data = RunOptions(calibration=calibration, precision=Precision.FLOAT32)
    said: list[list[str]] = []
    for how, shape in (
        (by_data, (8, 5, 16)),
        (replace(by_data, resume=True), (8, 5, 16)),
        (replace(by_data, input_shapes=((2, 7, 16),)), (2, 7, 16)),
    ):
        told = Recorder()
        with open_run(str(path), tmp_path / "run", how, told) as run:
            run.model.export_dense(run)
            made = run.example_inputs()["x"]
            assert made.shape == shape
            assert shape[1] == 7 or np.array_equal(made, samples[:8])
        said.append(told.notes)
    assert said == [
        [
            "the example inputs are calibration samples, which pruning uses too; "
            "--inputs FILE.npz gives others"
        ],
        [],
        [],
    ]
