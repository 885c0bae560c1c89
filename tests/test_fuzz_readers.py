"""Whatever is read from outside ends in a record or in an error that names the file, and soon."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save as save_arrays_safely
from support import fuzzing
from support import onnx_models as om
from support.calibration_data import onnx_model, opened
from support.fuzz_runs import SECONDS, Kind, read_all, try_kind, try_many
from support.rendered import eligibility_table, log_text

from twofour.engines.tensorrt.build import precisions_of
from twofour.errors import naming
from twofour.export.casts import convert_onnx
from twofour.graph.files import parse_model
from twofour.graph.opened import open_onnx
from twofour.logs.read import read_build_log
from twofour.pipeline.evidence import EvidenceFiles
from twofour.pipeline.onnx_inputs import random_inputs
from twofour.pipeline.reporting import report_document, report_files, report_folder
from twofour.pipeline.run import run_all
from twofour.pipeline.sources.inputs import read_arrays
from twofour.pipeline.sources.onnx import OnnxSource
from twofour.pipeline.torch_model import read_checkpoint, save_tensors
from twofour.pipeline.validating import validate_path
from twofour.pruning.onnx_calibration import main_graph, plan_calibration
from twofour.pruning.onnx_file import prune_onnx
from twofour.pruning.permutation.classes import find_classes
from twofour.pruning.selection import choose
from twofour.records.eligibility import EligibilityReport
from twofour.records.latency import LatencyComparison
from twofour.records.options import ExampleInputs, Precision, RunOptions, Selection
from twofour.records.pruning import PruneResult, Validation
from twofour.records.run import RunManifest
from twofour.records.weights import Pattern
from twofour.reports.terminal import plain_text
from twofour.store import read_record, to_json

_LOGS = Path(__file__).parent / "data" / "logs"


def _read_onnx(path: Path) -> None:
    (path.parent / "w.bin").write_bytes(bytes(6000))
    OnnxSource(text=str(path), path=path, options=ExampleInputs()).key()
    readers: tuple[Callable[[], object], ...] = (
        lambda: (open_onnx(path).inputs, open_onnx(path).outputs, open_onnx(path).nodes),
        lambda: precisions_of(parse_model(path)),
        lambda: open_onnx(path).weights(),
        lambda: to_json(validate_path(path, Pattern(2, 4), Selection())),
        lambda: to_json(prune_onnx(open_onnx(path), path.with_name("out.onnx"), Pattern(2, 4))),
        lambda: _shown(report_files(EvidenceFiles(onnx=path))[0]),
    )
    read_all(readers, path)


def _read_plans(path: Path) -> None:
    """What pruning with data, permutation and half precision make of a graph before it is run."""
    (path.parent / "w.bin").write_bytes(bytes(6000))
    pattern = Pattern(2, 4)

    def calibrated() -> None:
        graph = main_graph(open_onnx(path), pattern)
        with naming(path):
            chosen = choose(graph.opened.weights(pattern).weights, pattern, Selection())
            plan_calibration(graph, pattern, chosen)

    def example() -> None:
        random_inputs(open_onnx(path).inputs, seed=0, model=str(path))

    half = path.with_name("half.onnx")
    read_all(
        (
            lambda: find_classes(open_onnx(path), pattern),
            lambda: convert_onnx(open_onnx(path), half, Precision.FLOAT16),
            calibrated,
            example,
        ),
        path,
    )


def _read_json_of_engine(path: Path) -> None:
    read_all(
        (
            lambda: _shown(report_files(EvidenceFiles(layers=path))[0]),
            lambda: report_files(EvidenceFiles(layers=path, profile=path)),
        ),
        path,
    )


def _read_log(path: Path) -> None:
    log = read_build_log(path)
    to_json(log)
    log_text(log)
    read_all((lambda: _shown(report_files(EvidenceFiles(log=path))[0]),), path)


def _read_records(path: Path) -> None:
    kinds = (RunManifest, PruneResult, Validation, EligibilityReport, LatencyComparison)
    read_all([lambda kind=kind: to_json(read_record(kind, path)) for kind in kinds], path)  # type: ignore[misc]


def _shown(report: EligibilityReport) -> None:
    to_json(report)
    plain_text(eligibility_table(report))
    assert report._repr_html_()


def _npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, x=np.ones((2, 8), np.float32), ids=np.zeros((2, 8), np.int64))
    return buffer.getvalue()


def _read_calibration(path: Path) -> None:
    inputs = onnx_model(x=("float32", ("b", "n")), ids=("int64", ("b", "n")))
    read_all((lambda: [batch.samples for batch in opened(path, inputs).batches()],), path)


def _data() -> dict[str, bytes]:
    """Calibration data of every kind of file, by suffix."""
    x, ids = np.ones((12, 8), np.float32), np.zeros((12, 8), np.int64)
    npy = io.BytesIO()
    np.save(npy, x)
    rows = [{"x": [0.5] * 8, "ids": [1] * 8}, {"x": [1.5] * 8, "ids": [2] * 8}]
    return {
        ".npz": _npz(),
        ".npy": npy.getvalue(),
        ".safetensors": save_arrays_safely({"x": x, "ids": ids}),
        ".jsonl": "\n".join(map(json.dumps, rows)).encode(),
    }


def _data_kinds() -> dict[str, Kind]:
    kinds = {
        f"data{suffix}": Kind(suffix, (content,), fuzzing.mutate_bytes, _read_calibration)
        for suffix, content in _data().items()
    }
    members = Kind(".npz", (_npz(),), fuzzing.mutate_npz, _read_calibration)
    return {**kinds, "data.npz members": members}


def _pt() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a.weight": torch.ones(8, 8), "b": {"c.weight": torch.ones(4)}}, buffer)
    return buffer.getvalue()


def _safetensors(folder: Path) -> bytes:
    path = folder / "seed.safetensors"
    save_tensors({"a.weight": torch.ones(8, 8), "b.weight": torch.ones(4, 8).bfloat16()}, path)
    return path.read_bytes()


def _engine_json() -> tuple[bytes, ...]:
    layer = {
        "Name": "conv1 + relu1",
        "LayerType": "CaskConvolution",
        "Inputs": [{"Name": "x", "Dimensions": [1, 8, 9, 9], "Format/Datatype": "Half"}],
        "Outputs": [{"Name": "y", "Dimensions": [1, 8, 9, 9], "Format/Datatype": "Half"}],
        "Weights": {"Type": "Half", "Count": 576},
        "TacticName": "sm80_xmma_fprop_sparse_conv_f16",
        "Metadata": "[ONNX Layer: conv1][ONNX Layer: relu1]",
    }
    profile = [{"count": 10}, {"name": "conv1 + relu1", "timeMs": 1.5, "averageMs": 0.15}]
    documents = ({"Layers": [layer], "Bindings": ["x"]}, {"Layers": ["a", "b"]}, profile)
    return tuple(json.dumps(document).encode() for document in documents)


def _run_folder(folder: Path) -> Path:
    model = om.save(om.two_weights(), folder / "m.onnx")
    run_all(str(model), folder / "run", RunOptions(input_shapes=()))
    return folder / "run"


def _kinds(folder: Path) -> dict[str, Kind]:
    models = tuple(fuzzing.models())
    logs = tuple(path.read_bytes()[:20_000] for path in sorted(_LOGS.glob("*.log")))
    return {
        "onnx": Kind(".onnx", models, fuzzing.mutate_onnx, _read_onnx),
        "onnx-bytes": Kind(".onnx", models, fuzzing.mutate_bytes, _read_onnx),
        "onnx-graph": Kind(".onnx", models, fuzzing.mutate_graph, _read_onnx, 6),
        "onnx-plans": Kind(".onnx", models, fuzzing.mutate_graph, _read_plans, 8),
        "npz": Kind(".npz", (_npz(),), fuzzing.mutate_npz, read_arrays),
        "pt": Kind(".pt", (_pt(),), fuzzing.mutate_bytes, read_checkpoint),
        "pt-members": Kind(".pt", (_pt(),), fuzzing.mutate_npz, read_checkpoint),
        "safetensors": Kind(
            ".safetensors",
            (_safetensors(folder),),
            fuzzing.mutate_bytes,
            lambda path: validate_path(path, None, Selection()),
        ),
        "log": Kind(".log", logs, fuzzing.mutate_bytes, _read_log),
        "engine-json": Kind(".json", _engine_json(), fuzzing.mutate_json, _read_json_of_engine),
        "engine-bytes": Kind(".json", _engine_json(), fuzzing.mutate_bytes, _read_json_of_engine),
        **_data_kinds(),
    }


_NAMES = (
    "onnx", "onnx-bytes", "onnx-graph", "onnx-plans", "npz", "pt", "pt-members", "safetensors",
    "log", "engine-json", "engine-bytes", "data.npz", "data.npz members", "data.npy",
    "data.safetensors", "data.jsonl",
)  # fmt: skip


@pytest.mark.timeout(max(600, 3 * SECONDS))
@pytest.mark.parametrize("name", _NAMES)
def test_a_changed_file_gives_a_record_or_a_clear_error(name: str, tmp_path: Path) -> None:
    try_kind(name, _kinds(tmp_path)[name], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(max(600, 3 * SECONDS))
def test_a_changed_run_folder_gives_a_report_or_a_clear_error(tmp_path: Path) -> None:
    whole = _run_folder(tmp_path)
    records = sorted(p.name for p in whole.glob("*.json"))

    def once(rng: random.Random) -> Path:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        for name in rng.sample(records, rng.randint(1, 3)):
            content = (folder / name).read_bytes()
            mutate = rng.choice((fuzzing.mutate_json, fuzzing.mutate_bytes))
            (folder / name).write_bytes(mutate(rng, content))
        return folder

    def read(folder: Path) -> None:
        for path in folder.glob("*.json"):
            _read_records(path)
        readers: list[Callable[[], object]] = [
            lambda: _shown(report_folder(folder)),
            lambda: validate_path(folder, None, Selection()),
        ]
        if (folder / "eligibility.json").is_file():
            report = folder / "eligibility.json"
            readers.append(lambda: report_document(folder, read_record(EligibilityReport, report)))
        read_all(readers, folder)

    try_many("run-folder", once, read, sample=15)
