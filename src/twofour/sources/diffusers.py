"""One model of a diffusion pipeline as a source: the folder of a part, as diffusers saves it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from twofour.errors import BadInputError
from twofour.export.model_code import described, silenced
from twofour.inputs.examples import RANDOM
from twofour.records import frozen
from twofour.records.options import DynamicAxis, ExampleInputs
from twofour.sources.checkpoint import Checkpoint, read_checkpoint, read_json_object
from twofour.sources.hf import SIZES_DIFFER, Built, HfSource, set_forward, trained, without_values
from twofour.sources.source import (
    CONFIG,
    DIFFUSERS_CLASS,
    PIPELINE,
    ExampleCall,
    LoadedModule,
    import_extra,
    inputs_from_options,
    loaded_module,
    path_of,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

_PROMPTS = 2
"""A prompt and an empty one: what a pipeline runs for one image."""
_CLIP_TOKENS = 77
"""Tokens of a prompt as the pipelines encode it."""
_T5_TOKENS = 256
_FLUX_TOKENS = 512
_USUAL_SIDE = 64
"""Height and width where the configuration names none: 64 of Flux are an image of 1024x1024."""
_LARGEST_IMAGE = 512
"""What an autoencoder is tried with; twice as large must still be quick on a CPU."""
_REFINER_WIDTH = 2560
"""Added conditions of the refiner of SDXL, which takes 5 numbers beside the text, not 6."""

Random = Callable[..., "torch.Tensor"]
"""Normal numbers of a shape."""
Tensors = dict[str, "torch.Tensor"]


@frozen
class DiffusersSource(HfSource):
    """A folder with config.json and weights of one model of a pipeline."""

    package: ClassVar[str] = "diffusers"

    def _made(self, *, has_values: bool) -> LoadedModule:
        checkpoint = read_checkpoint(self.folder)
        name = str(checkpoint.config.get(DIFFUSERS_CLASS))
        if name not in _INPUTS:
            raise BadInputError(
                f"{self.folder / CONFIG} names the class {name}; of diffusers' models, "
                f"{', '.join(_INPUTS)} can be read",
                hint="write a file.py:callable that returns a module whose forward gives tensors",
            )
        diffusers = import_extra(self.package, "a diffusers model")
        build = _trained if has_values else _empty
        what = f"diffusers {diffusers.__version__} cannot load {self.folder}:"
        with silenced(), described(what, hint=SIZES_DIFFER):
            model, notes = build(getattr(diffusers, name), checkpoint)
        _give_tensors(model)
        return replace(_with_inputs(model, _INPUTS[name], self.options), notes=notes)


def open_diffusers(text: str, options: ExampleInputs) -> DiffusersSource:
    """The source of a part of a pipeline; raises BadInputError for the folder of a whole one."""
    folder = path_of(text)
    if (folder / PIPELINE).is_file():
        named = read_json_object(folder / PIPELINE)
        parts = [str(folder / name) for name in named if (folder / name / CONFIG).is_file()]
        raise BadInputError(
            f"{text} is a whole pipeline; one of its models is pruned at a time",
            hint=f"name the folder of a part: {', '.join(parts) or 'none is here'}",
        )
    return DiffusersSource(text=text, folder=folder, options=options)


def _empty(kind: Any, checkpoint: Checkpoint) -> Built:  # noqa: ANN401  # diffusers' own
    """The model with parameters on the meta device."""
    with without_values():
        return kind.from_config(checkpoint.config), ()


def _trained(kind: Any, checkpoint: Checkpoint) -> Built:  # noqa: ANN401  # diffusers' own
    """The model with its weights, and notes on these."""
    import torch

    variant = "fp16" if ".fp16" in checkpoint.weights[0].name else None
    return trained(kind, checkpoint, variant=variant, torch_dtype=torch.float32)


def _give_tensors(model: nn.Module) -> None:
    """Let forward return its tensor by name, and that of SDXL take each condition by its name."""
    base = type(model)

    @functools.wraps(base.forward)
    def plain(self: nn.Module, *args: Any, **kwargs: Any) -> Tensors:  # noqa: ANN401  # as the original
        return {"out_sample": base.forward(self, *args, **kwargs).sample}

    def with_conditions(  # noqa: PLR0917  # inputs of a graph
        self: nn.Module,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        text_embeds: torch.Tensor,
        time_ids: torch.Tensor,
    ) -> Tensors:
        added = {"text_embeds": text_embeds, "time_ids": time_ids}
        return plain(self, sample, timestep, encoder_hidden_states, added_cond_kwargs=added)

    # SDXL has its conditions in one dict, which is no input of a graph
    takes_conditions = getattr(model.config, "addition_embed_type", None) == "text_time"
    set_forward(model, with_conditions if takes_conditions else plain)


def _with_inputs(
    model: nn.Module, invent: Callable[[Any, Random], Tensors], options: ExampleInputs
) -> LoadedModule:
    """The model with example inputs, and height and width of images free.

    Shapes that the user names replace those of single inputs.
    """
    import torch

    given = inputs_from_options(model, options)
    random = functools.partial(torch.randn, generator=torch.Generator().manual_seed(options.seed))
    inputs = ExampleCall(kwargs=invent(model.config, random), are=RANDOM)
    if given is not None:
        # --input-shape sample=1x4x96x96 leaves the timestep and the prompt as they are made up
        named = inputs.kwargs if options.input_shape_names else {}
        inputs = replace(given, kwargs=named | given.kwargs)
    loaded = loaded_module(model, inputs, bare=True)
    free = []
    for name, tensor in loaded.kwargs.items():
        if tensor.dim() == 4:
            free.append(DynamicAxis(input=name, axis=2, name="height"))
            free.append(DynamicAxis(input=name, axis=3, name="width"))
    return replace(loaded, dynamic=tuple(free))


def _sides(config: Any) -> tuple[int, int]:  # noqa: ANN401  # diffusers' own
    """Height and width of what the model reads."""
    size = config.sample_size or _USUAL_SIDE
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width


def _times(random: Random) -> torch.Tensor:
    """Steps of the sampler, between 0 and 1."""
    return random(_PROMPTS).sigmoid()


def _unet(config: Any, random: Random) -> Tensors:  # noqa: ANN401  # diffusers' own
    import torch

    height, width = _sides(config)
    width_of_text = config.encoder_hid_dim or config.cross_attention_dim
    inputs = {
        "sample": random(_PROMPTS, config.in_channels, height, width),
        "timestep": (_times(random) * 1000).floor(),
        "encoder_hidden_states": random(_PROMPTS, _CLIP_TOKENS, width_of_text),
    }
    if config.addition_embed_type == "text_time":
        # sizes and corners of the image before and after it was cut: 6 numbers of 256 sines each
        total = config.projection_class_embeddings_input_dim
        count = 5 if total == _REFINER_WIDTH else 6
        inputs["text_embeds"] = random(_PROMPTS, total - count * config.addition_time_embed_dim)
        sizes = torch.tensor([height, width, 0, 0, height, width])[:count] * 8.0
        inputs["time_ids"] = sizes.expand(_PROMPTS, -1)
    return inputs


def _autoencoder(config: Any, random: Random) -> Tensors:  # noqa: ANN401  # diffusers' own
    height, width = (min(side, _LARGEST_IMAGE) for side in _sides(config))
    return {"sample": random(1, config.in_channels, height, width)}


def _sd3(config: Any, random: Random) -> Tensors:  # noqa: ANN401  # diffusers' own
    return {
        "hidden_states": random(_PROMPTS, config.in_channels, *_sides(config)),
        "timestep": _times(random) * 1000,
        **_text(config, random, _CLIP_TOKENS + _T5_TOKENS),
    }


def _flux(config: Any, random: Random) -> Tensors:  # noqa: ANN401  # diffusers' own
    import torch

    # one row for each place of the image: (0, y, x)
    places = torch.cartesian_prod(torch.zeros(1), *[torch.arange(float(_USUAL_SIDE))] * 2)
    inputs = {
        "hidden_states": random(_PROMPTS, len(places), config.in_channels),
        "timestep": _times(random),
        "img_ids": places,
        "txt_ids": torch.zeros(_FLUX_TOKENS, 3),
        **_text(config, random, _FLUX_TOKENS),
    }
    if config.guidance_embeds:
        inputs["guidance"] = torch.full((_PROMPTS,), 3.5)
    return inputs


def _text(config: Any, random: Random, tokens: int) -> Tensors:  # noqa: ANN401  # diffusers' own
    """A prompt as transformers read it: its tokens, and one vector for all of it."""
    return {
        "encoder_hidden_states": random(_PROMPTS, tokens, config.joint_attention_dim),
        "pooled_projections": random(_PROMPTS, config.pooled_projection_dim),
    }


_INPUTS: dict[str, Callable[[Any, Random], Tensors]] = {
    "UNet2DConditionModel": _unet,
    "AutoencoderKL": _autoencoder,
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
}
"""The classes that can be read, and what makes up example inputs from a configuration."""
