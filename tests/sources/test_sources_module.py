"""Modules that no code of the user's makes: in memory, through the whole chain; of timm."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.small_run import Recorder
from torch import nn

import twofour
from twofour.comparing.compared import open_compared
from twofour.errors import BadInputError, MissingToolError
from twofour.jobs import run_all
from twofour.records.options import CompareOptions, ExampleInputs
from twofour.sources.callable import ModuleSource, TimmSource, open_timm

FLOAT32 = twofour.RunOptions(precision=twofour.Precision.FLOAT32)


class Scaled(nn.Module):
    """Two products; `scale` is a plain attribute that forward goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(32, 64)
        self.two = nn.Linear(64, 32)
        self.scale = 2.0

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        """[batch, 32] -> [batch, 32]."""
        y: torch.Tensor = self.two(torch.relu(self.one(x))) * self.scale
        return y if shift is None else y + shift


@pytest.fixture
def module() -> Scaled:
    torch.manual_seed(0)
    return Scaled().train()


def test_a_module_goes_through_the_chain_and_stays_as_it_is(module: Scaled, tmp_path: Path) -> None:
    """It cannot be loaded again: `compare` takes the files of the run."""
    before = copy.deepcopy(module.state_dict())
    result = twofour.run(module, torch.randn(4, 32), out=tmp_path / "run", options=FLOAT32)
    assert [v.layer for v in result.report.verdicts] == ["one", "two"]
    assert result.prune.source == "the module test_sources_module.Scaled"
    assert not twofour.validate(tmp_path / "run").broken
    assert module.training
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    compared = open_compared([tmp_path / "run"], None, CompareOptions())
    assert [model.torch for model in compared.models] == [None, None]
    assert all(model.onnx is not None for model in compared.models)


def test_weights_settings_inputs_and_structure_are_in_the_key(module: Scaled) -> None:
    def key(inputs: torch.Tensor, module: nn.Module = module) -> str:
        return ModuleSource(module, inputs, ExampleInputs()).key()

    ones = torch.ones(4, 32)
    assert key(ones) == key(ones.clone(), copy.deepcopy(module).eval())
    keys = [key(ones), key(ones * 2), key(torch.ones(5, 32))]
    module.scale = 3.0
    keys.append(key(ones))
    module.two.bias.data.zero_()
    keys.append(key(ones))
    module.one = nn.Sequential(module.one)  # type: ignore[assignment]  # another structure
    keys.append(key(ones))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (None, None, "comes without example inputs"),
        ("x.npz", None, "the example inputs are of type str"),
        (torch.ones(4, 32), twofour.RunOptions(input_shapes=((4, 32),)), "in the options too"),
        ((torch.ones(4, 32),) * 3, None, "too many positional arguments"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    module: Scaled, tmp_path: Path, inputs: object, options: twofour.RunOptions | None, message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        twofour.run(module, inputs, out=tmp_path / "run", options=options)


def test_a_module_that_cannot_be_copied_is_refused(module: Scaled) -> None:
    module.hidden = torch.ones(3, requires_grad=True) * 2  # no leaf
    with pytest.raises(BadInputError, match="Scaled cannot be copied"):
        ModuleSource(module, torch.ones(4, 32), ExampleInputs()).load()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused_with_what_to_give(tmp_path: Path) -> None:
    scripted: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(BadInputError, match="Sequential is TorchScript"):
        twofour.run(scripted, torch.ones(1, 8), out=tmp_path / "run")


def test_a_metric_is_looked_at_before_the_first_stage(module: Scaled, tmp_path: Path) -> None:
    file = tmp_path / "metric.py"
    file.write_text("def none():\n    return 1\n\nnumber = 3\n")
    for name, message in [
        ("none", "cannot be called with predict"),
        ("number", "not a function"),
        ("missing", "has no 'missing'"),
    ]:
        recorder = Recorder()
        options = twofour.RunOptions(metric=f"{file}:{name}")
        source = ModuleSource(module, torch.ones(4, 32), ExampleInputs())
        with pytest.raises(BadInputError, match=message):
            run_all(source, tmp_path / "run", options, recorder)
        assert recorder.did == []


# --- of timm --------------------------------------------------------------------------------------

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
"""In the place of timm 1.0, which needs torchvision."""


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
def test_a_timm_model_gets_two_images_of_its_size_and_random_weights_follow_the_seed() -> None:
    assert _source("timm:resnet18").load().input_names == ("input",)
    text = "timm:resnet50?pretrained=false"
    first, again, other = (_source(text, seed).load() for seed in (0, 0, 1))
    assert [tuple(a.shape) for a in first.args] == [(2, 3, 8, 9)]
    assert not first.module.training
    states = [m.module.state_dict()["0.weight"] for m in (first, again, other)]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


@pytest.mark.usefixtures("_timm")
def test_what_cannot_be_downloaded_or_is_not_there_is_an_error_with_a_way_out() -> None:
    for name, message, hint in (
        ("resnet50", "cannot create 'resnet50'", "timm:resnet50?pretrained=false"),
        ("resnet5", "no model 'resnet5'", "resnet50"),
    ):
        with pytest.raises(BadInputError) as caught:
            _source(f"timm:{name}").load()
        assert message in caught.value.message
        assert hint in str(caught.value.hint)


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
