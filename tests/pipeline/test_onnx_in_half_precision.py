"""The commands on a float32 ONNX file with --precision: converted, compared, and told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.onnx_models import conv, model, quantized_conv, tensor, two_weights, weights
from support.small_run import Recorder
from typer.testing import CliRunner

from twofour.cli import application
from twofour.errors import BadInputError
from twofour.inputs.fits import stored_arrays
from twofour.jobs import run_all, run_build, run_export, run_prune
from twofour.pipeline.emitting import emit_trtexec
from twofour.records.eligibility import VerdictName
from twofour.records.export import LayerMap
from twofour.records.options import (
    AllowedType,
    BuildOptions,
    CalibrationOptions,
    Precision,
    RunOptions,
)
from twofour.records.weights import ReasonCode
from twofour.store import read_record

runner = CliRunner()


def saved(path: Path, proto: onnx.ModelProto) -> str:
    onnx.save(proto, path)
    return str(path)


def wide() -> onnx.ModelProto:
    return conv(weights(256, 256, 3, 3) / 50)


def overflowing(large: int = 60000) -> onnx.ModelProto:
    """Every constant fits float16, and the product does not."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="fc"),
        helper.make_node("Mul", ["h", "large"], ["y"], name="scale"),
    ]
    constants = {"w": weights(32, 32), "large": np.array([large], np.float32)}
    return model(nodes, constants, inputs={"x": ["n", 32]})


def types(path: Path) -> set[int]:
    return {
        tensor.data_type for tensor in onnx.load(path, load_external_data=False).graph.initializer
    }


def test_a_float32_file_is_converted_unless_float32_is_asked_for(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.onnx", wide())
    kept = run_all(source, tmp_path / "kept", RunOptions(precision=Precision.FLOAT32))
    assert [v.reasons[0].code for v in kept.report.verdicts] == [ReasonCode.DTYPE]
    assert "--precision float16" in (kept.report.verdicts[0].remedy or "")
    assert types(tmp_path / "kept" / "sparse.onnx") == {TensorProto.FLOAT}
    progress = Recorder()
    result = run_all(source, tmp_path / "run", RunOptions(), progress)
    assert [(v.layer, v.verdict) for v in result.report.verdicts] == [
        ("conv", VerdictName.ELIGIBLE)
    ]
    assert [r.code for r in result.report.verdicts[0].reasons] == [ReasonCode.QUALIFIES]
    assert result.export.precision is Precision.FLOAT16
    assert {t.dtype for t in (*result.export.inputs, *result.export.outputs)} == {"float32"}
    assert types(tmp_path / "run" / "sparse.onnx") == {TensorProto.FLOAT16}
    (said,) = (note for note in progress.notes if note.startswith("m.onnx: float32 converted to"))
    assert said in result.report.notes
    assert said in result.export.notes
    dense, sparse = result.export.files
    assert [row.output for row in dense.agreement] == ["y"]
    assert dense.agreement[0].cosine > 0.9999
    assert dense.agreement[0].bound is not None
    assert sparse.agreement == ()
    # accuracy is that of the file as it came
    came = stored_arrays(tmp_path / "run" / "stages" / "reference-dense.npz")["y"]
    pruned = stored_arrays(tmp_path / "run" / "stages" / "outputs-sparse.npz")["y"]
    assert result.accuracy.drift[0].max_abs_error == float(np.abs(pruned - came).max())


def half(model: onnx.ModelProto, kind: str) -> onnx.ModelProto:
    """The model with a weight in another type, which a node makes float32 again."""
    weight = numpy_helper.to_array(model.graph.initializer[0])
    model.graph.initializer[0].CopyFrom(tensor("w16", weight.astype(np.dtype(kind))))
    cast = helper.make_node("Cast", ["w16"], [model.graph.node[0].input[1]], to=TensorProto.FLOAT)
    model.graph.node.insert(0, cast)
    return model


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "int8"])
def test_a_file_in_another_type_keeps_its_types(kind: str, tmp_path: Path) -> None:
    made = quantized_conv(weights(8, 8, 3, 3, dtype=np.int8), zero_point=None, quantize_output=True)
    if kind != "int8":
        made = half(wide(), kind)
    path, _, _ = run_export(saved(tmp_path / "m.onnx", made), tmp_path / "r", RunOptions())
    assert onnx.load(path / "dense.onnx") == made


@pytest.mark.parametrize("job", ["prune", "build", "fp16"])
def test_what_does_not_export_keeps_the_types_of_a_file(job: str, tmp_path: Path) -> None:
    source, folder = saved(tmp_path / "m.onnx", wide()), tmp_path / "r"
    if job == "prune":
        run_prune(source, folder, RunOptions())
    elif job == "build":
        run_build(Path(source), folder, RunOptions())
    else:
        run_all(source, folder, RunOptions(build=BuildOptions(allow=(AllowedType.FP16,))))
    assert types(folder / "dense.onnx") == {TensorProto.FLOAT}


def test_what_overflows_on_the_example_inputs_keeps_float32_and_is_named(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.onnx", overflowing())
    path, exported, checked = run_export(source, tmp_path / "r", RunOptions())
    said = "1 node kept in float32, because values do not fit float16: scale"
    assert said in exported.notes
    assert exported.too_large == ("y",)
    assert checked.agreement[0].within
    found = {t.name: t.data_type for t in onnx.load(path / "dense.onnx").graph.initializer}
    assert found == {"w": TensorProto.FLOAT16, "large": TensorProto.FLOAT}
    again = Recorder()
    run_export(source, tmp_path / "r", RunOptions(resume=True), again)
    assert again.did == []
    _, kept, _ = run_export(source, tmp_path / "k", RunOptions(keep_float32=("scale",)))
    assert (kept.too_large, said in kept.notes) == ((), False)


def test_what_overflows_on_late_calibration_samples_alone_keeps_float32(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.onnx", overflowing(1000))
    samples = np.random.default_rng(0).normal(size=(40, 32)).astype(np.float32)
    samples[30] *= 1000
    np.savez(tmp_path / "x.npz", x=samples)
    data = CalibrationOptions(data=str(tmp_path / "x.npz"))
    result = run_all(source, tmp_path / "r", RunOptions(calibration=data))
    said = "1 node kept in float32, because values do not fit float16: scale"
    assert said in result.export.notes


MODULE = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    def forward(self, x):
        return CALL
def make():
    torch.manual_seed(0)
    net = Net().eval()
    SETUP
    return net, torch.ones(2, 64)
"""


@pytest.mark.parametrize(
    ("call", "setup"),
    [
        ("self.two(self.one(x))", "net.two.weight.data.fill_(1e5)"),
        ("self.two(self.one(x) * 6e4 * 100).tanh()", ""),
    ],
    ids=["weight", "activation"],
)
def test_what_float16_cannot_hold_of_a_module_keeps_float32_in_both_files(
    call: str, setup: str, tmp_path: Path
) -> None:
    code = tmp_path / "large.py"
    code.write_text(MODULE.replace("CALL", call).replace("SETUP", setup))
    result = run_all(f"{code}:make", tmp_path / "r", RunOptions())
    (said,) = (note for note in result.export.notes if "do not fit float16" in note)
    assert said in result.report.notes
    layers = read_record(LayerMap, tmp_path / "r" / "layers.json").layers
    names = {row.initializer: row.parameter for row in layers}
    for file in ("dense.onnx", "sparse.onnx"):
        made = onnx.load(tmp_path / "r" / file).graph.initializer
        kinds = {names[t.name]: t.data_type for t in made if t.name in names}
        half, single = TensorProto.FLOAT16, TensorProto.FLOAT
        assert kinds == {"one.weight": half, "two.weight": single}


def test_a_precision_has_several_words_and_another_is_refused_with_them(tmp_path: Path) -> None:
    words = {"fp16": "float16", "half": "float16", "BF16": "bfloat16", "fp32": "float32"}
    assert {word: Precision(word).value for word in words} == words
    source = saved(tmp_path / "m.onnx", two_weights())
    done = runner.invoke(application(), ["export", source, "--precision", "int4"])
    assert done.exit_code == 2
    assert "float16 (fp16, half)" in " ".join(done.output.split())


def test_keep_float32_without_a_precision_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.onnx", two_weights())
    options = RunOptions(precision=Precision.FLOAT32, keep_float32=("fc",))
    with pytest.raises(BadInputError, match="--keep-float32 needs a change of precision"):
        run_all(source, tmp_path / "r", options)
    with pytest.raises(BadInputError, match="--keep-float32 needs a change of precision"):
        emit_trtexec(Path(source), tmp_path / "e", RunOptions(keep_float32=("fc",)), "10.3")


def test_a_float32_file_may_be_built_with_fp16_allowed_elsewhere(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.onnx", two_weights())
    command = ["build", source, "--emit-trtexec", str(tmp_path / "e"), "--fp16", "--int8"]
    done = runner.invoke(application(), [*command, "--tensorrt-version", "10.3"])
    assert done.exit_code == 0, done.output
    script = (tmp_path / "e" / "build.sh").read_text()
    assert "--fp16" in script
    assert "--stronglyTyped" not in script
    assert types(tmp_path / "e" / "sparse.onnx") == {TensorProto.FLOAT}
    assert "from TensorRT 10.12 on" in done.output
    assert "has no Q/DQ nodes" in done.output


def test_fp16_here_is_said_to_be_of_tensorrt_alone(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.onnx", two_weights())
    done = runner.invoke(application(), ["build", source, "--fp16", "--out", str(tmp_path / "r")])
    assert done.exit_code == 0, done.output
    assert "no effect with onnxruntime" in done.output
