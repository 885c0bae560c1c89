"""The examples of docs/training.md, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trained import lost, net, pruned_net, zeros
from torch import Tensor, nn

import twofour

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def example(word: str) -> str:
    """The block of code that contains the word."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (found,) = (block for block in blocks if word in block)
    return str(found)


def loader() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 16), torch.randint(8, (8,))) for _ in range(4)]


def test_the_plain_loop_trains_and_keeps_the_zeros() -> None:
    model, space = pruned_net(), dict[str, Any]()
    masks, before = zeros(model), model.get_parameter("0.weight").detach().clone()
    exec(example("def finetune"), space)
    space["finetune"](model, net(), loader())
    assert lost(model, masks) == 0
    assert not torch.equal(model.get_parameter("0.weight"), before)


def test_the_trainer_of_transformers_keeps_the_zeros(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = pruned_net()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.inner(x).square().sum()}

    model = WithLoss()
    masks = zeros(model)
    space: dict[str, Any] = {
        "twofour": twofour,
        "model": model,
        "data": [{"x": row} for inputs, _ in loader() for row in inputs],
        "arguments": transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=6, save_steps=3, use_cpu=True, report_to=[]
        ),
    }
    exec(example("TrainerCallback"), space)
    assert lost(model, masks) == 0


def test_the_trainer_of_lightning_keeps_the_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]  # not installed
        def __init__(self) -> None:
            super().__init__()
            self.inner = pruned_net()

        def training_step(self, batch: tuple[Tensor, Tensor], _number: int) -> Tensor:
            return nn.functional.cross_entropy(self.inner(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    monkeypatch.chdir(tmp_path)
    module = Module()
    masks = zeros(module)
    rows = torch.utils.data.TensorDataset(*map(torch.cat, zip(*loader(), strict=True)))
    data = torch.utils.data.DataLoader(rows, batch_size=8)
    exec(example("lightning.Callback"), {"twofour": twofour, "module": module, "loader": data})
    assert lost(module, masks) == 0
