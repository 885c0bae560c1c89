"""A checkpoint folder: its configuration and its weights."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twofour.errors import BadInputError, first_line, system_errors
from twofour.export.model_code import described
from twofour.graph.stored import read_header
from twofour.records import frozen
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
_MOST_LETTERS = 1 << 16
"""Letters of a text that are read: no limit of tokens reaches further."""
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
_POOLING_MODES = ("cls", "max", "mean")
"""What can be read; where a folder names several, their vectors are joined in its order."""
_POOLING_FLAG = re.compile(r"pooling_mode_(\w+?)(_tokens?)?")
"""The flags of older releases: `"pooling_mode_mean_tokens": true` is the mode mean."""
_WHOLE_MODEL = "write a file.py:callable that returns the whole model"
_ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_SKIPPING = ("roberta", "roberta-xl", "camembert")
"""Models that count positions from behind their padding id, 1."""
_REFUSED = re.compile(r"GLOBAL (\S+)")
"""In torch's message: the name its restricted unpickler did not allow."""


def _has_one(folder: Path, names: Iterable[str]) -> bool:
    return any((folder / name).is_file() for name in names)


def settings_in(folder: Path) -> list[Path]:
    """The files of a folder that say how a model, its texts and its images are read."""
    indices = (index for _, index in _WEIGHTS)
    names = (*SETTINGS_FILES, *TOKENIZER_FILES, *indices)
    return [folder / name for name in names if (folder / name).is_file()]


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has the files of a tokenizer."""
    return _has_one(folder, TOKENIZER_FILES)


def _read_json(path: Path) -> object:
    try:
        with system_errors(f"cannot read {path}"):
            content: object = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path} is not JSON: {error}") from error
    return content


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises BadInputError where it is missing, damaged or a list."""
    content = _read_json(path)
    if not isinstance(content, dict):
        raise BadInputError(f"{path} contains no JSON object")
    return content


def _settings(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no such file."""
    return read_json_object(path) if path.is_file() else {}


def read_texts(path: Path) -> Iterator[str]:
    """Texts on the lines of a file, blank ones left out.

    Raises BadInputError where the file cannot be read, or a line of .jsonl has no text.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                text = line.strip()
                if text and path.suffix.lower() == ".jsonl":
                    text = _text_of(text, f"{path}, line {number}")
                if text:
                    yield text[:_MOST_LETTERS]
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read texts from {path}: {error}") from error


def _text_of(line: str, where: str) -> str:
    """The text of a line like {"text": "...", "id": 3}."""
    try:
        text: str = json.loads(line)["text"].strip()
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        hint = 'write {"text": "..."} on each line'
        raise BadInputError(f"{where} has no text", hint=hint) from None
    return text


def read_sentences(path: Path | None) -> tuple[str, ...]:
    """The lines of a text file that are not blank; for None the 20 sentences that come along."""
    sentences = tuple(read_texts(path or _BUILT_IN_SENTENCES))
    if not sentences:
        raise BadInputError(f"{path} contains no sentence", hint="write one sentence on each line")
    return sentences


@frozen
class Pooling:
    """The modules of a sentence encoder that come after the transformer."""

    modes: tuple[str, ...]
    normalize: bool
    """Whether the vector is brought to length 1."""
    file: Path
    """What the modes were read from."""


def described_in(folder: Path) -> Path:
    """Where tokenizer and image processor are described: Optimum writes onnx/ below them."""
    if (folder / MODULES).is_file():
        with contextlib.suppress(BadInputError):  # whoever reads the checkpoint will say so
            return _transformer_folder(folder)
    names = (*TOKENIZER_FILES, PREPROCESSOR, MODULES)
    if folder.name == "onnx" and not _has_one(folder, names):
        return described_in(folder.absolute().parent)
    return folder


def _transformer_folder(folder: Path) -> Path:
    """Folder of the transformer itself: "" (new) or "0_Transformer" (old) in modules.json."""
    modules = _modules(folder)
    if not modules or modules[0][0] != "Transformer":
        raise BadInputError(f"{folder / MODULES} does not begin with a Transformer")
    return folder / modules[0][1]


def _read_pooling(folder: Path) -> Pooling:
    """The modules behind the transformer; raises BadInputError for one that is not known."""
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise BadInputError(
            f"{folder} is a sentence encoder made of {' + '.join(kinds)}; "
            "only Transformer + Pooling (+ Normalize) can be read",
            hint=_WHOLE_MODEL,
        )
    config = folder / modules[1][1] / CONFIG
    return Pooling(modes=_modes(config), normalize=kinds[-1] == "Normalize", file=config)


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Class name and folder of each module of a sentence encoder."""
    file = folder / MODULES
    entries = _read_json(file)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadInputError(f"{file} is not a list of modules")
    modules = []
    # {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"} -> Pooling, 1_Pooling
    for entry in entries:
        path = str(entry.get("path", ""))
        if not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise BadInputError(f"{file} points outside its folder: {path!r}")
        modules.append((str(entry.get("type")).rpartition(".")[2], path))
    return modules


def _modes(config: Path) -> tuple[str, ...]:
    """How vectors of tokens become one: the modes in the order in which their vectors join."""
    options = read_json_object(config)
    modes = options.get("pooling_mode")
    if modes is None:
        flags = (_POOLING_FLAG.fullmatch(name) for name, value in options.items() if value is True)
        modes = sorted(flag[1] for flag in flags if flag) or "mean"
    if not isinstance(modes, list):
        modes = [modes]
    unknown = [str(mode) for mode in modes if mode not in _POOLING_MODES]
    if unknown:
        raise BadInputError(
            f"{config} pools by {', '.join(unknown)}; only {', '.join(_POOLING_MODES)} can be read",
            hint=_WHOLE_MODEL,
        )
    return tuple(modes)


def check_weight_file(path: Path) -> Collection[str]:
    """The keys of a file; BadInputError if it is damaged, or a pickle of more than tensors."""
    if path.suffix != ".safetensors":
        content = load_pickle(path)
        return content.keys() if isinstance(content, dict) else ()
    keys = read_header(path).keys()
    if not keys:
        raise BadInputError(f"{path} contains no tensors")
    return keys


def load_pickle(path: Path) -> object:
    """The content of a .bin or .pt file; raises BadInputError as `check_weight_file` does."""
    import torch

    hint = "copy or download it again"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols
            content: object = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except pickle.UnpicklingError as error:
        what = "damaged, or a pickle of more than tensors"
        if refused := _REFUSED.search(str(error)):
            what = f"a pickle that wants to call {refused[1]}"
            hint = "if you trust its author, load it and torch.save(model.state_dict(), 'x.pt')"
        raise BadInputError(
            f"{path} is {what}: reading it could run code that came with it, so it is refused",
            hint=hint,
        ) from error
    except Exception as error:  # a damaged pickle ends in whatever its next opcode meets
        reason = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise BadInputError(f"{path} is damaged or incomplete: {reason}", hint=hint) from error
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
    tensors = {str(key): v for key, v in content.items() if isinstance(v, torch.Tensor)}
    if not tensors:
        raise BadInputError(f"{path} contains no named tensors", hint="save model.state_dict()")
    return tensors


@frozen
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
        return _has_one(self.model_folder, chain.from_iterable(_WEIGHTS))

    @property
    def keys(self) -> list[str]:
        """Names of the arrays in the files; raises BadInputError as `check_weight_file` does."""
        return list(chain.from_iterable(map(check_weight_file, self.weights)))

    @property
    def contents(self) -> tuple[str, ...]:
        """Name and sha256 of all files that determine the model and its example inputs."""
        files = [*self.weights]
        if self.pooling is not None:
            files.append(self.pooling.file)
        for folder in dict.fromkeys((self.folder, self.model_folder)):
            files += settings_in(folder)
        return tuple(f"{file.relative_to(self.folder)} {sha256_file(file)}" for file in files)


def read_checkpoint(folder: Path) -> Checkpoint:
    """The JSON files of a checkpoint folder; raises BadInputError for a damaged one."""
    pooling = None
    model_folder = folder
    if (folder / MODULES).is_file():
        model_folder = _transformer_folder(folder)
        pooling = _read_pooling(folder)
    file = model_folder / CONFIG
    config = read_json_object(file)
    _refuse_downloaded_kernels(config, file)
    return Checkpoint(folder=folder, model_folder=model_folder, config=config, pooling=pooling)


def _refuse_downloaded_kernels(config: dict[str, Any], path: Path) -> None:
    """An attention implementation called `owner/name` is code to be downloaded."""
    parts = [config]
    for part in parts:  # grows: text_config and others are within
        parts += [value for value in part.values() if isinstance(value, dict)]
        for name in _ATTENTION:
            if "/" in str(part.get(name)):
                raise BadInputError(
                    f"{path} asks for the attention kernel {part[name]!r}, which is code to be "
                    "downloaded and run; it is refused",
                    hint=f"remove {name!r} from the file",
                )


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
    # {"encoder.weight": "model-00001-of-00002.safetensors", ...}
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
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def reading(folder: Path, tokenizer: Any, *limits: int | None) -> tuple[int, bool]:  # noqa: ANN401  # transformers' own
    """Most tokens of a text, and whether it is written in lower case, by the folder's files.

    Those of a sentence encoder say less than the model could read: what it was trained on.
    """
    sentence = _settings(folder / "sentence_bert_config.json")
    config = _settings(folder / CONFIG)
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and str(config.get("model_type")).endswith(_SKIPPING):
        positions -= 2
    stated = (tokenizer.model_max_length, sentence.get("max_seq_length"), positions, *limits)
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
    # 224, {"height": 224, "width": 224} or {"shortest_edge": 224}
    settings = _settings(folder / PREPROCESSOR)
    for name in ("crop_size", "size"):
        size = settings.get(name)
        if not isinstance(size, dict):
            size = {"shortest_edge": size}
        edge = size.get("shortest_edge")
        height = size.get("height", edge)
        width = size.get("width", edge)
        if isinstance(height, int) and isinstance(width, int):
            return height, width
    return None
