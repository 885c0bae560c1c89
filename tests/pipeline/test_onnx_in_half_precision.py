"""The commands on a float32 ONNX file with --precision: converted, compared, and told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.float32_models import masked
from support.onnx_models import conv, model, two_weights, weights
from typer.testing import CliRunner

from twofour.cli import application
from twofour.errors import BadInputError
from twofour.inputs.fits import save_arrays
from twofour.main_job import run_all, run_export
from twofour.pipeline.emitting import emit_trtexec
from twofour.records.eligibility import EligibilityReport, VerdictName
from twofour.records.export import ExportResult
from twofour.records.options import Precision, RunOptions
from twofour.records.weights import ReasonCode
from twofour.store import read_record

HALF = RunOptions(precision=Precision.FLOAT16)
runner = CliRunner()


def saved(path: Path, proto: onnx.ModelProto) -> str:
    onnx.save(proto, path)
    return str(path)


def wide() -> onnx.ModelProto:
    return conv(weights(256, 256, 3, 3) / 50)


def overflowing() -> onnx.ModelProto:
    """Every constant fits float16, and the product does not."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="fc"),
        helper.make_node("Mul", ["h", "large"], ["y"], name="scale"),
    ]
    constants = {"w": weights(16, 16), "large": np.float32(60000)}
    return model(
        nodes, {**constants, "large": np.array([60000], np.float32)}, inputs={"x": [4, 16]}
    )


def types(path: Path) -> set[int]:
    return {
        tensor.data_type for tensor in onnx.load(path, load_external_data=False).graph.initializer
    }


def test_the_remedy_of_a_float32_report_leads_to_layers_that_can_run_sparse(
    tmp_path: Path,
) -> None:
    source = saved(tmp_path / "m.onnx", wide())
    before = run_all(source, tmp_path / "float32", RunOptions())
    assert [v.reasons[0].code for v in before.report.verdicts] == [ReasonCode.DTYPE]
    assert "--precision float16" in (before.report.verdicts[0].remedy or "")
    after = run_all(source, tmp_path / "float16", HALF)
    assert [(v.layer, v.verdict) for v in after.report.verdicts] == [("conv", VerdictName.ELIGIBLE)]
    assert [r.code for r in after.report.verdicts[0].reasons] == [ReasonCode.QUALIFIES]
    assert after.export.precision is Precision.FLOAT16
    assert types(tmp_path / "float16" / "sparse.onnx") == {TensorProto.FLOAT16}
    dense, sparse = after.export.files
    assert [row.output for row in dense.agreement] == ["y"]
    assert dense.agreement[0].cosine > 0.9999
    assert dense.agreement[0].bound is not None
    assert sparse.agreement == ()


def test_inputs_and_outputs_of_the_file_stay_float32(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.onnx", two_weights())
    result = run_all(source, tmp_path / "r", HALF)
    assert [(t.name, t.dtype) for t in result.export.inputs] == [("x", "float32")]
    assert [(t.name, t.dtype) for t in result.export.outputs] == [("y", "float32")]


def test_a_second_run_in_another_precision_converts_anew(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.onnx", two_weights())
    run_all(source, tmp_path / "r", HALF)
    run_all(source, tmp_path / "r", RunOptions())
    assert types(tmp_path / "r" / "sparse.onnx") == {TensorProto.FLOAT}


def test_a_tensor_that_overflows_on_the_example_inputs_is_refused_by_name(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.onnx", overflowing())
    with pytest.raises(
        BadInputError, match=r"tensor 'y' reaches \S+ on the example inputs"
    ) as told:
        run_export(source, tmp_path / "r", HALF)
    assert (told.value.hint or "").endswith("makes and uses it: --keep-float32 'scale'")
    kept = RunOptions(precision=Precision.FLOAT16, keep_float32=("scale",))
    _, exported, checked = run_export(source, tmp_path / "r", kept)
    assert exported.precision is Precision.FLOAT16
    assert checked.agreement[0].within


def test_the_node_of_a_torch_model_that_float16_cannot_hold_is_left_in_float32(
    tmp_path: Path,
) -> None:
    code = tmp_path / "large.py"
    code.write_text(
        "import torch\n"
        "def make():\n"
        "    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))\n"
        "    net[1].weight.data.fill_(1e5)\n"
        "    return net, torch.ones(2, 16)\n"
    )
    with pytest.raises(BadInputError, match="does not fit float16") as told:
        run_export(f"{code}:make", tmp_path / "r", HALF)
    _, node, _ = (told.value.hint or "").split("'")
    kept = RunOptions(precision=Precision.FLOAT16, keep_float32=(node,))
    run_export(f"{code}:make", tmp_path / "r", kept)
    assert types(tmp_path / "r" / "dense.onnx") == {TensorProto.FLOAT16, TensorProto.FLOAT}


@pytest.mark.parametrize(
    ("word", "expected"),
    [("fp16", "float16"), ("half", "float16"), ("BF16", "bfloat16"), ("fp32", "float32")],
)
def test_other_words_for_a_precision_are_understood(word: str, expected: str) -> None:
    assert Precision(word).value == expected


def test_a_word_that_is_no_precision_is_refused_with_those_that_are(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.onnx", two_weights())
    done = runner.invoke(application(), ["export", source, "--precision", "int4"])
    assert done.exit_code == 2
    assert "float16 (fp16, half)" in " ".join(done.output.split())


def test_keep_float32_without_a_precision_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.onnx", two_weights())
    with pytest.raises(BadInputError, match="--keep-float32 needs a change of precision"):
        run_all(source, tmp_path / "r", RunOptions(keep_float32=("fc",)))
    with pytest.raises(BadInputError, match="--keep-float32 needs a change of precision"):
        emit_trtexec(Path(source), tmp_path / "e", RunOptions(keep_float32=("fc",)), "10.3")


def test_the_records_say_what_was_done(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.onnx", two_weights())
    run_all(source, tmp_path / "r", HALF)
    assert read_record(ExportResult, tmp_path / "r" / "export.json").precision is Precision.FLOAT16
    report = read_record(EligibilityReport, tmp_path / "r" / "eligibility.json")
    assert {v.dtype for v in report.verdicts} == {"float16"}


def test_a_float32_file_may_be_built_with_fp16_allowed_elsewhere(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.onnx", two_weights())
    command = ["build", source, "--emit-trtexec", str(tmp_path / "e"), "--fp16", "--int8"]
    done = runner.invoke(application(), [*command, "--tensorrt-version", "10.3"])
    assert done.exit_code == 0, done.output
    script = (tmp_path / "e" / "build.sh").read_text()
    assert "--fp16" in script
    assert "--stronglyTyped" not in script
    assert types(tmp_path / "e" / "sparse.onnx") == {TensorProto.FLOAT}
    assert "deprecated from TensorRT 10.12 on" in done.output
    assert "has no Q/DQ nodes" in done.output


def test_fp16_here_is_said_to_be_of_tensorrt_alone(tmp_path: Path) -> None:
    source = saved(tmp_path / "m.onnx", two_weights())
    done = runner.invoke(application(), ["build", source, "--fp16", "--out", str(tmp_path / "r")])
    assert done.exit_code == 0, done.output
    assert "--fp16: no effect with onnxruntime" in done.output


def test_a_mask_of_the_lowest_float32_is_no_overflow(tmp_path: Path) -> None:
    masked_model, feed = masked()
    source = saved(tmp_path / "m.onnx", masked_model)
    save_arrays(tmp_path / "in.npz", feed)
    options = RunOptions(precision=Precision.FLOAT16, inputs=str(tmp_path / "in.npz"))
    _, _, checked = run_export(source, tmp_path / "r", options)
    assert all(row.cosine > 0.999 for row in checked.agreement)
