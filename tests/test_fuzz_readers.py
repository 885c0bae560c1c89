"""Whatever is read from outside ends in a record or in an error that names the file, and soon."""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save as save_safely
from support import fuzzing
from support.calibration_data import onnx_model, opened
from support.fuzzing import SECONDS, Kind, Mutate, read_all, try_kind, try_many
from support.rendered import log_text, to_table

from twofour.calibrate.layer_plan import main_graph, plan_calibration
from twofour.engines.tensorrt.bindings import precisions_of
from twofour.errors import BadInputError, naming
from twofour.export.casts import Kept, convert_onnx
from twofour.graph.opened import open_onnx, parse_model
from twofour.inputs.examples import random_inputs
from twofour.inputs.fits import read_arrays
from twofour.logs.read import read_build_log
from twofour.pipeline.emitting import read_trtexec_times
from twofour.pipeline.evidence_files import EvidenceFiles, read_layer_names
from twofour.pipeline.reporting import report_files
from twofour.pipeline.validating import validate_path
from twofour.pruning.onnx import prune_onnx
from twofour.pruning.selection import choose, read_layers
from twofour.records.eligibility import EligibilityReport
from twofour.records.export import LayerMap
from twofour.records.options import ExampleInputs, Precision
from twofour.records.run import RunManifest
from twofour.records.weights import Pattern, Selection
from twofour.reports.terminal import plain_text
from twofour.sources.checkpoint import read_checkpoint, read_sentences
from twofour.sources.checkpoint import read_state_dict as read_tensors
from twofour.sources.source import OnnxSource
from twofour.store import read_options, read_record, to_json

_LOGS = Path(__file__).parent / "data" / "logs"
_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##c")
_PATTERN = Pattern(2, 4)


def _read_onnx(path: Path) -> None:
    """All that is made of a graph before it is run."""
    (path.parent / "w.bin").write_bytes(bytes(6000))
    OnnxSource(text=str(path), path=path, options=ExampleInputs()).key()

    def calibrated() -> None:
        graph = main_graph(open_onnx(path))
        with naming(path):
            chosen = choose(graph.opened.weights().weights, _PATTERN, Selection())
            plan_calibration(graph, _PATTERN, chosen)

    half, out = path.with_name("half.onnx"), path.with_name("out.onnx")
    readers: tuple[Callable[[], object], ...] = (
        lambda: (open_onnx(path).inputs, open_onnx(path).outputs, open_onnx(path).nodes),
        lambda: precisions_of(parse_model(path)),
        lambda: to_json(validate_path(path, _PATTERN, Selection())),
        lambda: to_json(prune_onnx(open_onnx(path), out, _PATTERN)),
        lambda: _shown(report_files(EvidenceFiles(onnx=path)).report),
        lambda: convert_onnx(open_onnx(path), half, Precision.FLOAT16, Kept()),
        calibrated,
        lambda: random_inputs(open_onnx(path).inputs, seed=0, model=str(path)),
    )
    read_all(readers, path)


def _either(*ways: Mutate) -> Mutate:
    return lambda rng, content: rng.choice(ways)(rng, content)


_flip = fuzzing.mutate_bytes
_mutate_onnx = _either(fuzzing.mutate_onnx, _flip, fuzzing.mutate_graph, fuzzing.mutate_graph)
_mutate_text = _either(fuzzing.mutate_json, _flip)
_mutate_zip = _either(fuzzing.mutate_npz, _flip)


def _read_json_of_engine(path: Path) -> None:
    alone, timed = EvidenceFiles(layers=path), EvidenceFiles(layers=path, profile=path)
    read_all((lambda: _shown(report_files(alone).report), lambda: report_files(timed)), path)


def _read_log(path: Path) -> None:
    log = read_build_log(path)
    to_json(log)
    log_text(log)
    read_all((lambda: _shown(report_files(EvidenceFiles(log=path)).report),), path)


def _shown(report: EligibilityReport) -> None:
    to_json(report)
    plain_text(to_table(report))


def _npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, x=np.ones((2, 8), np.float32), ids=np.zeros((2, 8), np.int64))
    return buffer.getvalue()


def _read_calibration(path: Path) -> None:
    inputs = onnx_model(x=("float32", ("b", "n")), ids=("int64", ("b", "n")))
    read_all((lambda: [batch.samples for batch in opened(path, inputs).batches()],), path)


def _pt() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a.weight": torch.ones(8, 8), "b": {"c.weight": torch.ones(4)}}, buffer)
    return buffer.getvalue()


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


def _image(kind: str) -> bytes:
    made = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (12, 10, 3), np.uint8)
    Image.fromarray(pixels).save(made, kind)
    return made.getvalue()


def _read_image(path: Path) -> None:
    """In a folder of its own, beside a whole one: what is damaged is left out and named."""
    folder = path.parent / "images"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copy(path, folder)
    (folder / "whole.png").write_bytes(_image("PNG"))
    inputs = onnx_model(x=("float32", ("b", 3, 8, 8)))
    found = opened(folder, inputs, image_mean=(0.5,), image_std=(0.5,))
    assert [batch.samples for batch in found.batches()] == [found.samples]
    assert found.samples == 2 or path.name in str(found.notes)


def _read_text(path: Path) -> None:
    read_all((lambda: read_layers(path, Selection()), lambda: read_sentences(path)), path)
    read_all((lambda: read_layer_names(path),), path)


def _read_json(path: Path) -> None:
    """A record, times of trtexec, names of layers."""
    for kind in (RunManifest, LayerMap):
        read_all((lambda kind=kind: to_json(read_record(kind, path)),), path)  # type: ignore[misc]
    read_all((lambda: read_trtexec_times(path, warmup_ms=0), lambda: read_layer_names(path)), path)


def _notebook() -> bytes:
    lines = ["[V] [TRT] (Sparsity) Found 1 layer(s) eligible to use sparse tactics: a\n"]
    outputs = [{"output_type": "stream", "text": lines}, {"data": {"text/plain": lines}}]
    return json.dumps({"nbformat": 4, "cells": [{"outputs": outputs}]}).encode()


def _times() -> bytes:
    rows = [
        {"startComputeMs": 300.0 + i, "endComputeMs": 301.0 + i, "computeMs": 1.0} for i in range(5)
    ]
    return json.dumps(rows).encode()


_TEXT = b"# left dense\nlayer*  # a comment\n+fc[12].w\nengine,layer\na,b\nL4,FP16,64,64,64,1.5,1\n"
_OPTIONS = (
    b'seed = 3\nprecision = "float16"\n[calibration]\ndata = "x.npz"\nsamples = 7\n'
    b'[[build.shapes]]\ninput = "x"\nmin = [1]\nopt = [8]\nmax = [8]\n'
)
_ENGINE_NAMES = b'{"engine a": "layer", "engine b": ["x", "y"]}'
_TENSORS = {"a.weight": torch.ones(8, 8), "b.weight": torch.ones(4, 8).bfloat16()}
_LOG_SEEDS = tuple(path.read_bytes()[:20_000] for path in sorted(_LOGS.glob("*.log")))
_KINDS = {
    "model": Kind(".onnx", tuple(fuzzing.models()), _mutate_onnx, _read_onnx, 24),
    "arrays": Kind(".npz", (_npz(),), _mutate_zip, read_arrays),
    "calibration": Kind(".npz", (_npz(),), _mutate_zip, _read_calibration),
    "torch file": Kind(".pt", (_pt(),), _mutate_zip, read_tensors),
    "safetensors": Kind(
        ".safetensors",
        (save_safely(_TENSORS),),
        _flip,
        lambda path: validate_path(path, None, Selection()),
    ),
    "image": Kind(".png", tuple(map(_image, ("PNG", "JPEG", "GIF"))), _flip, _read_image, 8),
    "log": Kind(".log", (*_LOG_SEEDS, gzip.compress(_LOG_SEEDS[0]), _notebook()), _flip, _read_log),
    "engine JSON": Kind(".json", _engine_json(), _mutate_text, _read_json_of_engine),
    "JSON beside": Kind(
        ".json",
        (_times(), _ENGINE_NAMES),
        _mutate_text,
        _read_json,
    ),
    "text": Kind(".txt", (_TEXT,), _flip, _read_text),
    "options": Kind(".toml", (_OPTIONS,), _flip, read_options),
}


@pytest.mark.timeout(max(600, 3 * SECONDS))
@pytest.mark.parametrize("name", _KINDS)
def test_a_changed_file_gives_a_record_or_a_clear_error(name: str, tmp_path: Path) -> None:
    try_kind(name, _KINDS[name], tmp_path)


def _checkpoint(folder: Path) -> Path:
    """A sentence encoder with a tokenizer, in the pieces that a hub gives."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(_WORDS))
    weights = {"a.weight": torch.ones(8, 8), "b.weight": torch.ones(8, 8)}
    for at, (name, values) in enumerate(weights.items()):
        (folder / f"part{at}.safetensors").write_bytes(save_safely({name: values}))
    index = {"weight_map": {name: f"part{at}.safetensors" for at, name in enumerate(weights)}}
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "pool", "type": "sentence_transformers.models.Pooling"},
    ]
    documents: dict[str, object] = {
        "config.json": {"model_type": "bert", "vocab_size": 8, "max_position_embeddings": 6},
        "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "model_max_length": 6},
        "sentence_bert_config.json": {"max_seq_length": 6, "do_lower_case": True},
        "model.safetensors.index.json": index,
        "modules.json": modules,
        "preprocessor_config.json": {"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        "special_tokens_map.json": {"pad_token": "[PAD]"},
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    (folder / "pool").mkdir()
    (folder / "pool" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return folder


@pytest.mark.timeout(max(600, 3 * SECONDS))
def test_a_changed_checkpoint_is_read_or_refused_by_name(tmp_path: Path) -> None:
    whole = _checkpoint(tmp_path / "whole")
    assert read_checkpoint(whole).pooling is not None
    (tmp_path / "x.txt").write_text("a b\nb ac\n")
    files = sorted(file.relative_to(whole) for file in whole.rglob("*") if file.is_file())

    def once(rng: random.Random) -> Path:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        for name in rng.sample(files, rng.choice((1, 1, 2))):
            content = (whole / name).read_bytes()
            mutate = _mutate_text if name.suffix == ".json" else _flip
            (folder / name).write_bytes(mutate(rng, content))
        return folder

    def read(folder: Path) -> None:
        inputs = onnx_model(folder / "m.onnx", input_ids=("int64", ("b", "n")))
        try:
            found = opened(tmp_path / "x.txt", inputs)
            assert sum(batch.samples for batch in found.batches()) == found.samples
        except BadInputError as error:
            if folder.name not in str(error) and "x.txt" not in str(error):
                raise AssertionError(f"no file is named: {error}") from error
        read_all([lambda: read_checkpoint(folder)], folder)

    try_many("checkpoint", once, read, sample=6)
