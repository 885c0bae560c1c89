"""Large language models: checkpoints of random weights, and what each command takes on them.

    python benchmarks/large.py make FOLDER [0.1b 1b 7b]
    python benchmarks/large.py measure FOLDER [forecast export prune main script] [--size 1b]

`make` writes Llama-shaped checkpoints in bfloat16 (seeded): FOLDER/0.1b of 0.3 GB, FOLDER/1b of
2.2, FOLDER/7b of 13.5. `measure` runs commands one after the other, each in processes of its own,
and prints seconds and the largest memory of all of them together. `script` is the plain way:
from_pretrained in float16, torch.onnx.export twice, and two sessions of ONNX Runtime one after the
other.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np
import psutil

from twofour.graph.stored import NewTensor, write_store

SIZES = {
    "0.1b": (768, 2048, 12, 12, 12, 32000),
    "1b": (2048, 5632, 22, 32, 4, 32000),
    "7b": (4096, 11008, 32, 32, 32, 32000),
}
"""Hidden size, intermediate size, layers, heads, heads of keys and values, tokens."""
_SHARD_BYTES = 4 << 30


def main() -> None:
    """Make checkpoints, or measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("make", "measure", "script"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--size", default="1b", choices=tuple(SIZES))
    asked = parser.parse_intermixed_args()
    if asked.what == "make":
        for size in asked.names or [*SIZES]:
            make(asked.folder / size, size)
    elif asked.what == "script":
        plain_script(asked.folder)
    else:
        for name in asked.names or ["forecast", "export", "prune", "main", "script"]:
            measure(asked.folder / asked.size, name)


def make(folder: Path, size: str) -> None:
    """A checkpoint folder as save_pretrained writes it, in shards."""
    hidden, inner, layers, heads, key_heads, tokens = SIZES[size]
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": tokens,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shards: list[dict[str, NewTensor]] = [{}]
    for number, (name, shape) in enumerate(shapes(size)):
        if sum(2 * int(np.prod(t.shape)) for t in shards[-1].values()) > _SHARD_BYTES:
            shards.append({})
        shards[-1][name] = random_tensor(shape, number)
    names = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        names.update(dict.fromkeys(tensors, file))
        write_store(folder / file, tensors, {})
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def shapes(size: str) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama's weights."""
    hidden, inner, layers, heads, key_heads, tokens = SIZES[size]
    narrow = hidden // heads * key_heads
    found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (tokens, hidden))]
    for number in range(layers):
        start = f"model.layers.{number}"
        found += [
            (f"{start}.input_layernorm.weight", (hidden,)),
            (f"{start}.self_attn.q_proj.weight", (hidden, hidden)),
            (f"{start}.self_attn.k_proj.weight", (narrow, hidden)),
            (f"{start}.self_attn.v_proj.weight", (narrow, hidden)),
            (f"{start}.self_attn.o_proj.weight", (hidden, hidden)),
            (f"{start}.post_attention_layernorm.weight", (hidden,)),
            (f"{start}.mlp.gate_proj.weight", (inner, hidden)),
            (f"{start}.mlp.up_proj.weight", (inner, hidden)),
            (f"{start}.mlp.down_proj.weight", (hidden, inner)),
        ]
    return [*found, ("model.norm.weight", (hidden,)), ("lm_head.weight", (tokens, hidden))]


def random_tensor(shape: tuple[int, ...], seed: int) -> NewTensor:
    """Normal numbers of the size that such weights have; ones for a norm."""

    def write(stream: BinaryIO) -> None:
        values = np.ones(shape, np.float32)
        if len(shape) > 1:
            values = np.random.default_rng(seed).standard_normal(shape, np.float32) * 0.02
        values.astype(ml_dtypes.bfloat16).view(np.uint16).tofile(stream)

    return NewTensor(dtype="bfloat16", shape=shape, write=write)


def measure(model: Path, name: str) -> None:
    """Run one command and print what it took."""
    twofour = [sys.executable, "-m", "twofour"]
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        out = ["--out", str(Path(folder, "run"))]
        commands = {
            "forecast": [*twofour, "forecast", str(model), "--gpu", "A100"],
            "export": [*twofour, "export", str(model), *out],
            "prune": [*twofour, "prune", str(model), *out],
            "main": [*twofour, "prune-export-build", str(model), *out],
            "script": [sys.executable, __file__, "script", str(model)],
        }
        started, peak = time.perf_counter(), 0
        with (model.parent / f"{model.name}-{name}.log").open("w") as log:
            process = psutil.Popen(commands[name], stdout=log, stderr=subprocess.STDOUT)
            while process.poll() is None:
                peak = max(peak, _memory(process))
                time.sleep(0.1)
        took = time.perf_counter() - started
        print(
            f"{model.name} {name}: {took:.0f} s, {peak / 1e9:.2f} GB, exit {process.returncode}",
            flush=True,
        )


def _memory(process: psutil.Process) -> int:
    """Anonymous memory of a process and all below it; mapped files are the system's to drop."""
    total = 0
    try:
        for each in (process, *process.children(recursive=True)):
            memory = each.memory_info()
            total += memory.rss - memory.shared
    except psutil.Error:  # one has just ended
        return 0
    return total


def plain_script(model: Path) -> None:
    """What one would write by hand, without pruning."""
    import onnxruntime
    import torch
    from transformers import AutoModelForCausalLM

    folder = Path(tempfile.mkdtemp(dir=model.parent))
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float16).eval()
    module.config.use_cache = False
    ids = torch.randint(0, 1000, (2, 16))
    feeds = {"input_ids": ids.numpy(), "attention_mask": np.ones((2, 16), np.int64)}
    inputs = (ids, torch.ones_like(ids))
    for name in ("dense", "sparse"):
        torch.onnx.export(
            module, inputs, str(folder / f"{name}.onnx"), dynamo=True, external_data=True
        )
    del module
    for name in ("dense", "sparse"):
        session = onnxruntime.InferenceSession(folder / f"{name}.onnx")
        names = [value.name for value in session.get_inputs()]
        session.run(None, dict(zip(names, feeds.values(), strict=False)))
        del session
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
