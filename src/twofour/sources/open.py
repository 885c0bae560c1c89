"""The forms in which a model is named; nothing is loaded, and torch is not imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from twofour.errors import BadInputError
from twofour.graph.opened import OpenedModel, OpenedModels
from twofour.records.options import ExampleInputs, Trust
from twofour.sources.source import (
    CONFIG,
    MODULES,
    TorchSource,
    key_of,
    names_code,
    options_key,
    path_of,
    safe_name,
)
from twofour.store import sha256_file

_STATE_DICTS = (".pt", ".pth", ".pkl", ".bin", ".ckpt", ".safetensors")
_TIMM = "timm:"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxSource:
    """An ONNX file; whether it is a sound one is found when the graph is read."""

    text: str
    path: Path
    options: ExampleInputs
    models: OpenedModels = field(default_factory=OpenedModels, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The file's stem."""
        return safe_name(self.path.stem)

    def key(self) -> str:
        """sha256 over the file, its external data and the options; a damaged file is not hashed."""
        try:
            opened = self.opened()
        except BadInputError:
            return key_of("damaged", self.path.name, options_key(self.options))
        files = (self.path, *sorted(opened.data_files))
        parts = (part for file in files for part in (file.name, sha256_file(file)))
        return key_of(*parts, options_key(self.options))

    def opened(self) -> OpenedModel:
        """The graph, parsed once while the file stays as it is; raises BadInputError."""
        return self.models.open(self.path)


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


def _open_hf(text: str, options: ExampleInputs) -> TorchSource:
    from twofour.sources.hf import HfSource, open_timm

    if text.startswith(_TIMM):
        return open_timm(text, options)
    return HfSource(text=text, folder=path_of(text), options=options)


def _open_callable(text: str, options: ExampleInputs) -> TorchSource:
    from twofour.sources.callable import CallableSource
    from twofour.sources.user_code import parse_reference

    return CallableSource(text=text, reference=parse_reference(text), options=options)


FORMS = (
    Form(
        written="file.onnx",
        fits=lambda _text, path: path.is_file() and path.suffix.lower() == ".onnx",
        open=lambda text, options: OnnxSource(text=text, path=path_of(text), options=options),
    ),
    Form(
        written="a Hugging Face checkpoint folder",
        fits=lambda _text, path: (path / CONFIG).is_file() or (path / MODULES).is_file(),
        open=_open_hf,
    ),
    Form(written="timm:NAME", fits=lambda text, _path: text.startswith(_TIMM), open=_open_hf),
    Form(
        written="file.py:callable, package.module:callable",
        fits=names_code,
        open=_open_callable,
        runs_code=True,
    ),
)
"""Every source there is; the first that fits opens the text."""


def open_source(text: str, options: ExampleInputs) -> OnnxSource | TorchSource:
    """The source a text names; raises BadInputError with a hint for what comes near one."""
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


def refuse_untrusted(folder: Path, source: str, trust: Trust) -> None:
    """Raise BadInputError where a folder's source is code that `trust` does not reach."""
    if trust.everything or not runs_code(source):
        return
    if any(source in (named, identity(named)) for named in trust.sources):
        return
    raise BadInputError(
        f"{folder}/run.json names code that this command would run: {source}",
        hint=f"if you know that code, name it too (--source {source}), or allow whatever the "
        "folder names (--trust)",
    )
