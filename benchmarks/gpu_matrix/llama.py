"""A block of Llama in plain torch, for a prompt and for one more token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  the name it has everywhere
from torch import Tensor, nn

from gpu_matrix.layers import Linear, Size, split_heads

LLAMA_7B_BLOCK = Size(4096, 2, 32, 11008, 1e-6, positions=512)


class RmsNorm(nn.Module):
    """Root mean square in float32, as in Llama."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(hidden)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Over the last axis."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves paired (https://arxiv.org/abs/2104.09864, as Llama pairs them)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaLayer(nn.Module):
    """Attention with rotary positions and a SwiGLU feed-forward, no biases."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        linear = partial(Linear, bias=False)
        self.heads = size.heads
        self.attention_norm = RmsNorm(size.hidden, size.epsilon)
        self.query, self.key = linear(size.hidden, size.hidden), linear(size.hidden, size.hidden)
        self.value, self.output = linear(size.hidden, size.hidden), linear(size.hidden, size.hidden)
        self.norm = RmsNorm(size.hidden, size.epsilon)
        self.gate = linear(size.hidden, size.intermediate)
        self.up = linear(size.hidden, size.intermediate)
        self.down = linear(size.intermediate, size.hidden)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], cache: Sequence[Tensor]) -> Tensor:
        """`cache`: () for a prompt, or keys and values whose last position the token fills."""
        normed = self.attention_norm(x)
        query = rotate(split_heads(self.query(normed), self.heads), *angles)
        key = rotate(split_heads(self.key(normed), self.heads), *angles)
        value = split_heads(self.value(normed), self.heads)
        if cache:
            cache[0][:, :, -1:], cache[1][:, :, -1:] = key, value
            key, value = cache
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=not cache)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))  # type: ignore[no-any-return]  # nn


class LlamaBlock(nn.Module):
    """Some layers of Llama and the last norm: hidden states to hidden states."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size = LLAMA_7B_BLOCK) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaLayer(size) for _ in range(size.layers))
        self.norm = RmsNorm(size.hidden, size.epsilon)
        width = size.hidden // size.heads
        steps = 10000.0 ** (-torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(size.positions).float(), steps).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, *cache: Tensor) -> tuple[Tensor, ...]:
        """`cache`: keys and values of each layer, in turn, with room for this token at the end."""
        first = cache[0].shape[2] - 1 if cache else 0
        angles = self.cos[first : first + x.shape[1]], self.sin[first : first + x.shape[1]]
        for index, layer in enumerate(self.layers):
            x = layer(x, angles, cache[2 * index : 2 * index + 2])
        return (self.norm(x),)
