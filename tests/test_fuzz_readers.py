"""Whatever is read from outside ends in a record or in an error that names the file, and soon."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save as save_arrays_safely
from support import fuzzing
from support import onnx_models as om
from support.calibration_data import onnx_model, opened
from support.rendered import eligibility_table, log_text

from twofour.engines.tensorrt.build import precisions_of
from twofour.errors import BadInputError, TwofourError
from twofour.graph.files import parse_model
from twofour.graph.opened import open_onnx
from twofour.logs.read import read_build_log
from twofour.pipeline.evidence import EvidenceFiles
from twofour.pipeline.reporting import report_document, report_files, report_folder
from twofour.pipeline.run import run_all
from twofour.pipeline.sources.inputs import read_arrays
from twofour.pipeline.sources.onnx import OnnxSource
from twofour.pipeline.torch_model import read_checkpoint, save_tensors
from twofour.pipeline.validating import validate_path
from twofour.pruning.onnx_file import prune_onnx
from twofour.records.eligibility import EligibilityReport
from twofour.records.latency import LatencyComparison
from twofour.records.options import ExampleInputs, RunOptions, Selection
from twofour.records.pruning import PruneResult, Validation
from twofour.records.run import RunManifest
from twofour.records.weights import Pattern
from twofour.reports.terminal import plain_text
from twofour.store import read_record, to_json

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
"""How long `make fuzz` goes on with every kind; 0: a bounded sample, the same each time."""
_SAMPLE = 40
_LONGEST_S = 10.0
_MOST_BYTES = 512 << 20
_KEPT = Path("build/fuzz")
_LOGS = Path(__file__).parent / "data" / "logs"


@dataclass(frozen=True)
class Kind:
    """One kind of file: valid examples, how to change them, and everything that reads them."""

    suffix: str
    seeds: tuple[bytes, ...]
    mutate: fuzzing.Mutate
    read: Callable[[Path], object]


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
    _all(readers, path)


def _read_json_of_engine(path: Path) -> None:
    _all(
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
    _all((lambda: _shown(report_files(EvidenceFiles(log=path))[0]),), path)


def _read_records(path: Path) -> None:
    kinds = (RunManifest, PruneResult, Validation, EligibilityReport, LatencyComparison)
    _all([lambda kind=kind: to_json(read_record(kind, path)) for kind in kinds], path)  # type: ignore[misc]


def _shown(report: EligibilityReport) -> None:
    to_json(report)
    plain_text(eligibility_table(report))
    assert report._repr_html_()


def _all(readers: Sequence[Callable[[], object]], path: Path) -> None:
    """Each may refuse, and must name the file then."""
    for read in readers:
        try:
            read()
        except TwofourError as error:
            if isinstance(error, BadInputError) and path.name not in str(error):
                raise AssertionError(f"the file is not named: {error}") from error


def _npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, x=np.ones((2, 8), np.float32), ids=np.zeros((2, 8), np.int64))
    return buffer.getvalue()


def _read_calibration(path: Path) -> None:
    inputs = onnx_model(x=("float32", ("b", "n")), ids=("int64", ("b", "n")))
    _all((lambda: [batch.samples for batch in opened(path, inputs).batches()],), path)


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
    logs = tuple(path.read_bytes()[:20_000] for path in sorted(_LOGS.glob("*.log")))
    return {
        "onnx": Kind(".onnx", tuple(fuzzing.models()), fuzzing.mutate_onnx, _read_onnx),
        "onnx-bytes": Kind(".onnx", tuple(fuzzing.models()), fuzzing.mutate_bytes, _read_onnx),
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
    "onnx", "onnx-bytes", "npz", "pt", "pt-members", "safetensors", "log", "engine-json",
    "engine-bytes", "data.npz", "data.npz members", "data.npy", "data.safetensors", "data.jsonl",
)  # fmt: skip


@pytest.mark.timeout(max(600, 3 * SECONDS))
@pytest.mark.parametrize("name", _NAMES)
def test_a_changed_file_gives_a_record_or_a_clear_error(name: str, tmp_path: Path) -> None:
    kind = _kinds(tmp_path)[name]

    def once(rng: random.Random) -> Path:
        path = tmp_path / f"m{kind.suffix}"
        path.write_bytes(kind.mutate(rng, rng.choice(kind.seeds)))
        return path

    _try(name, once, kind.read)


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
        _all(readers, folder)

    _try("run-folder", once, read, sample=15)


def _try(
    name: str,
    once: Callable[[random.Random], Path],
    read: Callable[[Path], object],
    sample: int = _SAMPLE,
) -> None:
    """A sample, or as many as the time allows; what fails is kept and told of at the end."""
    first = time.time_ns() if SECONDS else 0
    ends = time.monotonic() + SECONDS
    failures: dict[str, str] = {}
    number = 0
    while time.monotonic() < ends if SECONDS else number < sample:
        path = once(random.Random(first + number))
        number += 1
        problem = _problem(read, path)
        if problem is not None and problem not in failures:
            failures[problem] = _keep(path, f"{name}-{first + number}")
    told = "\n".join(f"{problem}: {kept}" for problem, kept in failures.items())
    assert not failures, f"{len(failures)} kinds of failure in {number} {name} files:\n{told}"


def _problem(read: Callable[[Path], object], path: Path) -> str | None:
    """What is wrong with how the file was read: where in our code, for telling kinds apart."""
    started, before = time.monotonic(), _peak_bytes()
    try:
        read(path)
    except TwofourError as error:
        if path.name not in str(error):
            return f"the file is not named: {str(error)[:80]}"
    except Exception as error:  # noqa: BLE001  # the point of this test
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "twofour" in f.filename] or frames
        return f"{type(error).__name__} in {ours[-1].filename}:{ours[-1].lineno} {str(error)[:80]}"
    took, grown = time.monotonic() - started, _peak_bytes() - before
    if took > _LONGEST_S:
        return f"over {_LONGEST_S} s"
    return f"over {_MOST_BYTES} bytes" if grown > _MOST_BYTES else None


def _keep(path: Path, name: str) -> str:
    _KEPT.mkdir(parents=True, exist_ok=True)
    target = _KEPT / f"{name}{path.suffix}"
    if path.is_dir():
        shutil.copytree(path, target, dirs_exist_ok=True)
    else:
        shutil.copyfile(path, target)
    return str(target)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
