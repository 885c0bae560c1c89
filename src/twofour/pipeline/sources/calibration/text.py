"""Calibration data of text: a line of .txt, or a text of .jsonl, is a sample."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import BadInputError, MissingToolError
from twofour.export.model_code import described
from twofour.pipeline.sources.calibration.batching import (
    batch_samples,
    usable,
)
from twofour.pipeline.sources.calibration.data import (
    Batch,
    CalibrationData,
    ModelInput,
    ModelInputs,
)
from twofour.pipeline.sources.calibration.fitting import fitted
from twofour.pipeline.sources.calibration.request import Request
from twofour.pipeline.sources.checkpoint import SETTINGS_FILES, TOKENIZER_FILES, has_tokenizer
from twofour.pipeline.sources.source import key_of
from twofour.pipeline.sources.tokenizer import open_tokenizer, token_limit
from twofour.store import sha256_file

LONGEST_TEXT = 1 << 16
"""Letters of a text that are read: no limit of tokens reaches further."""
_MOST_TOKENS = 2048
"""Of one text where the model takes more: what SparseGPT and Wanda are calibrated on."""
_IDS = "input_ids"
_ROLES = {
    "input_ids": _IDS,
    "decoder_input_ids": _IDS,
    "attention_mask": "attention_mask",
    "decoder_attention_mask": "attention_mask",
    "input_mask": "attention_mask",
    "token_type_ids": "token_type_ids",
    "segment_ids": "token_type_ids",
    "position_ids": "position_ids",
}
"""Inputs by the names that exporters give them -> what of a tokenizer's answer they take."""
TOKENIZER_HINT = (
    "put tokenizer.json and tokenizer_config.json beside the model, or give token ids by name in "
    "an .npz or .jsonl file"
)


def open_txt(request: Request) -> CalibrationData:
    """One text a line; blank lines are none."""
    texts = [text for _, text in lines_of(request.path, request.options.samples)]
    return open_texts(request, open_reader(request), texts)


def text_key(request: Request) -> str:
    """Of the file and of the tokenizer that reads it."""
    folder = request.inputs.folder
    files = () if folder is None else _described_in(folder)
    parts = (part for file in files for part in (file.name, sha256_file(file)))
    return key_of(request.path.suffix.lower(), sha256_file(request.path), request.settings, *parts)


def _described_in(folder: Path) -> tuple[Path, ...]:
    names = (*SETTINGS_FILES, *TOKENIZER_FILES)
    return tuple(folder / name for name in sorted(names) if (folder / name).is_file())


def lines_of(
    path: Path, most: int | None = None, *, longest: int | None = None
) -> Iterator[tuple[int, str]]:
    """Number and text of the lines that are not blank, from the first, `most` of them.

    Of a text that is a line the beginning is read; `longest` is for lines that are no use in part.
    Raises BadInputError for a longer one, and where the file cannot be read or is not UTF-8.
    """
    found = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            lines = _bounded(file.readline, longest or LONGEST_TEXT)
            for number, (line, is_whole) in enumerate(lines, 1):
                if longest is not None and not is_whole:
                    raise BadInputError(
                        f"{path}, line {number} has more than {longest:,} letters",
                        hint="give large arrays in an .npz file",
                    )
                if text := line.strip():
                    yield number, text
                    found += 1
                if found == most:
                    return
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read texts from {path}: {error}") from error


def _bounded(readline: Callable[[int], str], longest: int) -> Iterator[tuple[str, bool]]:
    """Lines, each with whether it is all of it: a very long one is cut, as it fills the memory."""
    while line := readline(longest):
        rest = "" if line.endswith("\n") else readline(longest)
        yield line, not rest.strip()
        while rest and not rest.endswith("\n"):
            rest = readline(longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A tokenizer, how far it reads, and which input takes what of its answer."""

    tokenizer: Any
    longest: int
    fixed: int | None
    """Positions of an ONNX file that takes no other number."""
    roles: Mapping[str, str]
    lower_case: bool

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation as the checkpoint writes it; without a template, its texts line by line.

        The template is the checkpoint's own, run by transformers in a sandbox.
        """
        if not self.tokenizer.chat_template:
            return "\n".join(message["content"] for message in messages)
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False))

    def encoded(self, texts: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Ids, mask and so on, texts x positions, padded to the longest or to what is fixed."""
        if self.lower_case:
            texts = [text.lower() for text in texts]
        found = self.tokenizer(
            list(texts),
            padding=True if self.fixed is None else "max_length",
            truncation=True,
            max_length=self.longest,
            return_tensors="np",
            return_attention_mask=True,
            return_token_type_ids="token_type_ids" in self.roles.values(),
        )
        arrays: dict[str, NDArray[Any]] = {name: np.asarray(value) for name, value in found.items()}
        arrays["position_ids"] = np.maximum(np.cumsum(arrays["attention_mask"], axis=1) - 1, 0)
        return arrays


def open_texts(request: Request, reader: Reader, texts: Sequence[str]) -> CalibrationData:
    """Texts through the model's tokenizer, in order.

    Sorted by length they would need less padding: for 256 docstrings of 5 to 512 tokens 10 % of
    all positions rather than 68 %, a third of the time of a forward (MiniLM, one core). But every
    share of the samples, the one that is held out for instance, would be of one length; for single
    sentences the order costs a fourth more.
    """
    inputs = request.inputs
    samples, notes = usable(inputs, len(texts), request.options.samples, request.text)
    first = next(_batches(request, reader, texts, batch_samples(inputs)))  # found at once
    assert first.samples
    return CalibrationData(
        source=request.text,
        samples=samples,
        notes=notes,
        read=partial(_batches, request, reader, texts, samples),
        content_key=partial(text_key, request),
    )


def open_reader(request: Request) -> Reader:
    """The model's tokenizer.

    Raises BadInputError where the model reads no text or its tokenizer is not to be found, and
    MissingToolError without transformers.
    """
    inputs, folder = request.inputs, request.inputs.folder
    roles = _roles(inputs, request.text)
    if folder is None or not has_tokenizer(folder):
        where = "it has no folder of its own" if folder is None else f"there is none in {folder}"
        raise BadInputError(
            f"{request.text} is text, and {inputs.model} needs its tokenizer: {where}",
            hint=TOKENIZER_HINT,
        )
    try:
        tokenizer = open_tokenizer(folder)
    except MissingToolError:
        raise
    except Exception as error:
        raise BadInputError(
            f"the tokenizer in {folder} cannot be used: {described(error)}", hint=TOKENIZER_HINT
        ) from error
    fixed = _fixed_length(inputs, roles)
    most, lower_case = _settings(folder)
    stated = token_limit(tokenizer.model_max_length)
    limits = (fixed, stated, inputs.most_tokens, most, _MOST_TOKENS)
    return Reader(
        tokenizer=tokenizer,
        longest=fixed or min(int(limit) for limit in limits if limit),
        fixed=fixed,
        roles=roles,
        lower_case=lower_case,
    )


def _roles(inputs: ModelInputs, source: str) -> dict[str, str]:
    """Raises BadInputError for an input of the model that no tokenizer gives."""
    roles = {one.name: _ROLES[one.name] for one in inputs.inputs if _is_told(one)}
    ids = [one.name for one in inputs.inputs if one.name not in roles and _may_be_ids(one)]
    if _IDS not in roles.values() and len(ids) == 1:
        roles[ids[0]] = _IDS
    left = [one.in_words for one in inputs.inputs if one.required and one.name not in roles]
    if left or _IDS not in roles.values():
        raise BadInputError(
            f"{source} is text, and {inputs.model} takes {', '.join(left) or inputs.in_words}, "
            "which no tokenizer gives",
            hint="give arrays by name of the input in an .npz file",
        )
    return roles


def _is_told(one: ModelInput) -> bool:
    """What a module could take besides its example inputs stays out, but for the mask."""
    is_used = (one.required and one.shape is not None) or one.example is not None
    return one.name in _ROLES and (is_used or one.name == "attention_mask")


def _may_be_ids(one: ModelInput) -> bool:
    if one.dtype is None or one.shape is None:
        return False
    return one.dtype.startswith("int") and len(one.shape) == 2


def _fixed_length(inputs: ModelInputs, roles: Mapping[str, str]) -> int | None:
    for name, role in roles.items():
        one = inputs.known(name)
        if role == _IDS and one is not None and one.shape is not None and len(one.shape) == 2:
            length = one.shape[1]
            return length if isinstance(length, int) else None
    return None


def _settings(folder: Path) -> tuple[int | None, bool]:
    """Most tokens of a text, and whether it is written in lower case, by the files in the folder.

    Those of a sentence encoder say less than the model could read: what it was trained on.
    """
    sentence, config = _json(folder / "sentence_bert_config.json"), _json(folder / "config.json")
    longest = [sentence.get("max_seq_length"), _most_positions(config)]
    known = [limit for limit in longest if isinstance(limit, int) and limit > 0]
    return min(known, default=None), sentence.get("do_lower_case") is True


def _most_positions(config: Mapping[str, Any]) -> int | None:
    """RoBERTa and its kin count positions from behind the padding id."""
    most = config.get("max_position_embeddings")
    if not isinstance(most, int):
        return None
    is_offset = any(kin in str(config.get("model_type")) for kin in ("roberta", "camembert"))
    padding = config.get("pad_token_id", 1)
    return most - (padding if isinstance(padding, int) else 1) - 1 if is_offset else most


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _batches(
    request: Request, reader: Reader, texts: Sequence[str], samples: int
) -> Iterator[Batch]:
    size = batch_samples(request.inputs)
    for start in range(0, min(samples, len(texts)), size):
        stop = min(start + size, samples, len(texts))
        where = f"{request.text}, texts {start + 1} to {stop}"
        try:
            encoded = reader.encoded(texts[start:stop])
        except Exception as error:
            raise BadInputError(f"{where}: the tokenizer fails: {described(error)}") from error
        arrays = {name: encoded[role] for name, role in reader.roles.items() if role in encoded}
        padding = encoded["attention_mask"] == 0
        yield Batch(
            arrays=fitted(request.inputs, arrays, where),
            samples=stop - start,
            padding=padding if padding.any() else None,
        )
