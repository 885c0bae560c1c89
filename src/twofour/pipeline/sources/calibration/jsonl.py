"""Calibration data in .jsonl: an object a line, with a text or with arrays by name of the input."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import BadInputError
from twofour.pipeline.sources.calibration.batching import (
    batch_samples,
    cut,
    usable,
)
from twofour.pipeline.sources.calibration.data import (
    Batch,
    CalibrationData,
    ModelInput,
    ModelInputs,
)
from twofour.pipeline.sources.calibration.fitting import by_name, fitted
from twofour.pipeline.sources.calibration.request import Request
from twofour.pipeline.sources.calibration.text import (
    LONGEST_TEXT,
    Reader,
    lines_of,
    open_reader,
    open_texts,
    text_key,
)

_TEXT_FIELDS = ("text", "content", "sentence", "document", "prompt", "question", "instruction")
_ANSWER_FIELDS = ("completion", "response", "answer", "output")
"""Joined to a prompt, question or instruction."""
_CHAT_FIELDS = ("messages", "conversations", "conversation")
_MASK, _LENGTHS = "attention_mask", "the lengths of the lists"
_LONGEST_LINE = 1 << 26
"""Letters: an image of 3 x 1024 x 1024 takes less."""
_HINT = (
    'write an object on each line: {"text": "..."}, {"messages": [...]}, or an array for each '
    "input of the model by name"
)

Row = tuple[str, Mapping[str, Any]]
"""Where an object stands, and the object."""


def open_jsonl(request: Request) -> CalibrationData:
    """Texts through the model's tokenizer, or arrays as they are, by what the first object has."""
    first = next(_rows(request), None)
    if first is None:
        raise BadInputError(f"{request.text} holds no samples", hint=_HINT)
    if any(request.inputs.known(name) for name in first[1]):
        return _open_arrays(request)
    reader = open_reader(request)
    texts = [_text(row, where, reader)[:LONGEST_TEXT] for where, row in _rows(request)]
    return open_texts(request, reader, texts)


def _rows(request: Request) -> Iterator[Row]:
    """The first objects, as many as samples are asked for."""
    for number, line in lines_of(request.path, request.options.samples, longest=_LONGEST_LINE):
        where = f"{request.text}, line {number}"
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInputError(f"{where} is not JSON: {error}", hint=_HINT) from error
        if not isinstance(found, dict):
            raise BadInputError(f"{where} is a {type(found).__name__}, no object", hint=_HINT)
        yield where, found


def _text(row: Mapping[str, Any], where: str, reader: Reader) -> str:
    chat = next((row[name] for name in _CHAT_FIELDS if row.get(name)), None)
    if chat is not None:
        return reader.chat(_messages(chat, where))
    parts = [row[name] for name in _TEXT_FIELDS if isinstance(row.get(name), str)][:1]
    parts += [row[name] for name in _ANSWER_FIELDS if isinstance(row.get(name), str)][:1]
    text = "\n".join(parts).strip()
    if not text:
        raise BadInputError(
            f"{where} has no text: it has {', '.join(row) or 'nothing'}", hint=_HINT
        )
    return text


def _messages(chat: object, where: str) -> list[dict[str, str]]:
    """Role and content of each; {"from": "human", "value": ...} is another way to write them."""
    roles = {"human": "user", "gpt": "assistant"}
    found = []
    for message in chat if isinstance(chat, list) else [chat]:
        if not isinstance(message, dict):
            raise BadInputError(f"{where}: a message is {type(message).__name__}", hint=_HINT)
        role = str(message.get("role", message.get("from", "user")))
        content = message.get("content", message.get("value"))
        if isinstance(content, list):  # parts, of which some may be images
            content = "\n".join(p["text"] for p in content if isinstance(p, dict) and "text" in p)
        if not isinstance(content, str):
            raise BadInputError(f"{where}: a message has no text", hint=_HINT)
        found.append({"role": roles.get(role, role), "content": content})
    return found


def _open_arrays(request: Request) -> CalibrationData:
    """Read anew from the file each time: arrays in JSON may be large."""
    there = sum(1 for _ in _rows(request))
    samples, notes = usable(request.inputs, there, request.options.samples, request.text)

    def read() -> Iterator[Batch]:
        return cut(request.inputs, _batches(request), samples)

    next(read())  # found at once
    return CalibrationData(
        source=request.text,
        samples=samples,
        notes=notes,
        read=read,
        content_key=partial(text_key, request),
    )


def _batches(request: Request) -> Iterator[Batch]:
    rows = _rows(request)
    while chunk := list(islice(rows, batch_samples(request.inputs))):
        where = chunk[0][0]
        arrays = _stacked(request.inputs, chunk)
        mask = arrays[_MASK] if _MASK in arrays else arrays.pop(_LENGTHS, None)
        arrays.pop(_LENGTHS, None)
        found = fitted(request.inputs, arrays, where)
        padding = None if mask is None or mask.all() else mask == 0
        yield Batch(arrays=found, samples=len(chunk), padding=padding)


def _stacked(inputs: ModelInputs, chunk: Sequence[Row]) -> dict[str, NDArray[Any]]:
    """One array for each input; lists of ids of several lengths are filled up with zeros."""
    columns: dict[str, list[NDArray[Any]]] = {}
    for where, row in ((where, _with_mask(inputs, row)) for where, row in chunk):
        for name, key in by_name(inputs, [*row], where).items():
            array = _array(row[key], inputs.known(name), f"{where}: {key!r}")
            columns.setdefault(name, []).append(array)
    short = next((n for n, arrays in columns.items() if len(arrays) < len(chunk)), None)
    if short is not None:
        raise BadInputError(f"{chunk[0][0]} and the lines behind it do not all have {short!r}")
    ids = next((arrays for arrays in columns.values() if _are_ids(arrays)), None)
    if ids is not None:
        columns[_LENGTHS] = [np.ones(len(array), np.int64) for array in ids]
    return {name: _filled(inputs, name, arrays, chunk[0][0]) for name, arrays in columns.items()}


def _with_mask(inputs: ModelInputs, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Ids alone are all of them text."""
    ids = row.get("input_ids")
    if inputs.known(_MASK) is None or _MASK in row or not isinstance(ids, list):
        return row
    return {**row, _MASK: [1] * len(ids)}


def _are_ids(arrays: Sequence[NDArray[Any]]) -> bool:
    return all(array.ndim == 1 and array.dtype.kind in "iu" for array in arrays)


def _filled(
    inputs: ModelInputs, name: str, arrays: Sequence[NDArray[Any]], where: str
) -> NDArray[Any]:
    one = inputs.known(name)
    fixed = one.shape[1] if one is not None and one.shape and len(one.shape) == 2 else None
    length = max([array.size for array in arrays])
    length = max(fixed, length) if isinstance(fixed, int) else length
    if _are_ids(arrays):
        arrays = [np.pad(array, (0, length - len(array))) for array in arrays]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise BadInputError(
            f"{where} and the lines behind it have arrays of several shapes for {name}: "
            f"{shapes[0]} and {shapes[1]}",
            hint="give arrays of one shape; only lists of token ids are filled up",
        )
    return np.stack(arrays)


def _array(value: object, one: ModelInput | None, where: str) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise BadInputError(f"{where} is no array: its rows differ in length") from error
    is_float = one is not None and one.dtype is not None and "float" in one.dtype
    # many writers of JSON leave the point of 1.0 away
    return array.astype(np.float64) if is_float and array.dtype.kind in "iu" else array
