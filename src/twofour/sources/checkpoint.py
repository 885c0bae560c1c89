"""A checkpoint folder: its configuration and its weights."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twofour.errors import BadInputError, system_errors
from twofour.export.model_code import described
from twofour.graph.stored import read_header
from twofour.sources.source import CONFIG, MODULES, import_extra
from twofour.store import sha256_file

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

PREPROCESSOR = "preprocessor_config.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "merges.txt",
    "spiece.model", "sentencepiece.bpe.model", "spm.model", "bpe.codes",
)  # fmt: skip
SETTINGS_FILES = (
    CONFIG, MODULES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    PREPROCESSOR, "sentence_bert_config.json",
)  # fmt: skip
_BUILT_IN_SENTENCES = Path(__file__).with_name("sentences.txt")
_MOST_TOKENS = 512
"""Most tokens of a sentence where neither tokenizer nor config names a number."""
_WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"),
    (
        "diffusion_pytorch_model.fp16.safetensors",
        "diffusion_pytorch_model.safetensors.index.fp16.json",
    ),
)
"""A file with all weights, or the index of several; the first that is there is read."""
POOLING_MODES = ("cls", "max", "mean")
"""What can be read; where a folder names several, their vectors are joined in its order."""
_LEGACY = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The flags of older releases and the mode each stands for, in the order of joining."""
_ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_REFUSED = re.compile(r"GLOBAL (\S+)")
"""In torch's message: the name its restricted unpickler did not allow."""


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has the files of a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def read_json(path: Path) -> object:
    """Parse a JSON file; raises BadInputError when it is missing or damaged."""
    try:
        with system_errors(f"cannot read {path}"):
            content: object = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path} is not JSON: {error}") from error
    return content


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises BadInputError for a list, a number or a text too."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise BadInputError(f"{path} contains no JSON object")
    return content


def read_sentences(path: Path | None) -> tuple[str, ...]:
    """The lines of a text file that are not blank; for None the 20 sentences that come along."""
    path = path or _BUILT_IN_SENTENCES
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read sentences from {path}: {error}") from error
    sentences = tuple(line.strip() for line in lines if line.strip())
    if not sentences:
        raise BadInputError(f"{path} contains no sentence", hint="write one sentence on each line")
    return sentences


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The modules of a sentence encoder that come after the transformer."""

    modes: tuple[str, ...]
    normalize: bool
    """Whether the vector is brought to length 1."""
    files: tuple[Path, ...]
    """What this was read from, modules.json aside."""


def transformer_folder(folder: Path, modules: object) -> Path:
    """Folder of the transformer itself: "" (new) or "0_Transformer" (old) in modules.json."""
    kinds = _kinds(folder, modules)
    if not kinds or kinds[0][0] != "Transformer":
        raise BadInputError(f"{folder / 'modules.json'} does not begin with a Transformer")
    return folder / kinds[0][1]


def described_in(folder: Path) -> Path:
    """Where tokenizer and image processor are described: Optimum writes onnx/ below them."""
    if (folder / MODULES).is_file():
        with contextlib.suppress(BadInputError):  # whoever reads the checkpoint will say so
            return transformer_folder(folder, read_json(folder / MODULES))
    above = folder.absolute().parent
    files = (*TOKENIZER_FILES, PREPROCESSOR, MODULES)
    here, there = (any((place / name).is_file() for name in files) for place in (folder, above))
    return described_in(above) if folder.name == "onnx" and there and not here else folder


def read_pooling(folder: Path, modules: object) -> Pooling:
    """The modules behind the transformer; raises BadInputError for one that is not known."""
    kinds = _kinds(folder, modules)
    names = [kind for kind, _ in kinds]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise BadInputError(
            f"{folder} is a sentence encoder made of {' + '.join(names)}; "
            "only Transformer + Pooling (+ Normalize) can be read",
            hint="write a file.py:callable that returns the whole model",
        )
    config = folder / kinds[1][1] / "config.json"
    return Pooling(modes=_modes(config), normalize=names[-1] == "Normalize", files=(config,))


def _kinds(folder: Path, modules: object) -> list[tuple[str, str]]:
    """Class name and folder of each module."""
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise BadInputError(f"{folder / 'modules.json'} is not a list of modules")
    kinds = [(str(m.get("type")).rpartition(".")[2], str(m.get("path", ""))) for m in modules]
    for _, path in kinds:
        if not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise BadInputError(f"{folder / 'modules.json'} points outside its folder: {path!r}")
    return kinds


def _modes(config: Path) -> tuple[str, ...]:
    options = read_json_object(config)
    named = options.get("pooling_mode")
    if named is None:
        named = [mode for flag, mode in _LEGACY.items() if options.get(flag) is True] or "mean"
    modes = [str(mode) for mode in (named if isinstance(named, list) else [named])]
    unknown = [mode for mode in modes if mode not in POOLING_MODES]
    if unknown:
        raise BadInputError(
            f"{config} pools by {', '.join(unknown)}; only {', '.join(POOLING_MODES)} can be read",
            hint="write a file.py:callable that returns the whole model",
        )
    return tuple(modes)


def check_weight_file(path: Path) -> None:
    """Raise BadInputError for a damaged file, and for a pickle that is more than tensors."""
    if path.suffix != ".safetensors":
        load_pickle(path, mapped=True)
    elif not read_header(path):
        raise BadInputError(f"{path} contains no tensors")


def load_pickle(path: Path, *, mapped: bool = False) -> object:
    """The content of a .bin or .pt file; raises BadInputError as `check_weight_file` does."""
    import torch

    try:
        mapped = mapped and zipfile.is_zipfile(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols
            content: object = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        what = "damaged, or a pickle of more than tensors, which would run code that came with it"
        hint = "copy or download it again"
        if refused := _REFUSED.search(str(error)):
            what = (
                f"a pickle that wants to call {refused[1]}: reading it would run code that came "
                "with the file, so it is refused"
            )
            hint = "if you trust its author, load it and torch.save(model.state_dict(), 'x.pt')"
        raise BadInputError(f"{path} is {what}", hint=hint) from error
    except Exception as error:  # a damaged pickle ends in whatever its next opcode meets
        said = str(error).strip().partition("\n")[0][:200]
        raise BadInputError(
            f"{path} is damaged or incomplete: {type(error).__name__}: {said}",
            hint="copy or download it again",
        ) from error
    return content


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a torch checkpoint (.pt, .pth, .bin), read without running its code.

    A state_dict, or a dict that has one under "state_dict" or "model". Raises BadInputError for a
    damaged file, a pickle that wants to call something, and a file without tensors.
    """
    import torch

    content = load_pickle(path)
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        content = {}
    packed = [str(key) for key in content if str(key).endswith("._packed_params")]
    if packed:
        raise BadInputError(
            f"{path}: {packed[0]} is packed by torch.ao: it cannot be read weight by weight",
            hint="take the state_dict of the model before it was quantised, or its ONNX file",
        )
    tensors = {str(k): v for k, v in content.items() if isinstance(v, torch.Tensor)}
    if not tensors:
        raise BadInputError(f"{path} contains no named tensors", hint="save model.state_dict()")
    return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a checkpoint folder holds."""

    folder: Path
    model_folder: Path
    """Where config.json and the weights lie: older sentence encoders have them one level down."""
    config: dict[str, Any]
    """config.json; its keys are the affair of transformers or diffusers."""
    pooling: Pooling | None
    """For a sentence encoder: how token vectors become one vector."""

    @property
    def architecture(self) -> str | None:
        """Name of the class the weights were saved from."""
        names = self.config.get("architectures")
        first = names[0] if isinstance(names, list) and names else None
        return first if isinstance(first, str) else None

    @property
    def weights(self) -> tuple[Path, ...]:
        """.safetensors files, or .bin files where there are none; raises BadInputError for none."""
        return _weight_files(self.model_folder)

    @property
    def has_weights(self) -> bool:
        """Whether there are files with weights: config.json is all that a forecast needs."""
        return any((self.model_folder / name).is_file() for names in _WEIGHTS for name in names)

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that determine the model and its example inputs."""
        indices = (index for _, index in _WEIGHTS)
        names = (*SETTINGS_FILES, *TOKENIZER_FILES, *indices)
        folders = dict.fromkeys((self.folder, self.model_folder))
        present = [f / name for f in folders for name in names if (f / name).is_file()]
        poolings = () if self.pooling is None else self.pooling.files
        return (*present, *poolings, *self.weights)

    @property
    def contents(self) -> tuple[str, ...]:
        """Name and sha256 of each of these files."""
        named = ((str(f.relative_to(self.folder)), sha256_file(f)) for f in self.files)
        return tuple(chain.from_iterable(named))


def read_checkpoint(folder: Path) -> Checkpoint:
    """The JSON files of a checkpoint folder; raises BadInputError for a damaged one."""
    pooling, model_folder = None, folder
    if (folder / MODULES).is_file():
        modules = read_json(folder / MODULES)
        model_folder = transformer_folder(folder, modules)
        pooling = read_pooling(folder, modules)
    config = read_json_object(model_folder / CONFIG)
    _refuse_downloaded_kernels(config, model_folder / CONFIG)
    return Checkpoint(
        folder=folder,
        model_folder=model_folder,
        config=config,
        pooling=pooling,
    )


def _refuse_downloaded_kernels(config: dict[str, Any], path: Path) -> None:
    """An attention implementation called `owner/name` is code to be downloaded."""
    waiting = [config]
    while waiting:
        part = waiting.pop()
        for name in _ATTENTION:
            value = part.get(name)
            if value is not None and "/" in str(value):
                raise BadInputError(
                    f"{path} asks for the attention kernel {value!r}, which is code to be "
                    "downloaded and run; it is refused",
                    hint=f"remove {name!r} from the file",
                )
        waiting += [value for value in part.values() if isinstance(value, dict)]


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """The same order of preference as transformers' from_pretrained."""
    for name, index in _WEIGHTS:
        if (folder / name).is_file():
            return (folder / name,)
        if (folder / index).is_file():
            shards = weight_map(folder / index).values()
            return tuple(folder / shard for shard in sorted(set(shards)))
    present = ", ".join(sorted(f.name for f in folder.iterdir())) or "nothing"
    raise BadInputError(
        f"{folder} has no weights: neither {' nor '.join(name for name, _ in _WEIGHTS[:3])} "
        f"(it contains {present[:300]})",
        hint="save it with model.save_pretrained(folder); an adapter must be merged first",
    )


def weight_map(index: Path) -> dict[str, str]:
    """Key -> name of the file that contains the tensor; raises BadInputError for a missing file."""
    mapping = read_json_object(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise BadInputError(f"{index} has no weight_map")
    there = {file.name for file in index.parent.iterdir() if file.is_file()}
    for name in map(str, mapping.values()):
        if name not in there:
            raise BadInputError(
                f"{index} names the weights {name[:200]!r}, and there is no such file beside it",
                hint="copy all parts of the checkpoint into the folder",
            )
    return {key: str(name) for key, name in mapping.items()}


def open_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer, with a token to pad with; raises what transformers raises."""
    transformers = import_extra("transformers", "a tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    if tokenizer.pad_token is None:  # decoders have none; the mask hides whatever stands there
        tokenizer.pad_token = (
            tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
        )
    return tokenizer


def reading(folder: Path, tokenizer: Any, *limits: int | None) -> tuple[int, bool]:  # noqa: ANN401  # transformers' own
    """Most tokens of a text, and whether it is written in lower case, by the folder's files.

    Those of a sentence encoder say less than the model could read: what it was trained on.
    """
    sentence, config = (
        read_json_object(folder / name) if (folder / name).is_file() else {}
        for name in ("sentence_bert_config.json", CONFIG)
    )
    most = config.get("max_position_embeddings")
    kind, padding = str(config.get("model_type")), config.get("pad_token_id", 1)
    if isinstance(most, int) and ("roberta" in kind or "camembert" in kind):
        most -= (padding if isinstance(padding, int) else 1) + 1  # positions count from behind it
    stated = (tokenizer.model_max_length, sentence.get("max_seq_length"), most, *limits)
    known = [limit for limit in stated if isinstance(limit, (int, float)) and limit > 0]
    return int(min(known)), sentence.get("do_lower_case") is True


def tokenised_sentences(folder: Path, file: Path | None) -> dict[str, torch.Tensor]:
    """Token ids, mask and so on, [sentences, longest sentence], padded to that length."""
    sentences = read_sentences(file)
    hint = "give token ids with --inputs FILE.npz"
    with described(f"the tokenizer in {folder} cannot be used:", hint=hint):
        tokenizer = open_tokenizer(folder)
        longest, lower_case = reading(folder, tokenizer, _MOST_TOKENS)
        encoded = tokenizer(
            [sentence.lower() if lower_case else sentence for sentence in sentences],
            padding=True,
            truncation=True,
            max_length=longest,
            return_tensors="pt",
        )
    return dict(encoded)


def image_size(folder: Path) -> tuple[int, int] | None:
    """Height and width of the model's images as preprocessor_config.json has them."""
    file = folder / PREPROCESSOR
    settings = read_json_object(file) if file.is_file() else {}
    for name in ("crop_size", "size"):
        size = settings.get(name)
        if isinstance(size, int):
            return (size, size)
        if isinstance(size, dict) and isinstance(size.get("height"), int):
            return (size["height"], size["width"])
        if isinstance(size, dict) and isinstance(size.get("shortest_edge"), int):
            return (size["shortest_edge"], size["shortest_edge"])
    return None
