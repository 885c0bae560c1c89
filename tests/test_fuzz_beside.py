"""What stands beside a model: tokenizers, settings, images, texts, lists and times, all changed."""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save as save_arrays_safely
from support import fuzzing
from support.calibration_data import onnx_model, opened
from support.fuzz_runs import SECONDS, Kind, read_all, try_kind, try_many

from twofour.errors import BadInputError
from twofour.logs.read import read_build_log
from twofour.pipeline.compare.trtexec_times import read_times
from twofour.pipeline.evidence import read_layer_names
from twofour.pipeline.layer_lists import read_layers
from twofour.pipeline.sources.checkpoint import read_checkpoint
from twofour.pipeline.sources.inputs import read_sentences
from twofour.records.export import LayerMap
from twofour.records.latency import LatencyComparison
from twofour.records.options import Selection
from twofour.records.run import BuildResult, ExportedVariant, RunManifest
from twofour.records.sensitivity import SensitivityResult
from twofour.store import read_record, to_json

_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##c")
_RECORDS = (
    BuildResult, ExportedVariant, LatencyComparison, LayerMap, RunManifest, SensitivityResult,
)  # fmt: skip


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
    read_all(
        (
            lambda: read_layers(path, Selection()),
            lambda: read_sentences(path),
            lambda: read_layer_names(path),
        ),
        path,
    )


def _read_json(path: Path) -> None:
    read_all([lambda kind=kind: to_json(read_record(kind, path)) for kind in _RECORDS], path)  # type: ignore[misc]
    read_all((lambda: read_times(path), lambda: read_layer_names(path)), path)


def _read_log(path: Path) -> None:
    to_json(read_build_log(path))


def _notebook() -> bytes:
    lines = ["[V] [TRT] (Sparsity) Found 1 layer(s) eligible to use sparse tactics: a\n"]
    outputs = [{"output_type": "stream", "text": lines}, {"data": {"text/plain": lines}}]
    return json.dumps({"nbformat": 4, "cells": [{"outputs": outputs}]}).encode()


def _times() -> bytes:
    rows = [
        {"startComputeMs": 300.0 + i, "endComputeMs": 301.0 + i, "computeMs": 1.0} for i in range(5)
    ]
    return json.dumps(rows).encode()


def _map() -> bytes:
    return json.dumps({"engine a": "layer", "engine b": ["x", "y"]}).encode()


_TEXT = b"# left dense\nlayer*  # a comment\n+fc[12].w\nengine,layer\na,b\n"
_LOG = b"[V] [TRT] (Sparsity) Found 2 layer(s) eligible to use sparse tactics: a, b + c\n" * 5
_KINDS = {
    "image.png": Kind(".png", (_image("PNG"),), fuzzing.mutate_bytes, _read_image, 5),
    "image.jpg": Kind(".jpg", (_image("JPEG"),), fuzzing.mutate_bytes, _read_image, 5),
    "image.gif": Kind(".gif", (_image("GIF"),), fuzzing.mutate_bytes, _read_image, 5),
    "text": Kind(".txt", (_TEXT,), fuzzing.mutate_bytes, _read_text),
    "json": Kind(".json", (_times(), _map()), fuzzing.mutate_json, _read_json),
    "json-bytes": Kind(".json", (_times(), _map()), fuzzing.mutate_bytes, _read_json),
    "notebook": Kind(".ipynb", (_notebook(),), fuzzing.mutate_json, _read_log),
    "log.gz": Kind(".gz", (gzip.compress(_LOG, mtime=0),), fuzzing.mutate_bytes, _read_log),
}


@pytest.mark.timeout(max(600, 3 * SECONDS))
@pytest.mark.parametrize("name", _KINDS)
def test_a_changed_file_is_read_or_refused_by_name(name: str, tmp_path: Path) -> None:
    try_kind(name, _KINDS[name], tmp_path)


def _checkpoint(folder: Path) -> Path:
    """A sentence encoder with a tokenizer, in the pieces that a hub gives."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(_WORDS))
    weights = {"a.weight": np.ones((8, 8), np.float32), "b.weight": np.ones((8, 8), np.float32)}
    for at, (name, values) in enumerate(weights.items()):
        (folder / f"part{at}.safetensors").write_bytes(save_arrays_safely({name: values}))
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


@pytest.mark.slow
@pytest.mark.timeout(max(600, 3 * SECONDS))
def test_a_changed_checkpoint_is_read_or_refused_by_name(tmp_path: Path) -> None:
    whole = _checkpoint(tmp_path / "whole")
    assert read_checkpoint(whole).pooling is not None
    (tmp_path / "x.txt").write_text("a b\nb ac\n")
    (tmp_path / "x.jsonl").write_text(json.dumps({"messages": [{"content": "a b"}]}))
    files = sorted(file.relative_to(whole) for file in whole.rglob("*") if file.is_file())

    def once(rng: random.Random) -> Path:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        for name in rng.sample(files, rng.choice((1, 1, 2))):
            content = (whole / name).read_bytes()
            is_json = name.suffix == ".json" and rng.random() < 0.7
            mutate = fuzzing.mutate_json if is_json else fuzzing.mutate_bytes
            (folder / name).write_bytes(mutate(rng, content))
        return folder

    def read(folder: Path) -> None:
        inputs = onnx_model(folder / "m.onnx", input_ids=("int64", ("b", "n")))
        readers = [lambda: read_checkpoint(folder)]
        for text in ("x.txt", "x.jsonl"):
            try:
                found = opened(tmp_path / text, inputs)
                assert sum(batch.samples for batch in found.batches()) == found.samples
            except BadInputError as error:
                if folder.name not in str(error) and text not in str(error):
                    raise AssertionError(f"no file is named: {error}") from error
        read_all(readers, folder)

    try_many("checkpoint", once, read, sample=6)
