"""Calibration data in files: arrays (.npz, .npy, .safetensors) and text (.txt, .jsonl)."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from twofour.errors import BadInputError, system_errors
from twofour.export.model_code import described
from twofour.graph.files import map_region
from twofour.graph.stored import read_header
from twofour.inputs.fits import Array, Arrays, numpy_type
from twofour.inputs.samples import (
    Batch,
    CalibrationData,
    DataRequest,
    ModelInputs,
    batch_samples,
    by_name,
    by_position,
    check_shapes,
    count_samples,
    fit_arrays,
    fit_batch,
    per_sample,
    usable_samples,
)
from twofour.records import frozen
from twofour.sources.checkpoint import (
    has_tokenizer,
    open_tokenizer,
    read_texts,
    reading,
    settings_in,
)
from twofour.sources.source import key_of
from twofour.store import sha256_file
from twofour.words import listed


def open_arrays(request: DataRequest) -> CalibrationData:
    """Arrays by name of the model's input, or by position; of .npy the only one."""
    inputs = request.inputs
    source = request.text
    stored = _stored(request.path, request.folder)
    if request.path.suffix.lower() == ".npy":
        taken = {by_position(inputs, 1, source)[0]: next(iter(stored))}
    else:
        taken = by_name(inputs, tuple(stored), source)
    arrays = {name: stored[key] for name, key in taken.items()}
    check_shapes(inputs, arrays, source)
    fit_arrays(inputs, _slice(request, arrays, 0, 0), source)  # types; values are seen when read
    rows = count_samples(inputs, arrays, source)
    samples, notes = usable_samples(inputs, rows, request.options.samples, source)
    unused = sorted(set(stored) - set(taken.values()))
    if unused:
        notes = (*notes, f"{source}: {listed(unused)} is not an input of the model and is left out")
    return CalibrationData(
        source=source,
        samples=samples,
        notes=notes,
        batches=partial(_batches, request, arrays, samples),
    )


def file_key(request: DataRequest) -> str:
    """sha256 over the file, how it is read, and the tokenizer that reads texts."""
    files = [request.path]
    folder = request.inputs.folder
    if folder is not None:
        files += settings_in(folder)
    contents = (f"{file.name} {sha256_file(file)}" for file in files)
    return key_of(*contents, request.settings)


def _batches(request: DataRequest, arrays: Arrays, samples: int) -> Iterator[Batch]:
    size = batch_samples(request.inputs)
    for start in range(0, samples, size):
        stop = min(start + size, samples)
        where = f"{request.text}, samples {start} to {stop - 1}"
        with described(f"{where} cannot be read:"):  # a file cut short under a map
            rows = _slice(request, arrays, start, stop)
        yield replace(fit_batch(request.inputs, rows, where), samples=stop - start)


def _slice(request: DataRequest, arrays: Arrays, start: int, stop: int) -> dict[str, Array]:
    """Rows of the arrays that have one for each sample, the others whole."""
    rows = dict(arrays)
    for name in per_sample(request.inputs, arrays):
        rows[name] = arrays[name][start:stop]
    return {name: np.asarray(array) for name, array in rows.items()}


def _stored(path: Path, folder: Path | None) -> Arrays:
    """Every array in the file, mapped: only the rows that are asked for are read."""
    kind = path.suffix.lower()
    hint = "write it again, arrays with numpy.savez, tensors with safetensors"
    with described(f"{path} is not a readable {kind} file:", hint=hint):
        if kind == ".npz":
            arrays = dict(_members(path, folder))
        elif kind == ".npy":
            arrays = {"arr_0": np.load(path, mmap_mode="r", allow_pickle=False)}
        else:
            arrays = dict(_tensors(path))
    if not arrays:
        raise BadInputError(
            f"{path} contains no array", hint="give one for each input of the model"
        )
    return arrays


def _tensors(path: Path) -> Iterator[tuple[str, Array]]:
    for name, tensor in read_header(path).items():
        if tensor.dtype is None:
            raise BadInputError(f"{path}: {name!r} in it has a type that numpy does not have")
        dtype = numpy_type(tensor.dtype)
        yield name, map_region(path, tensor.offset, dtype, tensor.shape)


def _members(path: Path, folder: Path | None) -> Iterator[tuple[str, Array]]:
    """The arrays of an .npz, copied out and mapped: a member of a zip file cannot be."""
    room = system_errors(f"cannot unpack {path}", "make room: for the run folder, or in TMPDIR")
    with (
        zipfile.ZipFile(path) as archive,
        room,
        tempfile.TemporaryDirectory(dir=folder) as unpacked,
    ):
        for number, member in enumerate(archive.infolist()):
            name, _, kind = member.filename.rpartition(".")
            if kind != "npy":
                raise BadInputError(f"{path}: {member.filename!r} in it is not an array")
            plain = Path(unpacked, f"{number}.npy")
            with archive.open(member) as content, plain.open("wb") as file:
                shutil.copyfileobj(content, file)
            yield name, np.load(plain, mmap_mode="r", allow_pickle=False)


_MOST_TOKENS = 2048
"""Tokens of a text where the model takes more: what SparseGPT and Wanda are calibrated on."""
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
"""Names that exporters give inputs -> the array of the tokenizer that each takes."""
_TOKENIZER_HINT = (
    "put tokenizer.json and tokenizer_config.json beside the model, or give token ids by name in "
    "an .npz file"
)


def open_text(request: DataRequest) -> CalibrationData:
    """The first texts through the model's tokenizer; blank lines are no samples.

    Sorted by length they need less padding, which halves the time of the forwards.
    """
    inputs = request.inputs
    asked = request.options.samples
    reader = _open_reader(request)
    texts = sorted(islice(read_texts(request.path), asked), key=len)
    samples, notes = usable_samples(inputs, len(texts), asked, request.text)
    # what does not fit is found now
    next(_text_batches(request, reader, texts[: batch_samples(inputs)]))
    return CalibrationData(
        source=request.text,
        samples=samples,
        notes=notes,
        batches=partial(_text_batches, request, reader, texts[:samples]),
    )


@frozen
class _Reader:
    """A tokenizer, how far it reads, and which input takes what of its answer."""

    tokenizer: Any
    longest: int
    padding: bool | str
    """What texts are padded to, in transformers' words."""
    roles: Mapping[str, str]
    lower_case: bool

    def encoded(self, texts: Sequence[str]) -> dict[str, Array]:
        """Ids, mask and so on, texts x positions, padded to the longest or to what is fixed."""
        if self.lower_case:
            texts = [text.lower() for text in texts]
        encoding = self.tokenizer(
            list(texts),
            padding=self.padding,
            truncation=True,
            max_length=self.longest,
            return_tensors="np",
            return_attention_mask=True,
            return_token_type_ids="token_type_ids" in self.roles.values(),
        )
        arrays: dict[str, Array] = dict(encoding)
        arrays["position_ids"] = np.maximum(np.cumsum(arrays["attention_mask"], axis=1) - 1, 0)
        return arrays


def _open_reader(request: DataRequest) -> _Reader:
    """The model's tokenizer; raises BadInputError, and MissingToolError without transformers."""
    inputs = request.inputs
    folder = inputs.folder
    roles = _roles(inputs, request.text)
    if folder is None or not has_tokenizer(folder):
        raise BadInputError(
            f"{request.text} is text, and {inputs.model} needs its tokenizer: there is none in "
            f"{folder or 'its folder'}",
            hint=_TOKENIZER_HINT,
        )
    with described(f"the tokenizer in {folder} cannot be used:", hint=_TOKENIZER_HINT):
        tokenizer = open_tokenizer(folder)
    longest, lower_case = reading(folder, tokenizer, inputs.most_tokens, _MOST_TOKENS)
    padding: bool | str = True
    for one in inputs.inputs:
        shape = one.shape or ()
        # an ONNX file that takes 128 positions and no other number
        if roles.get(one.name) == _IDS and len(shape) == 2 and isinstance(shape[1], int):
            longest = shape[1]
            padding = "max_length"
    return _Reader(
        tokenizer=tokenizer, longest=longest, padding=padding, roles=roles, lower_case=lower_case
    )


def _roles(inputs: ModelInputs, source: str) -> dict[str, str]:
    """Raises BadInputError for an input of the model that no tokenizer gives."""
    roles = {}
    others = []
    for one in inputs.inputs:
        is_given = one.example is not None or (one.required and one.shape is not None)
        # what a module could take besides its example inputs stays out, but for the mask
        if one.name in _ROLES and (is_given or one.name == "attention_mask"):
            roles[one.name] = _ROLES[one.name]
        elif str(one.dtype).startswith("int") and len(one.shape or ()) == 2:
            others.append(one.name)
    if _IDS not in roles.values() and len(others) == 1:
        roles[others[0]] = _IDS  # ids by a name of its own
    left = inputs.missing(roles)
    if left or _IDS not in roles.values():
        raise BadInputError(
            f"{source} is text, and {inputs.model} takes {', '.join(left) or inputs.in_words}, "
            "which no tokenizer gives",
            hint="give arrays by name of the input in an .npz file",
        )
    return roles


def _text_batches(request: DataRequest, reader: _Reader, texts: Sequence[str]) -> Iterator[Batch]:
    size = batch_samples(request.inputs)
    for start in range(0, len(texts), size):
        batch = texts[start : start + size]
        where = f"{request.text}, texts {start + 1} to {start + len(batch)} by length"
        with described(f"{where}: the tokenizer fails:"):
            encoded = reader.encoded(batch)
        arrays = {name: encoded[role] for name, role in reader.roles.items() if role in encoded}
        padding = encoded["attention_mask"] == 0
        yield Batch(
            arrays=fit_arrays(request.inputs, arrays, where),
            samples=len(batch),
            padding=padding if padding.any() else None,
        )
