"""Records hold plain Python values alone: no numpy scalar, no tensor, no list where a tuple is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

import torch
from onnx import helper
from support import onnx_models as om
from torch import nn

import twofour
from twofour.jobs import run_all
from twofour.pipeline.validating import validate_path
from twofour.records.weights import Selection
from twofour.store import from_json, to_json

_PLAIN = (str, int, float, bool, type(None))


def _strange(value: object, place: str) -> Iterator[str]:
    """Places of values that are of no plain type, subclasses of one included."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _strange(getattr(value, field.name), f"{place}.{field.name}")
    elif type(value) is tuple:
        for number, item in enumerate(value):
            yield from _strange(item, f"{place}[{number}]")
    elif type(value) is dict:
        for key, item in value.items():
            yield from _strange(key, f"{place} key")
            yield from _strange(item, f"{place}[{key!r}]")
    elif type(value) not in _PLAIN and not isinstance(value, Enum):
        yield f"{place}: {type(value)}"


def _records(folder: Path) -> Iterator[object]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(8, 128))
    options = twofour.RunOptions(precision=twofour.Precision.FLOAT32)
    yield twofour.run(net, torch.randn(2, 16, 3, 3), out=folder / "torch", options=options)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    model = om.model(nodes, {"w": om.weights(32, 32)}, inputs={"x": [2, 32]})
    path = om.save(model, folder / "m.onnx")
    yield run_all(str(path), folder / "onnx", twofour.RunOptions())
    yield validate_path(path, None, Selection())
    yield twofour.prune(net, "1:4", all_layers=True)


def test_records_of_real_runs_hold_plain_values_and_come_back_from_json(tmp_path: Path) -> None:
    for record in _records(tmp_path):
        assert list(_strange(record, type(record).__name__)) == []
        assert to_json(from_json(type(record), to_json(record))) == to_json(record)
