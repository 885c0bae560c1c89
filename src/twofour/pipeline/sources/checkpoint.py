"""A Hugging Face checkpoint folder: which files it has and what its config says, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twofour.errors import BadInputError
from twofour.pipeline.sources.json_file import read_json, read_json_object
from twofour.pipeline.sources.pooling import Pooling, read_pooling, transformer_folder

CONFIG = "config.json"
MODULES = "modules.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "merges.txt",
    "spiece.model", "sentencepiece.bpe.model", "spm.model", "bpe.codes",
)  # fmt: skip
_OTHER_FILES = (
    CONFIG, MODULES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "preprocessor_config.json", "sentence_bert_config.json",
)  # fmt: skip
_SAFE = "model.safetensors"
_PICKLE = "pytorch_model.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a checkpoint folder holds."""

    folder: Path
    model_folder: Path
    """Where config.json and the weights lie: older sentence encoders have them one level down."""
    config: dict[str, Any]
    """config.json; its keys are transformers' affair."""
    weights: tuple[Path, ...]
    """.safetensors files, or .bin files where there are none of those."""
    pooling: Pooling | None
    """For a sentence encoder: how token vectors become one vector."""

    @property
    def architecture(self) -> str | None:
        """Name of the class the weights were saved from."""
        names = self.config.get("architectures")
        first = names[0] if isinstance(names, list) and names else None
        return first if isinstance(first, str) else None

    @property
    def has_tokenizer(self) -> bool:
        """Whether sentences can be turned into token ids."""
        return any((self.model_folder / name).is_file() for name in TOKENIZER_FILES)

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that determine the model and its example inputs."""
        names = (*_OTHER_FILES, *TOKENIZER_FILES, f"{_SAFE}.index.json", f"{_PICKLE}.index.json")
        folders = dict.fromkeys((self.folder, self.model_folder))
        present = [f / name for f in folders for name in names if (f / name).is_file()]
        poolings = () if self.pooling is None else self.pooling.files
        return (*present, *poolings, *self.weights)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like one: config.json, or modules.json for a sentence encoder."""
    return (folder / CONFIG).is_file() or (folder / MODULES).is_file()


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the JSON files of a checkpoint folder and find its weights.

    Raises BadInputError where a file is missing or damaged, or where the checkpoint wants its own
    Python code or a downloaded attention kernel to be run.
    """
    pooling, model_folder = None, folder
    if (folder / MODULES).is_file():
        modules = read_json(folder / MODULES)
        model_folder = transformer_folder(folder, modules)
        pooling = read_pooling(folder, modules)
    config = read_json_object(model_folder / CONFIG)
    _refuse_foreign_kernels(config, model_folder / CONFIG)
    return Checkpoint(
        folder=folder,
        model_folder=model_folder,
        config=config,
        weights=_weight_files(model_folder),
        pooling=pooling,
    )


def _refuse_foreign_kernels(config: dict[str, Any], path: Path) -> None:
    """An attention implementation called `owner/name` is code that transformers would download."""
    for name in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
        value = config.get(name)
        if value is not None and "/" in str(value):
            raise BadInputError(
                f"{path} asks for the attention kernel {value!r}, which is code to be downloaded "
                "and run; it is refused",
                hint=f"remove {name!r} from the file",
            )


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """The same order of preference as transformers' from_pretrained."""
    for name in (_SAFE, _PICKLE):
        if (folder / name).is_file():
            return (folder / name,)
        if (folder / f"{name}.index.json").is_file():
            return _shards(folder / f"{name}.index.json")
    present = ", ".join(sorted(f.name for f in folder.iterdir())) or "nothing"
    raise BadInputError(
        f"{folder} has no weights: neither {_SAFE} nor {_PICKLE} (it holds {present[:300]})",
        hint="save it with model.save_pretrained(folder); an adapter must be merged first",
    )


def _shards(index: Path) -> tuple[Path, ...]:
    mapping = read_json_object(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise BadInputError(f"{index} has no weight_map")
    names = sorted({str(name) for name in mapping.values()})
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise BadInputError(
                f"{index} names the weights {name!r}, and there is no such file beside it",
                hint="copy all parts of the checkpoint into the folder",
            )
    return tuple(index.parent / name for name in names)
