"""The models by name, and inputs for their cases."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gpu_matrix.encoders import BERT_BASE, VIT_BASE, Bert, VisionTransformer
from gpu_matrix.layers import Size
from gpu_matrix.llama import LLAMA_7B_BLOCK, LlamaBlock
from gpu_matrix.plan import ModelCase

Model = VisionTransformer | Bert | LlamaBlock


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def linears(model: Model) -> list[nn.Linear]:
    """The layers' own; embeddings, pooler and head stay as they are."""
    return [module for module in model.layers.modules() if isinstance(module, nn.Linear)]


def make_model(name: str, *, smoke: bool) -> Model:
    """With random weights; `smoke`: two layers of width 64."""
    if name == "vit-base":
        tiny = Size(64, 2, 4, 128, 1e-12, positions=197)
        return VisionTransformer(tiny if smoke else VIT_BASE)
    if name == "bert-base":
        return Bert(Size(64, 2, 4, 128, 1e-12, 100, 32) if smoke else BERT_BASE)
    return LlamaBlock(Size(64, 2, 4, 192, 1e-6, positions=32) if smoke else LLAMA_7B_BLOCK)


def make_inputs(model: Model, case: ModelCase, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Random inputs of a case; the tokens of the smoke run are as many as its models take."""
    device = next(model.parameters()).device
    if isinstance(model, VisionTransformer):
        return (torch.randn(case.batch, 3, 224, 224, device=device).to(dtype),)
    length = int(case.shape.split()[1])
    if isinstance(model, Bert):
        words, most = model.words.num_embeddings, model.positions.num_embeddings
        return (torch.randint(words, (case.batch, min(length, most)), device=device),)
    hidden, length = len(model.norm.weight), min(length, len(model.cos))
    if case.shape.startswith("prefill"):
        return (torch.randn(case.batch, length, hidden, device=device).to(dtype),)
    width = model.cos.shape[1]
    slots = (case.batch, hidden // width, length, width)
    cache = (torch.randn(slots, device=device).to(dtype) for _ in range(2 * len(model.layers)))
    return (torch.randn(case.batch, 1, hidden, device=device).to(dtype), *cache)
