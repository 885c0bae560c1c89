"""A Hugging Face checkpoint folder as a source."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from twofour.errors import BadInputError, MissingToolError
from twofour.export.model_code import described
from twofour.pipeline.sources.checkpoint import (
    Checkpoint,
    check_weight_file,
    is_checkpoint,
    read_checkpoint,
)
from twofour.pipeline.sources.inputs import read_sentences
from twofour.pipeline.sources.source import (
    LoadedModule,
    import_extra,
    key_of,
    loaded_module,
    options_key,
    path_of,
    safe_name,
)
from twofour.records.options import ExampleInputs
from twofour.store import sha256_file
from twofour.version import installed_version
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
        raise _untrained(checkpoint, model, missing or tuple(map(str, info["mismatched_keys"])))
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

    try:
        model, info = model_class.from_pretrained(
            checkpoint.model_folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=checkpoint.weights[0].suffix == ".safetensors",
            output_loading_info=True,
            **{_dtype_option(transformers): torch.float32},
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


def _dtype_option(transformers: ModuleType) -> str:
    """from_pretrained's argument was renamed in 4.56."""
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return "dtype" if (major, minor) >= (4, 56) else "torch_dtype"


def _untrained(checkpoint: Checkpoint, model: nn.Module, names: tuple[str, ...]) -> BadInputError:
    return BadInputError(
        f"{checkpoint.folder} has no trained values for {len(names)} weights of "
        f"{type(model).__name__}: {keys_listed(names)}; they would be random",
        hint="let 'architectures' in config.json name the class the weights were saved from",
    )


def _notes(model: nn.Module, unused: tuple[str, ...]) -> tuple[str, ...]:
    if not unused:
        return ()
    return (
        f"{len(unused)} weights of the checkpoint are not part of {type(model).__name__} "
        f"and are left out: {keys_listed(unused)}",
    )


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
        """sha256 over config, weights, tokenizer, example inputs and transformers' version.

        Raises BadInputError when the folder is no whole checkpoint.
        """
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
        """The model with its parameters on the meta device, in eval mode.

        Raises BadInputError where transformers does not know or cannot build it.
        """
        from twofour.pruning.torch_checkpoint import without_values

        checkpoint = read_checkpoint(self.folder)
        transformers = import_extra("transformers", "hf", "a Hugging Face checkpoint")
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
        """The model with its trained weights; a sentence encoder gives its embedding.

        Weights are float32 whatever the file holds: the export brings them to the precision asked
        for, and float32 holds float16 and bfloat16 exactly. Raises BadInputError for a damaged or
        unsafe checkpoint and where a weight of the model is not in the files, and MissingToolError
        without transformers.
        """
        from twofour.pipeline.sources.hf_io import (
            checkpoint_inputs,
            give_embedding,
            give_tensors,
            with_free_sizes,
        )

        checkpoint = read_checkpoint(self.folder)
        transformers = import_extra("transformers", "hf", "a Hugging Face checkpoint")
        for file in checkpoint.weights:
            check_weight_file(file)
        with _quiet(transformers):
            model, unused = _trained_model(transformers, checkpoint)
            inputs = checkpoint_inputs(model, checkpoint, self.options)
        if checkpoint.pooling is None:
            give_tensors(model)
        else:
            give_embedding(model, checkpoint.pooling)
        loaded = loaded_module(model, inputs.args, inputs.kwargs, _notes(model, unused))
        return with_free_sizes(loaded)


def is_hf(_text: str, path: Path) -> bool:
    """Whether there is a folder that looks like a checkpoint."""
    return path.is_dir() and is_checkpoint(path)


def open_hf(text: str, options: ExampleInputs) -> HfSource:
    """The folder, unread."""
    return HfSource(text=text, folder=path_of(text), options=options)
