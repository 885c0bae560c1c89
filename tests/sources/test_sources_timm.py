"""timm itself needs torchvision and is not installed here.

A small package of the same name stands in for it: is_model, list_models, create_model with
`pretrained`, and models with `pretrained_cfg`, as in timm 1.0.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from twofour.errors import BadInputError, MissingToolError
from twofour.records.options import ExampleInputs
from twofour.sources.callable import TimmSource, open_timm

STAND_IN = """
from torch import nn
__version__ = "1.0.0"

def list_models():
    return ["resnet18", "resnet50"]

def is_model(name):
    return name in list_models()

def create_model(name, pretrained=False):
    if pretrained and name == "resnet50":
        raise OSError("no route to host")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout())
    model.pretrained_cfg = {"input_size": (3, 8, 9)}
    return model
"""


@pytest.fixture
def _timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "timm.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    real = sys.modules.pop("timm", None)
    yield
    sys.modules.pop("timm", None)
    if real is not None:
        sys.modules["timm"] = real


def _source(text: str, seed: int = 0) -> TimmSource:
    return open_timm(text, ExampleInputs(seed=seed))


@pytest.mark.usefixtures("_timm")
def test_a_timm_model_gets_two_images_of_its_own_size() -> None:
    loaded = _source("timm:resnet18").load()
    assert [tuple(a.shape) for a in loaded.args] == [(2, 3, 8, 9)]
    assert loaded.input_names == ("input",)
    assert not loaded.module.training


@pytest.mark.usefixtures("_timm")
def test_random_weights_are_asked_for_by_name_and_follow_the_seed() -> None:
    text = "timm:resnet50?pretrained=false"
    first, again, other = (_source(text, seed).load() for seed in (0, 0, 1))
    states = [m.module.state_dict()["0.weight"] for m in (first, again, other)]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


@pytest.mark.usefixtures("_timm")
def test_weights_that_cannot_be_downloaded_are_an_error_with_a_way_out() -> None:
    with pytest.raises(BadInputError) as caught:
        _source("timm:resnet50").load()
    assert "cannot create 'resnet50'" in caught.value.message
    assert "timm:resnet50?pretrained=false" in str(caught.value.hint)


@pytest.mark.usefixtures("_timm")
def test_an_unknown_name_is_answered_with_close_ones() -> None:
    with pytest.raises(BadInputError) as caught:
        _source("timm:resnet5").load()
    assert "no model 'resnet5'" in caught.value.message
    assert "resnet50" in str(caught.value.hint)


def test_without_timm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingToolError) as caught:
        _source("timm:resnet50").load()
    assert caught.value.exit_code == 3
    assert "twofour[timm]" in str(caught.value.hint)


def test_the_key_tells_name_weights_and_seed_apart() -> None:
    texts = ("timm:resnet50", "timm:resnet18", "timm:resnet50?pretrained=false")
    keys = {_source(text).key() for text in texts} | {_source(texts[0], seed=1).key()}
    assert len(keys) == 4
    assert _source("timm:resnet50?pretrained=true").key() == _source("timm:resnet50").key()
