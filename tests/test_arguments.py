"""The Python API: what it exports, how light it is, and what it says of a wrong argument."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import twofour
from twofour.errors import BadInputError
from twofour.store import checked

NET = nn.Sequential(nn.Linear(8, 8))


def test_every_name_of_the_api_is_there_and_no_other() -> None:
    for name in twofour.__all__:
        assert getattr(twofour, name) is not None
    assert dir(twofour) == twofour.__all__
    assert twofour.RunOptions(pattern=twofour.Pattern(1, 4)).pattern.m == 4
    assert issubclass(twofour.BadInputError, twofour.TwofourError)
    with pytest.raises(AttributeError, match="no attribute 'Prune'"):
        _ = twofour.Prune


def test_the_options_of_a_run_can_all_be_made_from_names_of_the_api() -> None:
    for field in dataclasses.fields(twofour.RunOptions()):
        value = getattr(twofour.RunOptions(), field.name)
        if dataclasses.is_dataclass(value):
            assert type(value).__name__ in twofour.__all__


def test_importing_twofour_brings_nothing_heavy() -> None:
    code = (
        "import sys, twofour; dir(twofour); heavy = {'torch', 'onnx', 'numpy', 'pydantic', 'rich',"
        " 'twofour.records'}; print(sorted(heavy & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: twofour.prune("m.onnx"), "model must be a torch.nn.Module in memory, found 'm.on"),  # type: ignore[arg-type]
        (lambda: twofour.prune(NET, exclude="nothing"), "nothing"),
        (lambda: twofour.run("m.onnx", "runs/m"), "example_inputs must be left out"),
        (lambda: twofour.run("m.onnx", options={"a": 1}), "expected RunOptions, found {'a': 1}"),  # type: ignore[arg-type]
        (lambda: twofour.run("m.onnx", options=twofour.CompareOptions()), "expected RunOptions"),  # type: ignore[arg-type]
        (lambda: twofour.compare("a", options=twofour.RunOptions()), "expected CompareOptions"),  # type: ignore[arg-type]
    ],
)
def test_an_argument_of_another_type_is_named_with_what_was_found(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(BadInputError, match=f"(?s){message}"):
        call()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("pattern", "2:4", "RunOptions.pattern: .*found '2:4' of type str"),
        ("precision", "float8", "RunOptions.precision: .*found 'float8'"),
        ("seed", "zero", "RunOptions.seed: .*integer.*found 'zero'"),
        ("input_shapes", (4, 32), r"RunOptions.input_shapes.0: .*found 4 of type int"),
        ("build", None, "RunOptions.build"),
    ],
)
def test_options_are_checked_field_by_field(field: str, value: object, message: str) -> None:
    options = twofour.RunOptions(**{field: value})  # type: ignore[arg-type]  # that is the point
    with pytest.raises(BadInputError, match=message):
        checked(twofour.RunOptions, options)


def test_texts_of_enums_lists_and_paths_become_what_the_field_takes() -> None:
    given = twofour.RunOptions(
        precision="float32",  # type: ignore[arg-type]
        input_shapes=[[1, 8]],  # type: ignore[arg-type]
    )
    found = checked(twofour.RunOptions, given)
    assert found.precision is twofour.Precision.FLOAT32
    assert found.input_shapes == ((1, 8),)
    assert checked(twofour.RunOptions, found) == found
    arrays = twofour.RunOptions(inputs=Path("x.npz"))  # type: ignore[arg-type]
    assert checked(twofour.RunOptions, arrays).inputs == "x.npz"
