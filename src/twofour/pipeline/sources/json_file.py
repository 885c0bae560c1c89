"""JSON files of other programs, read with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twofour.errors import BadInputError


def read_json(path: Path) -> object:
    """Parse a JSON file; raises BadInputError when it is missing or damaged."""
    try:
        content: object = json.loads(path.read_bytes())
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path} is not JSON: {error}") from error
    return content


def read_json_object(path: Path) -> dict[str, Any]:
    """The same for a file that must hold an object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise BadInputError(f"{path} holds no JSON object")
    return content
