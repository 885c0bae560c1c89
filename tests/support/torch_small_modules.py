"""Small modules of the kinds that torch's modes differ on, as programs with fixed weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from twofour.engines.protocol import OpenRequest, TimedModel
from twofour.engines.torch.engine import TorchEngine, TorchProgram
from twofour.records.export import TensorShape

Arrays = dict[str, npt.NDArray[np.generic]]


def open_torch(
    made: TorchProgram, mode: str, engine: TorchEngine | None = None, *, threads: int = 1
) -> TimedModel:
    request = OpenRequest(
        mode=mode, weights="dense", threads=threads, model="", precision="", program=made
    )
    return (engine or TorchEngine()).open(request)


class ConvNet(nn.Module):
    """Returns a dict, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = functional.relu(self.norm(self.first(image)))
        pooled = functional.relu(self.second(hidden)).mean((2, 3))
        return {"logits": self.head(pooled), "pooled": pooled}


class Mlp(nn.Module):
    """Two inputs, the second by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.outer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        returned: torch.Tensor = self.outer(functional.gelu(self.inner(x))) * scale
        return returned


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.project = nn.Linear(32, 96)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor]:
        q, k, v = self.project(self.embed(ids)).unflatten(-1, (3, 2, 16)).movedim(-2, 1).unbind(-2)
        return (functional.scaled_dot_product_attention(q, k, v),)


def program(
    module: nn.Module,
    args: tuple[torch.Tensor, ...],
    kwargs: Mapping[str, torch.Tensor] | None = None,
    *,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...] = ("y",),
) -> TorchProgram:
    kwargs = kwargs or {}
    tensors = zip(inputs, (*args, *kwargs.values()), strict=True)
    return TorchProgram(
        module=module.eval(),
        args=args,
        kwargs=kwargs,
        inputs=tuple(
            TensorShape(
                name=name,
                dtype="float32" if t.is_floating_point() else str(t.dtype).removeprefix("torch."),
                shape=("batch", *t.shape[1:]),
            )
            for name, t in tensors
        ),
        output_names=outputs,
        source="model.py:make",
    )


def conv_net() -> TorchProgram:
    torch.manual_seed(0)
    image = torch.randn(4, 3, 8, 8)
    return program(ConvNet(), (image,), inputs=("image",), outputs=("logits", "pooled"))


def mlp() -> TorchProgram:
    torch.manual_seed(1)
    scale = torch.rand(4, 1)
    return program(Mlp(), (torch.randn(4, 16),), {"scale": scale}, inputs=("x", "scale"))


def attention() -> TorchProgram:
    torch.manual_seed(2)
    return program(Attention(), (torch.randint(0, 20, (3, 6)),), inputs=("ids",))


def transformer() -> TorchProgram:
    """torch's own encoder, whose fused path must not be mistaken for attention."""
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return program(layer, (torch.randn(2, 5, 32),), inputs=("x",))


def arrays_of(made: TorchProgram) -> Arrays:
    return {one.name: tensor.numpy() for one, tensor in zip(made.inputs, made.tensors, strict=True)}


def expected(made: TorchProgram, inputs: Arrays) -> Arrays:
    """What the untouched module gives for the arrays, in float32."""
    args, kwargs = made.arguments([torch.from_numpy(inputs[one.name]) for one in made.inputs])
    with torch.no_grad():
        tensors = made.outputs(made.module(*args, **kwargs))
    return {name: t.numpy() for name, t in zip(made.output_names, tensors, strict=True)}
