"""A Hugging Face checkpoint folder, and a timm model, as sources."""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from twofour.errors import BadInputError, MissingToolError
from twofour.export.model_code import described
from twofour.packages import installed_version
from twofour.records.options import ExampleInputs
from twofour.sources.checkpoint import (
    Checkpoint,
    check_weight_file,
    read_checkpoint,
    read_sentences,
)
from twofour.sources.source import (
    Arguments,
    LoadedModule,
    import_extra,
    inputs_from_options,
    key_of,
    loaded_module,
    options_key,
    safe_name,
)
from twofour.sources.user_code import seed_everything
from twofour.store import sha256_file
from twofour.words import keys_listed

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def _trained_model(
    transformers: ModuleType, checkpoint: Checkpoint
) -> tuple[nn.Module, tuple[str, ...]]:
    """The model, and the names of weights in the files that it has no place for."""
    model_class = _model_class(transformers, checkpoint)
    model, info = _from_pretrained(transformers, model_class, checkpoint)
    missing = tuple(sorted(info["missing_keys"]))
    if missing and all(name.startswith("pooler.") for name in missing):
        # Saved without a pooler, as most encoders are: then the model is to have none either.
        accepted = inspect.signature(type(model).__init__).parameters
        if "add_pooling_layer" in accepted:
            model, info = _from_pretrained(
                transformers, model_class, checkpoint, add_pooling_layer=False
            )
            missing = tuple(sorted(info["missing_keys"]))
    if missing or info["mismatched_keys"]:
        names = missing or tuple(map(str, info["mismatched_keys"]))
        raise BadInputError(
            f"{checkpoint.folder} has no trained values for {len(names)} weights of "
            f"{type(model).__name__}: {keys_listed(names)}; they would be random",
            hint="let 'architectures' in config.json name the class the weights were saved from",
        )
    return model, tuple(sorted(info["unexpected_keys"]))


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
            hint="where you trust it, import that class in a file.py:callable of your own",
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
    except Exception as error:
        raise BadInputError(
            f"transformers {transformers.__version__} cannot load {checkpoint.folder}: "
            f"{described(error)}",
            hint="compare config.json with the weights: sizes and number of layers must agree",
        ) from error
    return model, info


@contextlib.contextmanager
def _quiet(transformers: ModuleType) -> Iterator[None]:
    """Hold back transformers' progress bars and its report of weights; our own errors name them."""
    logging = transformers.utils.logging
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

    def key(self) -> str:
        """sha256 over config, weights, tokenizer, example inputs and transformers' version."""
        checkpoint = read_checkpoint(self.folder)
        parts = [
            part
            for file in checkpoint.files
            for part in (str(file.relative_to(self.folder)), sha256_file(file))
        ]
        if self.options.inputs is None:
            parts.extend(read_sentences(None))
        return key_of(
            *parts, installed_version("transformers") or "none", options_key(self.options)
        )

    def without_values(self) -> nn.Module:
        """The model with its parameters on the meta device, in eval mode."""
        from twofour.pruning.torch.streamed import without_values

        checkpoint = read_checkpoint(self.folder)
        transformers = import_extra("transformers", "a Hugging Face checkpoint")
        with _quiet(transformers):
            model_class = _model_class(transformers, checkpoint)
            try:
                config = transformers.AutoConfig.from_pretrained(
                    checkpoint.model_folder, local_files_only=True, trust_remote_code=False
                )
                with without_values():
                    model: nn.Module = model_class._from_config(config)
            except Exception as error:
                raise BadInputError(
                    f"transformers {transformers.__version__} cannot build {self.folder}: "
                    f"{described(error)}"
                ) from error
        return model.eval()

    def load(self) -> LoadedModule:
        """The model with its trained weights in float32; a sentence encoder gives its embedding.

        Raises BadInputError for a damaged checkpoint and where a weight is not in the files, and
        MissingToolError without transformers.
        """
        from twofour.sources.hf_io import (
            checkpoint_inputs,
            give_embedding,
            give_tensors,
            with_free_sizes,
        )

        checkpoint = read_checkpoint(self.folder)
        transformers = import_extra("transformers", "a Hugging Face checkpoint")
        for file in checkpoint.weights:
            check_weight_file(file)
        with _quiet(transformers):
            model, unused = _trained_model(transformers, checkpoint)
            inputs = checkpoint_inputs(model, checkpoint, self.options)
        if checkpoint.pooling is None:
            give_tensors(model)
        else:
            give_embedding(model, checkpoint.pooling)
        notes = (
            f"{len(unused)} weights of the checkpoint are not part of {type(model).__name__} "
            f"and are left out: {keys_listed(unused)}",
        )
        loaded = loaded_module(model, inputs.args, inputs.kwargs, notes if unused else ())
        return with_free_sizes(loaded)


_ROWS = 2
_PREFIX = "timm:"
_PRETRAINED = {"": True, "pretrained=true": True, "pretrained=false": False}


def _create(timm: ModuleType, name: str, *, pretrained: bool) -> nn.Module:
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained)
    except Exception as error:
        reason = f"timm cannot create {name!r}: {described(error)}"
        if not pretrained:
            raise BadInputError(reason) from error
        raise BadInputError(
            reason,
            hint="its trained weights are downloaded on first use; without a network, give "
            f"timm:{name}?pretrained=false for random weights, or a file.py:callable",
        ) from error
    return model


def _images(model: nn.Module, seed: int) -> Arguments:
    import torch

    settings = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    size = settings.get("input_size") if isinstance(settings, dict) else None
    if not size:
        raise BadInputError(
            f"{type(model).__name__} does not say which images it takes",
            hint="give --input-shape 2x3x224x224",
        )
    generator = torch.Generator().manual_seed(seed)
    return Arguments(args=(torch.randn((_ROWS, *size), generator=generator),))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimmSource:
    """A model of the timm library by its name."""

    text: str
    model: str
    pretrained: bool
    options: ExampleInputs

    @property
    def name(self) -> str:
        """The name timm knows it by."""
        return safe_name(self.model)

    def key(self) -> str:
        """sha256 over timm's version, the name and the options."""
        version = installed_version("timm") or "none"
        return key_of(version, self.model, str(self.pretrained), options_key(self.options))

    def load(self) -> LoadedModule:
        """The model, with 2 random images as example inputs unless the user gives others."""
        timm = import_extra("timm", "a timm: model")
        if not timm.is_model(self.model.partition(".")[0]):
            close = difflib.get_close_matches(self.model, timm.list_models(), n=3)
            raise BadInputError(
                f"timm {timm.__version__} has no model {self.model!r}",
                hint=f"did you mean {', '.join(close)}?" if close else "see timm.list_models()",
            )
        seed_everything(self.options.seed)
        model = _create(timm, self.model, pretrained=self.pretrained)
        inputs = inputs_from_options(model, self.options) or _images(model, self.options.seed)
        return loaded_module(model, inputs.args, inputs.kwargs)


def open_timm(text: str, options: ExampleInputs) -> TimmSource:
    """Read `timm:NAME`; raises BadInputError for another option than pretrained."""
    name, _, query = text.removeprefix(_PREFIX).partition("?")
    if not name or query not in _PRETRAINED:
        raise BadInputError(
            f"{text!r} names no timm model",
            hint="write timm:resnet50, or timm:resnet50?pretrained=false for random weights",
        )
    return TimmSource(text=text, model=name, pretrained=_PRETRAINED[query], options=options)
