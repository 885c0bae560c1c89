"""A Hugging Face checkpoint folder as a source: model, example inputs, free sizes and outputs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from twofour.errors import BadInputError, MissingToolError
from twofour.export.model_code import described
from twofour.graph.stored import Store, StoredTensor, read_stores
from twofour.inputs.examples import GIVEN, RANDOM
from twofour.packages import installed_version
from twofour.records.options import DynamicAxis, ExampleInputs
from twofour.sources.checkpoint import (
    Checkpoint,
    Pooling,
    check_weight_file,
    has_tokenizer,
    image_size,
    read_checkpoint,
    read_sentences,
    tokenised_sentences,
)
from twofour.sources.source import (
    NO_CACHE,
    Arguments,
    LoadedModule,
    import_extra,
    inputs_from_options,
    key_of,
    loaded_module,
    options_key,
    path_of,
    safe_name,
)
from twofour.words import keys_listed

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

_ROWS = 2
_RANDOM_TOKENS = 16
_USUAL_IMAGE = 224
_KINDS = ("input_ids", "pixel_values", "input_features")
"""Inputs that can be made up."""
_LONGEST_TEXT = ("max_position_embeddings", "max_target_positions")
_EMBEDDING = "sentence_embedding"
_IMAGE_RANK = 4
_SEQUENCE, _DECODER_SEQUENCE = "sequence", "decoder_sequence"


def _trained_model(
    transformers: ModuleType, checkpoint: Checkpoint
) -> tuple[nn.Module, tuple[str, ...]]:
    """The model, and a note on weights in the files that are not part of it."""
    model_class = _model_class(transformers, checkpoint)
    model, info = _from_pretrained(transformers, model_class, checkpoint)
    missing = info["missing_keys"]
    if missing and all(name.startswith("pooler.") for name in missing):
        # Saved without a pooler, as most encoders are: then the model is to have none either.
        accepted = inspect.signature(type(model).__init__).parameters
        if "add_pooling_layer" in accepted:
            model, info = _from_pretrained(
                transformers, model_class, checkpoint, add_pooling_layer=False
            )
    return model, weight_notes(model, checkpoint, info)


def weight_notes(
    model: nn.Module, checkpoint: Checkpoint, info: Mapping[str, Any]
) -> tuple[str, ...]:
    """What the user should know of weights; raises BadInputError for those that are not there.

    `info` is what from_pretrained says of the files.
    """
    kind = type(model).__name__
    absent = sorted(map(str, info["missing_keys"] or info["mismatched_keys"]))
    if absent:
        raise BadInputError(
            f"{checkpoint.folder} has no trained values for {len(absent)} weights of {kind}: "
            f"{keys_listed(absent)}; they would be random",
            hint="let config.json name the class that the weights were saved from",
        )
    unused = sorted(info["unexpected_keys"])
    if not unused:
        return ()
    return (
        f"{len(unused)} weights of the checkpoint are not part of {kind} and are left out: "
        f"{keys_listed(unused)}",
    )


def _model_class(transformers: ModuleType, checkpoint: Checkpoint) -> type[PreTrainedModel]:
    """The class the weights were saved from; AutoModel where the config names none."""
    name = checkpoint.architecture
    if name is None:
        automatic: type[PreTrainedModel] = transformers.AutoModel
        return automatic
    found: object = getattr(transformers, name, None)
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    config = checkpoint.model_folder / "config.json"
    if "auto_map" in checkpoint.config:
        raise BadInputError(
            f"{config} wants to run Python code that comes with the checkpoint (auto_map, class "
            f"{name}); it is refused",
            hint="if you trust it, import that class in a file.py:callable of your own",
        )
    raise BadInputError(
        f"{config} names the architecture {name!r}, which transformers "
        f"{transformers.__version__} does not have",
        hint="install the version of transformers the checkpoint was made with",
    )


def _from_pretrained(
    transformers: ModuleType,
    model_class: type[PreTrainedModel],
    checkpoint: Checkpoint,
    **model_options: bool,
) -> tuple[Any, dict[str, Any]]:
    import torch

    version = [int(part) for part in transformers.__version__.split(".")[:2]]
    what = f"transformers {transformers.__version__} cannot load {checkpoint.folder}:"
    hint = "compare config.json with the weights: sizes and number of layers must agree"
    with described(what, hint=hint):
        try:
            model, info = model_class.from_pretrained(
                checkpoint.model_folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=checkpoint.weights[0].suffix == ".safetensors",
                output_loading_info=True,
                **{"dtype" if version >= [4, 56] else "torch_dtype": torch.float32},
                **model_options,
            )
        except ImportError as error:
            raise MissingToolError(f"{checkpoint.folder} needs another package: {error}") from error
    return model, info


@contextlib.contextmanager
def quiet(package: ModuleType) -> Iterator[None]:
    """Hold back the progress bars of transformers or diffusers, and reports of weights.

    Our own errors name these.
    """
    logging = package.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@dataclass(frozen=True, slots=True, kw_only=True)
class HfSource:
    """A folder with config.json and weights, as save_pretrained writes it."""

    text: str
    folder: Path
    options: ExampleInputs

    @property
    def name(self) -> str:
        """The folder's own name."""
        return safe_name(self.folder.resolve().name)

    @property
    def generates_text(self) -> bool:
        """Whether it is a language model, as LLM runtimes load them."""
        return (read_checkpoint(self.folder).architecture or "").endswith("ForCausalLM")

    def key(self) -> str:
        """sha256 over config, weights, tokenizer, example inputs and transformers' version."""
        checkpoint = read_checkpoint(self.folder)
        sentences = read_sentences(None) if self.options.inputs is None else ()
        version = installed_version("transformers") or "none"
        return key_of(*checkpoint.contents, *sentences, version, options_key(self.options))

    def structure(self) -> LoadedModule:
        """The model without values, its parameters on the meta device, and its example inputs.

        Raises BadInputError as `load` does, but for damaged weights.
        """
        checkpoint = read_checkpoint(self.folder)
        transformers = import_extra("transformers", "a Hugging Face checkpoint")
        with quiet(transformers):
            model = _empty_model(transformers, checkpoint)
            inputs = checkpoint_inputs(model, checkpoint, self.options)
        return _finished(model, checkpoint, inputs)

    def stored(self, module: nn.Module) -> Store | None:
        """Where the checkpoint's files have the module's parameters, by their names in it.

        None where a file is no .safetensors, or a parameter is stored under another name.
        """
        checkpoint = read_checkpoint(self.folder)
        if any(file.suffix != ".safetensors" for file in checkpoint.weights):
            return None
        store, missing = named_store(module, read_stores(checkpoint.weights))
        return None if missing else store

    def load(self) -> LoadedModule:
        """The model with its trained weights in float32; a sentence encoder gives its embedding.

        Raises BadInputError for damaged or missing weights, MissingToolError without transformers.
        """
        checkpoint = read_checkpoint(self.folder)
        transformers = import_extra("transformers", "a Hugging Face checkpoint")
        for file in checkpoint.weights:
            check_weight_file(file)
        with quiet(transformers):
            model, notes = _trained_model(transformers, checkpoint)
            inputs = checkpoint_inputs(model, checkpoint, self.options)
        return replace(_finished(model, checkpoint, inputs), notes=notes)


def _finished(model: PreTrainedModel, checkpoint: Checkpoint, inputs: Arguments) -> LoadedModule:
    """The model whose forward gives tensors; a sentence encoder gives its embedding."""
    if checkpoint.pooling is None:
        give_tensors(model)
    else:
        give_embedding(model, checkpoint.pooling)
    return with_free_sizes(loaded_module(model, inputs, bare=True))


def _empty_model(transformers: ModuleType, checkpoint: Checkpoint) -> PreTrainedModel:
    """The model with parameters on the meta device; without a pooler where none was saved."""
    from twofour.pruning.module_layers import without_values

    model_class = _model_class(transformers, checkpoint)
    folder = checkpoint.model_folder
    with described(f"transformers {transformers.__version__} cannot build {folder}:"):
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        if model_class is transformers.AutoModel:
            model_class = transformers.AutoModel._model_mapping[type(config)]
        accepted = inspect.signature(model_class.__init__).parameters
        with without_values():
            model: PreTrainedModel = model_class._from_config(config)
            if "add_pooling_layer" in accepted and not _has_pooler(checkpoint):
                model = model_class._from_config(config, add_pooling_layer=False)
    return model.eval()


def _has_pooler(checkpoint: Checkpoint) -> bool:
    """Whether the files have weights of a pooler; True where nobody can know."""
    if not checkpoint.has_weights or any(
        file.suffix != ".safetensors" for file in checkpoint.weights
    ):
        return True
    keys = read_stores(checkpoint.weights).keys()
    return not keys or any("pooler." in key for key in keys)


def named_store(module: nn.Module, files: Store) -> tuple[Store, tuple[str, ...]]:
    """The arrays of `files` by the names of the module's parameters and buffers.

    Keys may begin with the name of the base model where the module's do not, and the other way
    round. Also the parameters that have no array of their shape.
    """
    prefix = f"{getattr(module, 'base_model_prefix', '')}."

    def find(name: str, tensor: torch.Tensor) -> StoredTensor | None:
        wishes = (name, f"{prefix}{name}", name.removeprefix(prefix))
        found = next((files[wish] for wish in wishes if wish in files), None)
        return found if found is not None and found.shape == tuple(tensor.shape) else None

    named = list(module.named_parameters(remove_duplicate=False))
    tied: dict[int, StoredTensor] = {}
    for name, tensor in named:
        if (found := find(name, tensor)) is not None:
            tied.setdefault(id(tensor), found)
    store = {name: tied[id(tensor)] for name, tensor in named if id(tensor) in tied}
    missing = tuple(name for name, _ in named if name not in store)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if (found := find(name, buffer)) is not None:
            store[name] = found
    return store, missing


def open_hf(text: str, options: ExampleInputs) -> HfSource:
    """The source of a checkpoint folder."""
    return HfSource(text=text, folder=path_of(text), options=options)


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a Hugging Face class made it; whoever built it has imported transformers."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def checkpoint_inputs(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    options: ExampleInputs,
) -> Arguments:
    """The user's inputs; else tokenised sentences, and what `invented_inputs` makes up."""
    sentences = options.file is not None and options.file.suffix == ".txt"
    if _takes(model, "input_ids") and options.input_shapes:
        raise BadInputError(
            f"{type(model).__name__} reads token ids; --input-shape makes floating-point inputs",
            hint="give sentences with --inputs FILE.txt, or ids with --inputs FILE.npz",
        )
    reads_text = has_tokenizer(checkpoint.model_folder)
    if sentences and not reads_text:
        raise BadInputError(
            f"{checkpoint.model_folder} has no tokenizer, so {options.inputs} cannot be read",
            hint="copy the tokenizer files into the folder, or give ids with --inputs FILE.npz",
        )
    known: Mapping[str, torch.Tensor] = {}
    if _takes(model, "input_ids") and reads_text and (sentences or options.inputs is None):
        known = tokenised_sentences(checkpoint.model_folder, options.file)
    elif (given := inputs_from_options(model, options)) is not None:
        return given
    invented = invented_inputs(model, options.seed, image_size(checkpoint.model_folder), known)
    if not known:
        return invented
    if options.file is not None:
        return replace(invented, are=GIVEN)
    return replace(invented, are=f"{len(known['input_ids'])} built-in example sentences")


def invented_inputs(
    model: PreTrainedModel,
    seed: int,
    image_size: tuple[int, int] | None = None,
    known: Mapping[str, torch.Tensor] | None = None,
) -> Arguments:
    """The `known` inputs, and what else the model reads: random, of the sizes in its config.

    Two rows of 16 token ids, images, or Whisper's spectra; raises BadInputError for others.
    """
    import torch

    config: Any = model.config
    made = dict(known or {})
    rows = next(map(len, made.values()), _ROWS)
    generator = torch.Generator().manual_seed(seed)
    for name in _read_by(model):
        if name == "input_ids" and name not in made:
            made[name] = _random_ids(config.get_text_config(), rows, generator)
            made["attention_mask"] = torch.ones_like(made[name])
        elif name not in made:
            shape = _shape_of(model, name, image_size)
            made[name] = torch.randn((rows, *shape), generator=generator)
    if getattr(config, "is_encoder_decoder", False):
        if "input_ids" in made:
            made["decoder_input_ids"] = made["input_ids"].clone()
        else:
            text = config.get_text_config(decoder=True)
            made["decoder_input_ids"] = _random_ids(text, rows, generator)
    accepted = inspect.signature(model.forward).parameters
    given = {name: tensor for name, tensor in made.items() if name in accepted}
    return Arguments(kwargs=given, are=RANDOM)


def _random_ids(text: Any, rows: int, generator: torch.Generator) -> torch.Tensor:  # noqa: ANN401  # transformers' own
    """Token ids of a configuration's vocabulary."""
    import torch

    limits = (getattr(text, name, _RANDOM_TOKENS) for name in _LONGEST_TEXT)
    size = rows, min(_RANDOM_TOKENS, *limits)
    return torch.randint(0, text.vocab_size, size, generator=generator)


def _takes(model: PreTrainedModel, name: str) -> bool:
    return getattr(model, "main_input_name", None) == name


def _read_by(model: PreTrainedModel) -> Iterator[str]:
    """The main input, and those of its other parts: CLIP compares texts with images.

    A model that generates text from text reads an image only where there is one.
    """
    accepted = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "an unknown input")
    yield main
    generates = main == "input_ids" and model.can_generate()
    has_parts = getattr(model.config, "sub_configs", ()) and not generates
    for name in _KINDS:
        one = accepted.get(name)
        if one is not None and (has_parts or one.default is one.empty):
            yield name


def _shape_of(
    model: PreTrainedModel, name: str, image_size: tuple[int, int] | None
) -> tuple[int, ...]:
    """The shape of one image or spectrum; raises BadInputError where the config does not say it."""
    config: Any = model.config
    parts = (getattr(config, part) for part in getattr(config, "sub_configs", ()))
    known = ChainMap(*(dict(vars(part)) for part in (config, *parts)))
    if name == "pixel_values":
        size = known.get("image_size") or image_size or _USUAL_IMAGE  # a ResNet's names no size
        height, width = (size, size) if isinstance(size, int) else size
        return (known.get("num_channels", 3), height, width)
    bins, positions = known.get("num_mel_bins"), known.get("max_source_positions")
    if name != "input_features" or not bins or not positions:
        raise BadInputError(
            f"no example inputs can be made up for {type(model).__name__}, which reads {name!r}",
            hint="give them with --inputs FILE.npz",
        )
    return (bins, 2 * positions)  # Whisper's second convolution has stride 2


def with_free_sizes(loaded: LoadedModule) -> LoadedModule:
    """The transformers model with the sizes that its architecture leaves free.

    What it does not allow after all (positions of one image size) is found by running it.
    """
    tensors = (*loaded.args, *loaded.kwargs.values())
    lengths: dict[int, str] = {}
    found = []
    for name, tensor in zip(loaded.input_names or (), tensors, strict=False):
        axes = dict(_free_axes(loaded.module, name, tensor))
        if not axes and tensor.dim() == 2 and tensor.shape[1] in lengths:
            axes = {1: lengths[tensor.shape[1]]}  # a mask, or ids beside the main input
        for axis, size in axes.items():
            lengths.setdefault(int(tensor.shape[axis]), size)
            found.append(DynamicAxis(input=name, axis=axis, name=size))
    config: Any = loaded.module.config
    text = config.get_text_config()
    most = next((getattr(text, name) for name in _LONGEST_TEXT if hasattr(text, name)), None)
    if isinstance(most, int) and most > 0:
        # RoBERTa and models like it count positions from behind the padding id: fewer are left
        named = loaded.module.named_modules()
        tables = (part for name, part in named if name.endswith("position_embeddings"))
        skipped = next((t.padding_idx for t in tables if hasattr(t, "padding_idx")), None)
        most -= 0 if skipped is None else skipped + 1
    else:
        most = None
    longest = {_SEQUENCE: most, _DECODER_SEQUENCE: most}
    return replace(loaded, dynamic=tuple(found), longest=longest)


def _free_axes(module: nn.Module, name: str, tensor: torch.Tensor) -> Iterator[tuple[int, str]]:
    rank = tensor.dim()
    if name in {"input_ids", "inputs_embeds"} and rank > 1:
        yield 1, _SEQUENCE
    elif name.startswith("decoder_") and rank > 1:
        yield 1, _DECODER_SEQUENCE
    elif name == "pixel_values" and rank == _IMAGE_RANK:
        yield from ((2, "height"), (3, "width"))
    elif name == "input_values" and rank > 1:
        yield 1, "samples" if rank == 2 else "frames"
    elif name == "input_features" and rank == 3:
        bins = getattr(getattr(module, "config", None), "num_mel_bins", None)
        yield (2 if tensor.shape[1] == bins else 1), "frames"


def notes_on(module: nn.Module) -> tuple[str, ...]:
    """What the user of a model that generates text should know of its export."""
    if not getattr(module, "can_generate", bool)():  # transformers' own
        return ()
    return (
        f"{NO_CACHE}: {type(module).__name__} is exported as it reads a whole text at once. To "
        "generate text with this file, the whole text is read again for each token",
    )


def give_tensors(model: PreTrainedModel) -> None:
    """Let forward return its tensors by name (the ONNX outputs'), without caches and None."""

    def plain(outputs: object, inputs: Mapping[str, Any]) -> object:  # noqa: ARG001  # as embedding
        return dict(_named(outputs)) if isinstance(outputs, Mapping) else outputs

    _replace_forward(model, plain)


def give_embedding(model: PreTrainedModel, pooling: Pooling) -> None:
    """Let forward return `sentence_embedding` alone, [rows, modes * hidden size]."""
    import torch
    from torch import nn

    def embedding(outputs: ModelOutput, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        hidden = outputs.last_hidden_state
        mask = inputs.get("attention_mask")
        if mask is None:
            mask = torch.ones(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        vector = torch.cat([_pooled(mode, hidden, mask) for mode in pooling.modes], dim=-1)
        if pooling.normalize:
            vector = nn.functional.normalize(vector, p=2.0, dim=-1)
        return {_EMBEDDING: vector}

    _replace_forward(model, embedding)


def _replace_forward(
    model: PreTrainedModel, finish: Callable[[Any, Mapping[str, Any]], object]
) -> None:
    # no key-value cache among the outputs; named outputs inside, which decoders rely on
    for config in (model.config, model.config.get_text_config()):
        config.use_cache, config.return_dict = False, True
    base = type(model)
    names = tuple(inspect.signature(base.forward).parameters)[1:]

    # wraps: exporters and shape options look up the names of forward's parameters.
    @functools.wraps(base.forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401  # as the original
        inputs = dict(zip(names, args, strict=False)) | kwargs
        return finish(base.forward(self, *args, **kwargs), inputs)

    set_forward(model, forward)


def set_forward(model: nn.Module, forward: Callable[..., object]) -> None:
    """Give one model another forward, in a class of the same name."""
    base = type(model)
    members = {"forward": forward, "__module__": base.__module__}
    model.__class__ = type(base.__name__, (base,), members)


def _named(outputs: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors under their names; those of a tuple (hidden states of each layer) numbered."""
    import torch

    for name, value in outputs.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (tuple, list)):
            numbered = {f"{name}_{number}": item for number, item in enumerate(value)}
            yield from _named(numbered)


def _pooled(mode: str, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The vectors of the tokens as one vector per row; `mask` is 0 where a token is padding."""
    import torch

    if mode == "cls":  # the first token that is no padding: some tokenizers pad on the left
        index = mask.to(torch.int32).argmax(dim=1).reshape(-1, 1, 1)
        return torch.gather(hidden, 1, index.expand(-1, 1, hidden.shape[-1])).squeeze(1)
    if mode == "max":
        lowest = torch.finfo(hidden.dtype).min
        return hidden.masked_fill(mask.unsqueeze(-1) == 0, lowest).max(dim=1).values
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    # the count is at least 1, so that a row of padding alone gives zeros, in float16 too
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)
