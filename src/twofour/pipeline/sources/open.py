"""The forms in which a model is named, told apart; nothing is loaded, and torch is not imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twofour.errors import BadInputError
from twofour.pipeline.sources.callable import open_callable
from twofour.pipeline.sources.hf import is_hf, open_hf
from twofour.pipeline.sources.onnx import OnnxSource, is_onnx, open_onnx
from twofour.pipeline.sources.source import TorchSource, path_of
from twofour.pipeline.sources.timm import is_timm, open_timm
from twofour.pipeline.sources.user_code import names_code
from twofour.records.options import ExampleInputs

_STATE_DICTS = (".pt", ".pth", ".pkl", ".bin", ".ckpt", ".safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One form of naming a model: how it is written, which texts have it, and what opens them."""

    written: str
    """As help and errors show it."""
    fits: Callable[[str, Path], bool]
    """Of the text, and the same as a path."""
    open: Callable[[str, ExampleInputs], OnnxSource | TorchSource]
    runs_code: bool = False
    """Whether the text names code of the user."""


FORMS = (
    Form(written="file.onnx", fits=is_onnx, open=open_onnx),
    Form(written="a Hugging Face checkpoint folder", fits=is_hf, open=open_hf),
    Form(written="timm:NAME", fits=is_timm, open=open_timm),
    Form(
        written="file.py:callable, package.module:callable",
        fits=names_code,
        open=open_callable,
        runs_code=True,
    ),
)
"""Every source there is; the first that fits opens the text."""


def open_source(text: str, options: ExampleInputs) -> OnnxSource | TorchSource:
    """The source a text names.

    Raises BadInputError for anything that has none of the forms, with a hint for what comes near
    one: a file or folder that is missing or of another kind, a file of weights alone.
    """
    if options.file is not None and not options.file.is_file():
        raise BadInputError(f"--inputs {options.inputs} is no file")
    form = _form(text)
    if form is None:
        raise _no_model(text, path_of(text))
    return form.open(text, options)


def runs_code(text: str) -> bool:
    """Whether loading the source that a text names runs code of the user's."""
    form = _form(text)
    return form is not None and form.runs_code


def identity(text: str) -> str:
    """What a run folder belongs to: the absolute path where the source is one, else its text."""
    place, colon, name = text.rpartition(":")
    path = path_of(place if colon else text)
    if not path.exists():
        return text
    return f"{path.resolve()}{colon}{name if colon else ''}"


def _form(text: str) -> Form | None:
    path = path_of(text)
    return next((form for form in FORMS if form.fits(text, path)), None)


def _no_model(text: str, path: Path) -> BadInputError:
    forms = f"a model is {', '.join(form.written for form in FORMS)}"
    if path.is_file():
        hint = forms
        if path.suffix == ".py":
            hint = f"name the function that returns the model: {text}:make_model"
        elif path.suffix.lower() in _STATE_DICTS:
            hint = (
                "weights alone have no architecture; write a file.py:callable that builds the "
                "module, loads this file and returns the module, or name the folder with "
                "config.json"
            )
        return BadInputError(f"{text} is a file, but no .onnx model", hint=hint)
    if path.is_dir():
        models = sorted(f.name for f in path.glob("*.onnx"))
        hint = f"name the file: {path / models[0]}" if models else forms
        return BadInputError(f"{text} is a folder without config.json: no checkpoint", hint=hint)
    if path.suffix:
        return BadInputError(f"there is no file {text}", hint=forms)
    hint = forms
    if text.count("/") == 1:
        hint = (
            f"models are not downloaded; fetch it with `hf download` and name the folder ({forms})"
        )
    return BadInputError(f"there is no model {text!r}", hint=hint)
