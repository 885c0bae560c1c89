"""Tell the four forms of a model source apart; nothing is loaded, and torch is not imported."""

from __future__ import annotations

from pathlib import Path

from twofour.errors import BadInputError
from twofour.pipeline.sources.callable import CallableSource
from twofour.pipeline.sources.checkpoint import is_checkpoint
from twofour.pipeline.sources.hf import HfSource
from twofour.pipeline.sources.onnx import OnnxSource
from twofour.pipeline.sources.source import SourceOptions, TorchSource
from twofour.pipeline.sources.timm import PREFIX, parse_timm
from twofour.pipeline.sources.user_code import parse_reference

_FORMS = (
    "a model is file.onnx, a Hugging Face checkpoint folder, file.py:callable or "
    "package.module:callable, or timm:NAME"
)
_STATE_DICTS = (".pt", ".pth", ".pkl", ".bin", ".ckpt", ".safetensors")


def open_source(text: str, options: SourceOptions) -> OnnxSource | TorchSource:
    """The source a text names.

    Raises BadInputError for anything that is none of the four forms, with a hint for what comes
    near one: a file or folder that is missing or of another kind, a file of weights alone.
    """
    if options.inputs is not None and not options.inputs.is_file():
        raise BadInputError(f"--inputs {options.inputs} is no file")
    if text.startswith(PREFIX):
        return parse_timm(text, options)
    path = Path(text).expanduser()
    if path.is_file():
        return _file(text, path, options)
    if path.is_dir():
        return _folder(text, path, options)
    if ":" in text:
        return CallableSource(text=text, reference=parse_reference(text), options=options)
    raise _nothing(text, path)


def _file(text: str, path: Path, options: SourceOptions) -> OnnxSource:
    if path.suffix.lower() == ".onnx":
        return OnnxSource(text=text, path=path, options=options)
    if path.suffix == ".py":
        hint = f"name the function that returns the model: {text}:make_model"
    elif path.suffix.lower() in _STATE_DICTS:
        hint = (
            "weights alone have no architecture; write a file.py:callable that builds the module, "
            "loads this file and returns the module, or name the folder with config.json"
        )
    else:
        hint = _FORMS
    raise BadInputError(f"{text} is a file, but no .onnx model", hint=hint)


def _folder(text: str, path: Path, options: SourceOptions) -> HfSource:
    if is_checkpoint(path):
        return HfSource(text=text, folder=path, options=options)
    models = sorted(f.name for f in path.glob("*.onnx"))
    hint = f"name the file: {path / models[0]}" if models else _FORMS
    raise BadInputError(f"{text} is a folder without config.json: no checkpoint", hint=hint)


def _nothing(text: str, path: Path) -> BadInputError:
    if path.suffix:
        return BadInputError(f"there is no file {text}", hint=_FORMS)
    hint = _FORMS
    if text.count("/") == 1:
        hint = (
            f"models are not downloaded; fetch it with `hf download` and name the folder ({_FORMS})"
        )
    return BadInputError(f"there is no model {text!r}", hint=hint)
