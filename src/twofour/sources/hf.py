"""A Hugging Face checkpoint folder as a source: model, example inputs, free sizes and outputs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from twofour.errors import BadInputError, MissingToolError
from twofour.export.model_code import described, silenced
from twofour.graph.stored import Store, StoredTensor, read_stores
from twofour.inputs.examples import GIVEN, RANDOM
from twofour.packages import installed_version
from twofour.records import frozen
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
    CONFIG,
    NO_CACHE,
    ExampleCall,
    LoadedModule,
    import_extra,
    inputs_from_options,
    key_of,
    loaded_module,
    options_key,
    path_of,
    safe_name,
)
from twofour.words import count, keys_listed

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

SIZES_DIFFER = "compare config.json with the weights: sizes and number of layers must agree"
_EXAMPLES = 2
"""Rows of example inputs that are made up."""
_RANDOM_TOKENS = 16
_USUAL_IMAGE = 224
_KINDS = ("input_ids", "pixel_values", "input_features")
"""Inputs that can be made up."""
_TEXT_LIMITS = ("max_position_embeddings", "max_target_positions")
"""Settings that say how many tokens a text may have."""
_SEQUENCE = "sequence"
_A_SECOND = 16_000
"""Samples of sound; the speech models of transformers were trained at 16 kHz."""
_EXPERTS = "batched_mm"
"""How a mixture of experts runs: by a table of weights for each token, as torch can export it."""

Tensors = Mapping[str, "torch.Tensor"]
Built = tuple[Any, tuple[str, ...]]
"""A model, and notes on its weights."""


def trained(kind: Any, checkpoint: Checkpoint, **options: object) -> Built:  # noqa: ANN401  # a class
    """The model with its trained weights, and notes on these."""
    for file in checkpoint.weights:
        check_weight_file(file)
    model, info = kind.from_pretrained(
        checkpoint.model_folder,
        local_files_only=True,
        use_safetensors=checkpoint.weights[0].suffix == ".safetensors",
        output_loading_info=True,
        **options,
    )
    return model, _weight_notes(model, checkpoint, info)


def _trained_model(transformers: Any, checkpoint: Checkpoint) -> Built:  # noqa: ANN401  # a module
    """The model with its trained weights in float32."""
    import torch

    model_class = _model_class(transformers, checkpoint)
    options = {"dtype": torch.float32, **_class_options(model_class, checkpoint)}
    what = f"transformers {transformers.__version__} cannot load {checkpoint.folder}:"
    with described(what, hint=SIZES_DIFFER):
        try:
            return trained(model_class, checkpoint, trust_remote_code=False, **options)
        except ImportError as error:
            raise MissingToolError(f"{checkpoint.folder} needs another package: {error}") from error


def _empty_model(transformers: Any, checkpoint: Checkpoint) -> Built:  # noqa: ANN401  # a module
    """The model with parameters on the meta device."""
    model_class = _model_class(transformers, checkpoint)
    folder = checkpoint.model_folder
    with described(f"transformers {transformers.__version__} cannot build {folder}:"):
        config = _configuration(transformers, folder)
        options = _class_options(model_class, checkpoint)
        with without_values():
            model: PreTrainedModel = model_class._from_config(config, **options)
    return model.eval(), ()


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Modules that are built within have parameters on the meta device, and real buffers.

    Buffers that no checkpoint holds (rotary frequencies, position ids) are computed by the
    module's own constructor, so they have to be real.
    """
    import torch
    from torch import nn

    original = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param)
        if param is not None and not param.is_meta:
            empty = torch.empty_like(param, device="meta")
            module._parameters[name] = nn.Parameter(empty, requires_grad=param.requires_grad)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment,method-assign]  # put back below
    try:
        with torch.no_grad():
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _configuration(transformers: Any, folder: Path) -> Any:  # noqa: ANN401  # transformers' own
    return transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )


def _class_options(model_class: type[PreTrainedModel], checkpoint: Checkpoint) -> dict[str, Any]:
    """How experts run; and no pooler where none was saved, as in most encoders."""
    options: dict[str, Any] = {"experts_implementation": _EXPERTS}
    accepted = inspect.signature(model_class.__init__).parameters
    # a forecast needs the configuration alone, which says nothing of a pooler
    may_lack = "add_pooling_layer" in accepted and checkpoint.has_weights
    if may_lack and not any("pooler." in key for key in checkpoint.keys):
        options["add_pooling_layer"] = False
    return options


def _weight_notes(
    model: nn.Module, checkpoint: Checkpoint, info: Mapping[str, Any]
) -> tuple[str, ...]:
    """What the user should know of weights; raises BadInputError for those that are not there.

    `info` is what from_pretrained says of the files.
    """
    kind = type(model).__name__
    absent = sorted(map(str, info["missing_keys"] or info["mismatched_keys"]))
    if absent:
        raise BadInputError(
            f"{checkpoint.folder} has no trained values for {count(len(absent), 'weight')} of "
            f"{kind}: {keys_listed(absent)}; they would be random",
            hint="let config.json name the class that the weights were saved from",
        )
    unused = sorted(info["unexpected_keys"])
    if not unused:
        return ()
    return (
        f"{len(unused)} weights of the checkpoint are not part of {kind} and are left out: "
        f"{keys_listed(unused)}",
    )


def _model_class(transformers: Any, checkpoint: Checkpoint) -> type[PreTrainedModel]:  # noqa: ANN401  # a module
    """The class the weights were saved from; AutoModel's choice where the config names none."""
    name = checkpoint.architecture
    config = checkpoint.model_folder / CONFIG
    version = transformers.__version__
    if name is None:
        with described(f"transformers {version} cannot build {checkpoint.model_folder}:"):
            kind = type(_configuration(transformers, checkpoint.model_folder))
            automatic: type[PreTrainedModel] = transformers.AutoModel._model_mapping[kind]
            return automatic
    named: object = getattr(transformers, name, None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        return named
    if "auto_map" in checkpoint.config:
        raise BadInputError(
            f"{config} wants to run Python code that comes with the checkpoint (auto_map, class "
            f"{name}); it is refused",
            hint="if you trust it, import that class in a file.py:callable of your own",
        )
    raise BadInputError(
        f"{config} names the architecture {name!r}, which transformers {version} does not have",
        hint="install the version of transformers the checkpoint was made with",
    )


@frozen
class HfSource:
    """A folder with config.json and weights, as save_pretrained writes it."""

    package: ClassVar[str] = "transformers"
    """What loads it."""
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
        """sha256 over config, weights, tokenizer, example inputs and the package's version."""
        checkpoint = read_checkpoint(self.folder)
        sentences = read_sentences(None) if self.options.inputs is None else ()
        version = str(installed_version(self.package))
        return key_of(*checkpoint.contents, *sentences, version, options_key(self.options))

    def structure(self) -> LoadedModule:
        """The model without values, its parameters on the meta device, and its example inputs.

        Raises BadInputError as `load` does, but for damaged weights.
        """
        return self._made(has_values=False)

    def load(self) -> LoadedModule:
        """The model with its trained weights in float32; a sentence encoder gives its embedding.

        Raises BadInputError for damaged or missing weights, MissingToolError without the package.
        """
        return self._made(has_values=True)

    def _made(self, *, has_values: bool) -> LoadedModule:
        checkpoint = read_checkpoint(self.folder)
        transformers = import_extra(self.package, "a Hugging Face checkpoint")
        build = _trained_model if has_values else _empty_model
        with silenced():
            model, notes = build(transformers, checkpoint)
            inputs = checkpoint_inputs(model, checkpoint, self.options)
        if checkpoint.pooling is None:
            give_tensors(model)
        else:
            give_embedding(model, checkpoint.pooling)
        loaded = with_free_sizes(loaded_module(model, inputs, bare=True))
        return replace(loaded, notes=notes)

    def stored(self, module: nn.Module) -> Store | None:
        """Where the checkpoint's files have the module's parameters, by their names in it.

        None where a file is no .safetensors, or a parameter is stored under another name.
        """
        files = read_checkpoint(self.folder).weights
        if any(file.suffix != ".safetensors" for file in files):
            return None
        store, missing = named_store(module, read_stores(files))
        return None if missing else store


def named_store(module: nn.Module, files: Store) -> tuple[Store, tuple[str, ...]]:
    """The arrays of `files` by the names of the module's parameters and buffers.

    Keys may begin with the name of the base model where the module's do not, and the other way
    round. Also the parameters that have no array of their shape.
    """
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    parameters = list(module.named_parameters(remove_duplicate=False))
    tensors = [*parameters, *module.named_buffers(remove_duplicate=False)]
    arrays: dict[int, StoredTensor] = {}
    for name, tensor in tensors:
        # bert.pooler.dense.weight may be pooler.dense.weight in the file, and the other way round
        keys = (name, f"{prefix}{name}", name.removeprefix(prefix))
        array = next((files[key] for key in keys if key in files), None)
        if array is not None and array.shape == tuple(tensor.shape):
            arrays.setdefault(id(tensor), array)  # tied parameters are stored once
    store = {name: arrays[id(tensor)] for name, tensor in tensors if id(tensor) in arrays}
    return store, tuple(name for name, _ in parameters if name not in store)


def open_hf(text: str, options: ExampleInputs) -> HfSource:
    """The source of a checkpoint folder."""
    return HfSource(text=text, folder=path_of(text), options=options)


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a Hugging Face class made it; whoever built it has imported transformers."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def checkpoint_inputs(
    model: PreTrainedModel, checkpoint: Checkpoint, options: ExampleInputs
) -> ExampleCall:
    """The user's inputs; else tokenised sentences, and what `invented_inputs` makes up."""
    folder = checkpoint.model_folder
    reads_text = model.main_input_name == "input_ids"
    if reads_text and options.input_shapes:
        raise BadInputError(
            f"{type(model).__name__} reads token ids; --input-shape makes floating-point inputs",
            hint="give sentences with --inputs FILE.txt, or ids with --inputs FILE.npz",
        )
    is_text = options.file is not None and options.file.suffix == ".txt"
    if is_text and not has_tokenizer(folder):
        raise BadInputError(
            f"{folder} has no tokenizer, so {options.inputs} cannot be read",
            hint="copy the tokenizer files into the folder, or give ids with --inputs FILE.npz",
        )
    size = image_size(folder)
    if not reads_text or not has_tokenizer(folder) or not (is_text or options.file is None):
        return inputs_from_options(model, options) or invented_inputs(model, options.seed, size)
    sentences = tokenised_sentences(folder, options.file)
    are = GIVEN
    if options.file is None:
        are = f"{len(sentences['input_ids'])} built-in example sentences"
    return replace(invented_inputs(model, options.seed, size, sentences), are=are)


def invented_inputs(
    model: PreTrainedModel,
    seed: int,
    image_size: tuple[int, int] | None = None,
    known: Tensors | None = None,
) -> ExampleCall:
    """The `known` inputs, and what else the model reads: random, of the sizes in its config.

    Two rows of 16 token ids, images, or Whisper's spectra; raises BadInputError for others.
    """
    import torch

    config: Any = model.config
    made = dict(known or {})
    rows = next(map(len, made.values()), _EXAMPLES)
    generator = torch.Generator().manual_seed(seed)
    for name in _read_by(model):
        if name == "input_ids" and name not in made:
            made[name] = _random_ids(config.get_text_config(), rows, generator)
            made["attention_mask"] = torch.ones_like(made[name])
        elif name not in made:
            shape = (rows, *_shape_of(model, name, image_size))
            made[name] = torch.randn(shape, generator=generator)
    accepted = inspect.signature(model.forward).parameters
    if "decoder_input_ids" in accepted:  # not that of a detector, which has a decoder too
        made["decoder_input_ids"] = _decoder_ids(config, made, rows, generator)
    taken = {name: tensor for name, tensor in made.items() if name in accepted}
    return ExampleCall(kwargs=taken, are=RANDOM)


def _decoder_ids(config: Any, made: Tensors, rows: int, generator: torch.Generator) -> torch.Tensor:  # noqa: ANN401  # transformers' own
    """The same text again; another where the model reads images or sound."""
    if "input_ids" in made:
        return made["input_ids"].clone()
    return _random_ids(config.get_text_config(decoder=True), rows, generator)


def _random_ids(text: Any, rows: int, generator: torch.Generator) -> torch.Tensor:  # noqa: ANN401  # transformers' own
    """Token ids of a configuration's vocabulary."""
    import torch

    limits = (getattr(text, name, _RANDOM_TOKENS) for name in _TEXT_LIMITS)
    size = rows, min(_RANDOM_TOKENS, *limits)
    return torch.randint(0, text.vocab_size, size, generator=generator)


def _read_by(model: PreTrainedModel) -> Iterator[str]:
    """The main input, and those of its other parts: CLIP compares texts with images.

    A model that generates text from text reads an image only where there is one.
    """
    main = model.main_input_name
    yield main
    accepted = inspect.signature(model.forward).parameters
    generates = main == "input_ids" and model.can_generate()
    has_parts = getattr(model.config, "sub_configs", ()) and not generates
    for name in _KINDS:
        one = accepted.get(name)
        if one is not None and (has_parts or one.default is one.empty):
            yield name


def _shape_of(
    model: PreTrainedModel, name: str, image_size: tuple[int, int] | None
) -> tuple[int, ...]:
    """The shape of one image, sound or spectrum; raises BadInputError for a config without it."""
    config: Any = model.config
    # a CLIP's sizes of images are in its vision_config
    parts = (getattr(config, part) for part in getattr(config, "sub_configs", ()))
    known = ChainMap(*(dict(vars(part)) for part in (config, *parts) if part is not None))
    if name == "pixel_values":
        size = known.get("image_size") or image_size or _USUAL_IMAGE  # a ResNet's names no size
        height, width = (size, size) if isinstance(size, int) else size
        image = (known.get("num_channels", 3), height, width)
        frames = known.get("num_frames")  # VideoMAE's, and of models like it
        return image if frames is None else (frames, *image)
    if name == "input_values" and "conv_stride" in known:  # wav2vec 2.0 and models like it
        return (_A_SECOND,)
    bins = known.get("num_mel_bins")
    positions = known.get("max_source_positions")
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
    # input_ids 20 x 27 and attention_mask 20 x 27: axis 1 of both is "sequence"
    tensors = (*loaded.args, *loaded.kwargs.values())
    lengths: dict[int, str] = {}
    free = []
    for name, tensor in zip(loaded.input_names or (), tensors, strict=False):
        axes = _free_axes(loaded.module, name, tensor)
        if not axes and tensor.dim() == 2 and tensor.shape[1] in lengths:
            axes = {1: lengths[tensor.shape[1]]}  # a mask, or ids beside the main input
        for axis, size in axes.items():
            lengths.setdefault(int(tensor.shape[axis]), size)
            free.append(DynamicAxis(input=name, axis=axis, name=size))
    longest = dict.fromkeys((_SEQUENCE, f"decoder_{_SEQUENCE}"), _most_tokens(loaded.module))
    return replace(loaded, dynamic=tuple(free), longest=longest)


def _most_tokens(module: nn.Module) -> int | None:
    """The longest text that the model has positions for; None: no limit is known."""
    config: Any = module.config
    text = config.get_text_config()
    most = next((getattr(text, name) for name in _TEXT_LIMITS if hasattr(text, name)), None)
    if not isinstance(most, int) or most <= 0:
        return None
    # RoBERTa and models like it count positions from behind the padding id: of 514 are left 512
    for name, table in module.named_modules():
        padding = getattr(table, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            return most - int(padding) - 1
    return most


def _free_axes(module: nn.Module, name: str, tensor: torch.Tensor) -> dict[int, str]:
    """Axes of an input that may have any size, and what each counts."""
    rank = tensor.dim()
    axes: dict[int, str] = {}
    if name == "input_ids" and rank > 1:
        axes = {1: _SEQUENCE}
    elif name.startswith("decoder_") and rank > 1:
        axes = {1: f"decoder_{_SEQUENCE}"}
    elif name == "pixel_values" and rank == 4:
        axes = {2: "height", 3: "width"}
    elif name == "input_values" and rank > 1:  # sound, or spectra of it
        axes = {1: "samples" if rank == 2 else "frames"}
    elif name == "input_features" and rank == 3:
        bins = getattr(module.config, "num_mel_bins", None)
        axes = {2 if tensor.shape[1] == bins else 1: "frames"}
    return axes


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
        return {"sentence_embedding": vector}

    _replace_forward(model, embedding)


def _replace_forward(
    model: PreTrainedModel, finish: Callable[[Any, Mapping[str, Any]], object]
) -> None:
    # no key-value cache among the outputs; named outputs inside, which decoders rely on
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False
        config.return_dict = True
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
