"""How a sentence encoder makes one vector of its token vectors, as its folder says.

Source of the layout: the sentence-transformers library (modules.json, N_Pooling/config.json).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twofour.errors import BadInputError
from twofour.pipeline.sources.json_file import read_json_object

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """The modules of a sentence encoder that come after the transformer."""

    modes: tuple[str, ...]
    normalize: bool
    """Whether the vector is brought to length 1."""
    max_tokens: int | None
    lower_case: bool
    """Whether sentences are written in lower case before they are tokenised."""
    files: tuple[Path, ...]
    """What this was read from, modules.json aside."""


def transformer_folder(folder: Path, modules: object) -> Path:
    """Folder of the transformer itself: "" (new) or "0_Transformer" (old) in modules.json."""
    kinds = _kinds(folder, modules)
    if not kinds or kinds[0][0] != "Transformer":
        raise BadInputError(f"{folder / 'modules.json'} does not begin with a Transformer")
    return folder / kinds[0][1]


def read_pooling(folder: Path, modules: object) -> Pooling:
    """Read the modules behind the transformer.

    Raises BadInputError for a module or a pooling mode that is not known here: leaving it out
    would change the embedding.
    """
    kinds = _kinds(folder, modules)
    names = [kind for kind, _ in kinds]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise BadInputError(
            f"{folder} is a sentence encoder made of {' + '.join(names)}; "
            "only Transformer + Pooling (+ Normalize) can be read",
            hint="write a file.py:callable that returns the whole model",
        )
    config = folder / kinds[1][1] / "config.json"
    settings = folder / kinds[0][1] / "sentence_bert_config.json"
    options = read_json_object(settings) if settings.is_file() else {}
    longest = options.get("max_seq_length")
    return Pooling(
        modes=_modes(config),
        normalize=names[-1] == "Normalize",
        max_tokens=longest if isinstance(longest, int) else None,
        lower_case=options.get("do_lower_case") is True,
        files=(config,),
    )


def _kinds(folder: Path, modules: object) -> list[tuple[str, str]]:
    """Class name and folder of each module."""
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise BadInputError(f"{folder / 'modules.json'} is no list of modules")
    kinds = [(str(m.get("type")).rpartition(".")[2], str(m.get("path", ""))) for m in modules]
    for _, path in kinds:
        if not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise BadInputError(f"{folder / 'modules.json'} points outside its folder: {path!r}")
    return kinds


def _modes(config: Path) -> tuple[str, ...]:
    options = read_json_object(config)
    named = options.get("pooling_mode")
    if named is None:
        modes = [mode for flag, mode in _LEGACY.items() if options.get(flag) is True] or ["mean"]
    else:
        modes = [str(mode) for mode in named] if isinstance(named, list) else [str(named)]
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise BadInputError(
            f"{config} pools by {', '.join(unknown)}; only {', '.join(MODES)} can be read",
            hint="write a file.py:callable that returns the whole model",
        )
    return tuple(modes)
