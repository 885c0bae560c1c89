"""ViT and BERT in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  the name it has everywhere
from torch import Tensor, nn

from gpu_matrix.layers import Linear, Size, split_heads

VIT_BASE = Size(768, 12, 12, 3072, 1e-12, positions=197)
BERT_BASE = Size(768, 12, 12, 3072, 1e-12, vocabulary=30522, positions=512)


class EncoderLayer(nn.Module):
    """A layer of ViT (normalised first) or BERT (normalised after)."""

    def __init__(self, size: Size, *, norm_first: bool) -> None:
        super().__init__()
        self.heads, self.norm_first = size.heads, norm_first
        self.query = Linear(size.hidden, size.hidden)
        self.key = Linear(size.hidden, size.hidden)
        self.value = Linear(size.hidden, size.hidden)
        self.output = Linear(size.hidden, size.hidden)
        self.attention_norm = nn.LayerNorm(size.hidden, eps=size.epsilon)
        self.up = Linear(size.hidden, size.intermediate)
        self.down = Linear(size.intermediate, size.hidden)
        self.output_norm = nn.LayerNorm(size.hidden, eps=size.epsilon)

    def attention(self, x: Tensor) -> Tensor:
        """Full attention without a mask: every token is real."""
        query, key = split_heads(self.query(x), self.heads), split_heads(self.key(x), self.heads)
        value = split_heads(self.value(x), self.heads)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]  # nn

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same."""
        if self.norm_first:
            x = x + self.attention(self.attention_norm(x))
            return x + self.mlp(self.output_norm(x))
        x = self.attention_norm(x + self.attention(x))
        return self.output_norm(x + self.mlp(x))  # type: ignore[no-any-return]  # nn

    def mlp(self, x: Tensor) -> Tensor:
        """Up, exact GELU, down."""
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]  # nn


class VisionTransformer(nn.Module):
    """ViT with 16x16 patches and a class token: (batch, 3, 224, 224) to 1000 scores."""

    def __init__(self, size: Size = VIT_BASE) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size.hidden, kernel_size=16, stride=16)
        self.class_token = nn.Parameter(torch.zeros(1, 1, size.hidden))
        self.positions = nn.Parameter(0.02 * torch.randn(1, size.positions, size.hidden))
        self.layers = nn.ModuleList(EncoderLayer(size, norm_first=True) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.hidden, eps=size.epsilon)
        self.head = nn.Linear(size.hidden, 1000)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Scores of each image."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), dim=1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return (self.head(self.norm(x)[:, 0]),)


class Bert(nn.Module):
    """BERT with its pooler: token numbers to (hidden states, pooled)."""

    def __init__(self, size: Size = BERT_BASE) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.hidden)
        self.positions = nn.Embedding(size.positions, size.hidden)
        self.types = nn.Embedding(2, size.hidden)
        self.norm = nn.LayerNorm(size.hidden, eps=size.epsilon)
        self.layers = nn.ModuleList(
            EncoderLayer(size, norm_first=False) for _ in range(size.layers)
        )
        self.pooler = nn.Linear(size.hidden, size.hidden)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """All tokens are of the first type."""
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]] + self.types.weight[0]
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x, torch.tanh(self.pooler(x[:, 0]))
