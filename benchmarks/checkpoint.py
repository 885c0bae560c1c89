"""Prune a Llama-shaped checkpoint that is larger than a given memory, and measure what it takes.

    python benchmarks/checkpoint.py make FOLDER [--gb 4.2]
    python benchmarks/checkpoint.py prune FOLDER OUT [twofour prune options]

`make` writes random bfloat16 weights layer by layer, in shards of about 1 GB, without ever holding
more than one of them. `prune` runs the command line in a process of its own and prints wall time,
CPU time and peak memory beside the size of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 2048, 5632, 32, 8, 32_000
_SHARD = 1 << 30


def make(folder: Path, gigabytes: float) -> None:
    folder.mkdir(parents=True)
    per_layer = 2 * sum(rows * columns for _, rows, columns in _layer())
    layers = max(1, round((gigabytes * 1e9 - 4 * VOCABULARY * HIDDEN) / per_layer))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    where: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    number = total = 0
    for key, tensor in _tensors(layers):
        shard[key] = tensor
        total += tensor.nbytes
        if sum(t.nbytes for t in shard.values()) > _SHARD:
            where |= _write(folder, number, shard)
            shard, number = {}, number + 1
    where |= _write(folder, number, shard)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    print(f"{folder}: {layers} layers, {total / 1e9:.2f} GB in {number + 1} files")


def _write(folder: Path, number: int, shard: dict[str, torch.Tensor]) -> dict[str, str]:
    name = f"model-{number:05d}.safetensors"
    save_file(shard, folder / name, metadata={"format": "pt"})
    return dict.fromkeys(shard, name)


def _layer() -> tuple[tuple[str, int, int], ...]:
    kv = HIDDEN // HEADS * KV_HEADS
    return (
        ("self_attn.q_proj", HIDDEN, HIDDEN),
        ("self_attn.k_proj", kv, HIDDEN),
        ("self_attn.v_proj", kv, HIDDEN),
        ("self_attn.o_proj", HIDDEN, HIDDEN),
        ("mlp.gate_proj", INNER, HIDDEN),
        ("mlp.up_proj", INNER, HIDDEN),
        ("mlp.down_proj", HIDDEN, INNER),
    )


def _tensors(layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn((rows, columns), generator=generator)
        values /= columns**0.5
        return values.to(torch.bfloat16)

    yield "model.embed_tokens.weight", matrix(VOCABULARY, HIDDEN)
    for layer in range(layers):
        start = f"model.layers.{layer}"
        for name, rows, columns in _layer():
            yield f"{start}.{name}.weight", matrix(rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{start}.{norm}.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)
    yield "model.norm.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)
    yield "lm_head.weight", matrix(VOCABULARY, HIDDEN)


def prune(folder: Path, out: Path, options: list[str]) -> None:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    command = [sys.executable, "-m", "twofour", "prune", str(folder), "--out", str(out), "--stream"]
    started = time.perf_counter()
    done = subprocess.run(
        [*command, "--quiet", *options], check=False, env=os.environ, stdout=subprocess.DEVNULL
    )
    wall = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = used.ru_maxrss * 1024
    print(
        f"rc {done.returncode}, wall {wall:.1f} s, CPU {used.ru_utime + used.ru_stime:.1f} s, "
        f"peak memory {peak / 1e9:.2f} GB = {100 * peak / size:.1f} % of {size / 1e9:.2f} GB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("folder", type=Path)
    making.add_argument("--gb", type=float, default=4.2)
    pruning = commands.add_parser("prune")
    pruning.add_argument("folder", type=Path)
    pruning.add_argument("out", type=Path)
    arguments, rest = parser.parse_known_args()
    if arguments.command == "make":
        make(arguments.folder, arguments.gb)
    else:
        prune(arguments.folder, arguments.out, rest)


if __name__ == "__main__":
    main()
