"""A Llama-shaped checkpoint of random weights in bfloat16, written array by array."""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from twofour.graph.stored import NewTensor, write_store


def write_llama(
    folder: Path, *, hidden: int, inner: int, layers: int, heads: int, tokens: int
) -> None:
    """config.json and model.safetensors."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (tokens, hidden),
        "lm_head.weight": (tokens, hidden),
        "model.norm.weight": (hidden,),
    }
    for number in range(layers):
        start = f"model.layers.{number}"
        for name in "qkvo":
            shapes[f"{start}.self_attn.{name}_proj.weight"] = (hidden, hidden)
        for name in ("gate", "up"):
            shapes[f"{start}.mlp.{name}_proj.weight"] = (inner, hidden)
        shapes[f"{start}.mlp.down_proj.weight"] = (hidden, inner)
        for name in ("input", "post_attention"):
            shapes[f"{start}.{name}_layernorm.weight"] = (hidden,)
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": tokens,
        "max_position_embeddings": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: _random(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    write_store(folder / "model.safetensors", tensors, {})


def _random(shape: tuple[int, ...], seed: int) -> NewTensor:
    def write(stream: BinaryIO) -> None:
        values = np.random.default_rng(seed).standard_normal(shape, np.float32) * 0.02
        values.astype(ml_dtypes.bfloat16).view(np.uint16).tofile(stream)

    return NewTensor(dtype="bfloat16", shape=shape, write=write)
