"""Code that a run folder names is run only where the user says so too."""

from __future__ import annotations

from pathlib import Path

from twofour.errors import BadInputError
from twofour.pipeline.folder import MANIFEST
from twofour.pipeline.sources.open import identity, runs_code
from twofour.records.options import Trust


def refuse_untrusted(folder: Path, source: str, trust: Trust) -> None:
    """Raise BadInputError where a folder's source is code that `trust` does not reach.

    Nothing is imported. A checkpoint, an ONNX file and a timm name are data, whoever names them.
    """
    if trust.everything or not runs_code(source):
        return
    if any(source in (named, identity(named)) for named in trust.sources):
        return
    raise BadInputError(
        f"{folder / MANIFEST} names code that this command would run: {source}",
        hint=f"if you know that code, name it too (--source {source}), or allow whatever the "
        "folder names (--trust)",
    )
