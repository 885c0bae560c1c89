"""Models as users have them: tied, printing, reading files, with nothing to prune."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import helper
from support import onnx_models as om
from support.small_run import OPTIONS

from twofour.eligibility.layer_gates import Gates, missed_gates
from twofour.errors import BadInputError, BuildFailedError
from twofour.jobs import run_all, run_export
from twofour.pipeline.validating import validate_path
from twofour.records.eligibility import VerdictName
from twofour.records.options import RunOptions
from twofour.records.weights import ReasonCode, Selection

HEAD = "import json, os, sys, torch\nfrom torch import nn\n"


def _write(path: Path, body: str) -> str:
    path.write_text(HEAD + body)
    return f"{path}:make"


def test_each_layer_of_an_array_along_two_axes_has_its_own_reason(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="m1"),
        helper.make_node("Gemm", ["a", "w"], ["b"], name="m2", transB=1),
        helper.make_node("MatMul", ["b", "v"], ["y"], name="m3"),
    ]
    weights = {name: om.weights(32, 32) for name in "wv"}
    path = om.save(om.model(nodes, weights, inputs={"x": [2, 32]}), tmp_path / "m.onnx")
    with pytest.raises(BadInputError, match=r"share the weight w .*along different") as caught:
        run_all(str(path), tmp_path / "r", OPTIONS)
    assert "leave it dense with --exclude m1" in (caught.value.hint or "")
    options = replace(OPTIONS, selection=Selection(exclude=("m1",)))
    rows = run_all(str(path), tmp_path / "r", options).report.verdicts
    assert [(row.layer, row.reasons[0].message, row.remedy) for row in rows[:2]] == [
        ("m1", "left dense by --exclude m1", "leave it dense, as your options do"),
        (
            "m2",
            "left dense: it shares its array with m1, which is excluded",
            "leave it dense, as your options do",
        ),
    ]
    checks = validate_path(tmp_path / "r", None, Selection()).checks
    assert [check.layer for check in checks] == ["m1", "m2", "m3"]


def test_a_table_tied_to_the_head_is_named_in_the_report(tmp_path: Path) -> None:
    model = _write(
        tmp_path / "head.py",
        "class M(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.emb = nn.Embedding(64, 32)\n"
        "        self.mix = nn.Linear(32, 32)\n"
        "        self.head = nn.Linear(32, 64, bias=False)\n"
        "        self.head.weight = self.emb.weight\n"
        "    def forward(self, ids):\n"
        "        return self.head(self.mix(self.emb(ids)))\n"
        "def make():\n    return M(), torch.zeros(2, 4, dtype=torch.int64)\n",
    )
    result = run_all(model, tmp_path / "r", OPTIONS)
    verdict = next(v for v in result.report.verdicts if v.layer == "head")
    assert verdict.reasons[0].code is ReasonCode.SHARED_WEIGHT
    assert "table of embedding emb" in verdict.reasons[0].message
    assert "--include head" in (verdict.remedy or "")
    assert (verdict.required, verdict.verdict) == (False, VerdictName.NOT_ELIGIBLE)
    assert missed_gates(result.report, Gates(min_eligible=1.0, no_broken=True)) == ()
    asked = replace(OPTIONS, selection=Selection(include=("head",)))
    found = run_all(model, tmp_path / "asked", asked).report.verdicts
    verdict = next(v for v in found if v.layer == "head")
    assert (verdict.required, verdict.verdict) == (True, VerdictName.ELIGIBLE)
    assert [r.code.value for r in verdict.reasons] == ["DTYPE", "SMALL_CHANNELS", "SHARED_WEIGHT"]


def test_a_frozen_layer_of_a_trained_model_stays_dense_and_the_report_says_why(
    tmp_path: Path,
) -> None:
    model = _write(
        tmp_path / "frozen.py",
        "def make():\n"
        "    torch.manual_seed(0)\n"
        "    frozen = nn.Linear(320, 32, bias=False).requires_grad_(False)\n"
        "    layers = nn.Linear(320, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 320), frozen\n"
        "    return nn.Sequential(*layers).eval(), torch.randn(2, 320)\n",
    )
    result = run_all(model, tmp_path / "r", OPTIONS)
    assert [(row.weight.layer, row.pruned) for row in result.prune.weights][-1] == ("3", False)
    row = result.report.verdicts[-1]
    assert (row.reasons[0].code, row.required) == (ReasonCode.FROZEN, False)
    assert row.remedy == "leave it dense, or prune it all the same with --include 3"
    alone = shutil.copytree(tmp_path / "r", tmp_path / "alone")
    (alone / "run.json").unlink()
    assert validate_path(alone / "sparse.onnx", None, Selection()).broken == ()


def test_a_scale_without_axes_and_a_mask_of_padding_are_exported(tmp_path: Path) -> None:
    source = tmp_path / "masked.py"
    source.write_text(
        """
import torch
from torch import nn

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder, self.scale = nn.TransformerEncoder(layer, 1), nn.Parameter(torch.tensor(2.5))

    def forward(self, x):
        return self.scale * self.encoder(x, src_key_padding_mask=x.abs().sum(-1) == 0)

def make():
    torch.manual_seed(0)
    x = torch.randn(2, 6, 32)
    x[1, 4:] = 0
    return Masked().eval(), x
"""
    )
    result = run_all(f"{source}:make", tmp_path / "run", RunOptions())
    assert sum(row.pruned for row in result.prune.weights) == 4


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        ("sys.exit('bye')", "SystemExit: bye"),
        ("raise ValueError('long ' * 100000)", "ValueError: long long"),
        ("return None", "returns no tensor"),
        ("return 'text'", "returns a str"),
    ],
)
def test_a_forward_that_gives_nothing_usable_is_a_short_clear_error(
    tmp_path: Path, forward: str, words: str
) -> None:
    model = _write(
        tmp_path / "odd.py",
        f"class M(nn.Linear):\n    def forward(self, x):\n        {forward}\n"
        "def make():\n    return M(32, 32), torch.randn(2, 32)\n",
    )
    with pytest.raises(BadInputError) as caught:
        run_all(model, tmp_path / "r", OPTIONS)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("nn.Sequential(nn.ReLU(), nn.LayerNorm(16))", "has no layer that could be pruned"),
        ("nn.Linear(6, 16)", "AXIS_NOT_MULTIPLE 1"),
        pytest.param(
            "nn.GRU(16, 48)",
            r"could be pruned; not covered: 9,216 weights in GRU \(1\)",
            marks=pytest.mark.skipif(
                torch.__version__ < "2.9", reason="torch 2.8 traces a GRU for one batch size"
            ),
        ),
    ],
)
def test_a_model_with_nothing_to_prune_says_why(tmp_path: Path, model: str, words: str) -> None:
    width = 6 if "Linear(6" in model else 16
    text = _write(
        tmp_path / "nothing.py", f"def make():\n    return {model}, torch.randn(2, {width})\n"
    )
    with pytest.raises(BadInputError, match=words):
        run_all(text, tmp_path / "r", OPTIONS)


def test_user_code_that_changes_the_folder_does_not_move_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    model = _write(
        tmp_path / "moves.py",
        "def make():\n"
        f"    os.chdir({str(tmp_path / 'elsewhere')!r})\n"
        "    return nn.Linear(32, 32), torch.randn(2, 32)\n",
    )
    result = run_all(model, Path("r"), OPTIONS)
    assert result.folder == "r"
    assert (tmp_path / "r" / "eligibility.json").is_file()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_nan_outputs_are_not_called_agreement(tmp_path: Path) -> None:
    model = _write(
        tmp_path / "nan.py",
        "class M(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return (super().forward(x) - 1e9).sqrt()\n"
        "def make():\n    return M(32, 32), torch.randn(2, 32)\n",
    )
    result = run_all(model, tmp_path / "r", OPTIONS)
    (drift,) = result.accuracy.drift
    assert np.isnan(drift.cosine)
    assert drift.not_finite == 2 * 32


def test_an_error_names_the_onnx_file_that_the_user_gave(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["t"]),
        helper.make_node("Reshape", ["t", "shape"], ["y"]),
    ]
    arrays = {"w": om.weights(16, 16), "shape": np.array([7, 5], np.int64)}
    model = om.model(nodes, arrays, inputs={"x": ("batch", 16)})
    source = om.save(model, tmp_path / "model.onnx")
    folder = tmp_path / "r"
    words = f"while running {source} ({folder / 'dense.onnx'}): "
    with pytest.raises(BuildFailedError, match=re.escape(words)):
        run_export(str(source), folder, OPTIONS)
