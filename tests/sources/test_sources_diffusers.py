"""Folders of diffusers as models: the four classes with tiny random weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from twofour.errors import BadInputError
from twofour.jobs import run_all, run_prune
from twofour.records.options import ExampleInputs, RunOptions
from twofour.sources.diffusers import DiffusersSource
from twofour.sources.source import LoadedModule, open_source

diffusers = pytest.importorskip("diffusers")

UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": 16,
    "attention_head_dim": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "mid_block_type": None,
}
SDXL = UNET | {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 16 + 6 * 8,
}
ONE_LEVEL = UNET | {
    "block_out_channels": (16,),
    "down_block_types": ("CrossAttnDownBlock2D",),
    "up_block_types": ("CrossAttnUpBlock2D",),
}
AUTOENCODER: dict[str, Any] = {
    "sample_size": 16,
    "block_out_channels": (16, 32),
    "norm_num_groups": 8,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
TRANSFORMER: dict[str, Any] = {
    "num_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 16,
}
SD3 = TRANSFORMER | {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "caption_projection_dim": 32,
    "pos_embed_max_size": 12,
}
FLUX = TRANSFORMER | {
    "in_channels": 16,
    "num_single_layers": 1,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 6, 6),
}
TEXT = {"encoder_hidden_states": (2, 333, 32), "pooled_projections": (2, 16), "timestep": (2,)}
UNET_INPUTS = {"sample": (2, 4, 8, 8), "timestep": (2,), "encoder_hidden_states": (2, 77, 16)}
FREE = {"height", "width"}


def _saved(folder: Path, name: str, config: dict[str, Any], **options: Any) -> Path:
    torch.manual_seed(0)
    getattr(diffusers, name)(**config).save_pretrained(folder, **options)
    return folder


def _unet(folder: Path, **options: Any) -> Path:
    return _saved(folder, "UNet2DConditionModel", UNET, **options)


def _source(folder: Path, options: ExampleInputs | None = None) -> DiffusersSource:
    source = open_source(str(folder), options or ExampleInputs())
    assert isinstance(source, DiffusersSource)
    return source


def _shapes(loaded: LoadedModule) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in loaded.kwargs.items()}


def _output(loaded: LoadedModule) -> torch.Tensor:
    with torch.no_grad():
        outputs = loaded.module(**loaded.kwargs)
    assert list(outputs) == ["out_sample"]
    tensor: torch.Tensor = outputs["out_sample"]
    return tensor


def _first_weight(loaded: LoadedModule) -> torch.Tensor:
    return loaded.module.get_parameter("conv_in.weight")


def _message(folder: Path) -> str:
    with pytest.raises(BadInputError) as caught:
        _source(folder).load()
    return f"{caught.value.message} hint: {caught.value.hint}"


@pytest.mark.parametrize(
    ("name", "config", "inputs", "free"),
    [
        ("UNet2DConditionModel", UNET, UNET_INPUTS, FREE),
        (
            "UNet2DConditionModel",
            SDXL,
            UNET_INPUTS | {"text_embeds": (2, 16), "time_ids": (2, 6)},
            FREE,
        ),
        ("AutoencoderKL", AUTOENCODER, {"sample": (1, 3, 16, 16)}, FREE),
        ("SD3Transformer2DModel", SD3, {"hidden_states": (2, 4, 8, 8), **TEXT}, FREE),
        (
            "FluxTransformer2DModel",
            FLUX,
            {
                "hidden_states": (2, 4096, 16),
                **TEXT,
                "encoder_hidden_states": (2, 512, 32),
                "img_ids": (4096, 3),
                "txt_ids": (512, 3),
                "guidance": (2,),
            },
            set(),
        ),
    ],
    ids=["unet", "sdxl", "autoencoder", "sd3", "flux"],
)
def test_each_class_runs_on_inputs_from_its_configuration_with_the_weights_of_its_file(
    tmp_path: Path,
    name: str,
    config: dict[str, Any],
    inputs: dict[str, tuple[int, ...]],
    free: set[str],
) -> None:
    image = next(iter(inputs.values()))  # what is returned is of its shape
    source = _source(_saved(tmp_path, name, config))
    loaded, bare = source.load(), source.structure()
    assert _shapes(loaded) == _shapes(bare) == inputs
    assert tuple(_output(loaded).shape) == image
    assert {axis.name for axis in loaded.dynamic} == free
    assert type(loaded.module).__name__ == name
    stored = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    assert dict(loaded.module.state_dict()).keys() == stored.keys()
    assert all(torch.equal(stored[n], p) for n, p in loaded.module.named_parameters())
    assert all(p.is_meta for p in bare.module.parameters())
    assert not any(buffer.is_meta for buffer in bare.module.buffers())
    known = source.stored(bare.module)
    assert known is not None
    assert known.keys() == stored.keys()


def test_the_conditions_of_sdxl_are_inputs_and_change_the_output(tmp_path: Path) -> None:
    loaded = _source(_saved(tmp_path, "UNet2DConditionModel", SDXL)).load()
    before = _output(loaded)
    assert loaded.kwargs["time_ids"].tolist() == [[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]] * 2
    loaded.kwargs["text_embeds"] *= 2
    assert not torch.equal(_output(loaded), before)


def test_the_refiner_of_sdxl_takes_five_numbers_beside_the_text(tmp_path: Path) -> None:
    config = SDXL | {"addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2560}
    loaded = _source(_saved(tmp_path, "UNet2DConditionModel", config)).structure()
    assert _shapes(loaded)["text_embeds"] == (2, 1280)
    assert _shapes(loaded)["time_ids"] == (2, 5)


def test_shapes_that_are_named_replace_those_of_single_inputs(tmp_path: Path) -> None:
    options = ExampleInputs(input_shapes=((2, 4, 16, 8),), input_shape_names=("sample",))
    loaded = _source(_unet(tmp_path), options).load()
    assert _shapes(loaded)["sample"] == (2, 4, 16, 8)
    assert _shapes(loaded)["encoder_hidden_states"] == (2, 77, 16)
    assert tuple(_output(loaded).shape) == (2, 4, 16, 8)


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    whole = _source(_unet(tmp_path / "whole"))
    parts = _source(_unet(tmp_path / "parts", max_shard_size="100KB"))
    assert len(list((tmp_path / "parts").glob("*-of-*.safetensors"))) > 1
    assert torch.equal(_output(parts.load()), _output(whole.load()))
    store = parts.stored(parts.structure().module)
    assert store is not None
    assert len({stored.file for stored in store.values()}) > 1
    assert whole.key() != parts.key()


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "50KB"}], ids=["whole", "shards"])
def test_a_half_precision_variant_is_read_where_there_is_no_other(
    tmp_path: Path, shards: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(**UNET)
    model.half().save_pretrained(tmp_path, variant="fp16", **shards)
    source = _source(tmp_path)
    loaded = source.load()
    assert {p.dtype for p in loaded.module.parameters()} == {torch.float32}
    assert torch.equal(_first_weight(loaded), model.conv_in.weight.float())
    store = source.stored(loaded.module)
    assert store is not None
    assert {stored.dtype for stored in store.values()} == {"float16"}
    other = diffusers.UNet2DConditionModel(**UNET)
    other.save_pretrained(tmp_path)
    assert torch.equal(_first_weight(source.load()), other.conv_in.weight)


def test_a_pipeline_is_answered_with_its_parts(tmp_path: Path) -> None:
    _unet(tmp_path / "unet")
    _saved(tmp_path / "vae", "AutoencoderKL", AUTOENCODER)
    (tmp_path / "scheduler").mkdir()
    parts = {name: ["diffusers", "X"] for name in ("scheduler", "unet", "vae")}
    index = {"_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.42.1", **parts}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(BadInputError, match="is a whole pipeline") as caught:
        open_source(str(tmp_path), ExampleInputs())
    hint = f"name the folder of a part: {tmp_path / 'unet'}, {tmp_path / 'vae'}"
    assert caught.value.hint == hint


def test_another_class_of_diffusers_is_refused_with_those_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "UNet1DModel"}')
    text = _message(tmp_path)
    assert f"{tmp_path / 'config.json'} names the class UNet1DModel" in text
    assert "UNet2DConditionModel, AutoencoderKL, SD3Transformer2DModel, Flux" in text
    assert "file.py:callable" in text


def test_a_configuration_of_other_sizes_than_the_weights_is_refused(tmp_path: Path) -> None:
    path = _unet(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"cross_attention_dim": 24}))
    assert f"diffusers {diffusers.__version__} cannot load {tmp_path}" in _message(tmp_path)


@pytest.mark.full
def test_a_model_goes_from_its_folder_to_a_report(tmp_path: Path) -> None:
    folder = _saved(tmp_path / "model", "UNet2DConditionModel", ONE_LEVEL)
    result = run_all(str(folder), tmp_path / "run", RunOptions())
    assert sum(row.pruned for row in result.prune.weights) == 17
    assert sum(check.required for check in result.export.pattern.checks) == 17
    assert result.validation.broken == result.export.pattern.broken == ()
    assert [agreement.output for agreement in result.accuracy.drift] == ["out_sample"]


def test_a_checkpoint_is_pruned_in_a_copy_of_its_files(tmp_path: Path) -> None:
    folder = _unet(tmp_path / "unet")
    _, pruned, validation = run_prune(str(folder), tmp_path / "run", RunOptions(stream=True))
    assert validation.broken == ()
    copied = load_file(tmp_path / "run/checkpoint/diffusion_pytorch_model.safetensors")
    dense = load_file(folder / "diffusion_pytorch_model.safetensors")
    assert copied.keys() == dense.keys()
    changed = {name for name, tensor in copied.items() if not torch.equal(tensor, dense[name])}
    assert len(changed) == sum(row.pruned for row in pruned.weights) == 30
