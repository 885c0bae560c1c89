"""The published JSON Schemas are those of the records."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest
from packaging.version import Version
from pydantic import TypeAdapter

from twofour import records
from twofour.records.eligibility import EligibilityReport
from twofour.records.weights import SCHEMA_VERSION

FOLDER = Path(__file__).parents[1] / "docs" / "schema"
PUBLISHED: list[type[Any]] = [
    kind
    for module in [importlib.import_module(f"twofour.records.{name}") for name in records.SUBJECTS]
    for kind in vars(module).values()
    if dataclasses.is_dataclass(kind)
    and kind.__module__ == module.__name__
    and isinstance(kind, type)
    and any(field.name == "schema_version" for field in dataclasses.fields(kind))
]


def _file(kind: type[Any]) -> Path:
    return FOLDER / f"{kind.__name__}.v{SCHEMA_VERSION}.json"


@pytest.mark.skipif(
    Version(pydantic.VERSION) < Version("2.13"),
    reason="pydantic before 2.13 leaves out descriptions beside a reference",
)
@pytest.mark.parametrize("kind", PUBLISHED, ids=lambda kind: kind.__name__)
def test_the_published_schema_is_that_of_the_record(
    kind: type[Any], golden: Callable[[Path, str], None]
) -> None:
    schema = TypeAdapter(kind).json_schema()
    golden(_file(kind), json.dumps(schema, indent=2) + "\n")


def test_every_file_is_the_schema_of_a_record_with_a_version() -> None:
    of_this_version = set(FOLDER.glob(f"*.v{SCHEMA_VERSION}.json"))
    assert of_this_version == set(map(_file, PUBLISHED))
    assert EligibilityReport in PUBLISHED
